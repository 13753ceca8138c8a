"""Turns chosen tokens into deltas: detokenize, match stops, mark thinking, attach log probabilities."""

from __future__ import annotations

from onekernel.config import SamplingParams
from onekernel.engine.backend import DecodedToken
from onekernel.engine.request import Delta, FinishReason, TokenLogprob
from onekernel.text.detokenize import Detokenizer
from onekernel.text.stop import StopMatcher
from onekernel.text.thinking import ThinkingSplitter
from onekernel.text.tokenizer import Tokenizer


class Answer:
    """One growing answer. Feed it tokens with `push` until `finish_reason` is set, then call `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        end_ids: frozenset[int],
        splitter: ThinkingSplitter | None,
        *,
        continues: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self.end_ids = end_ids
        self._with_logprobs = params.logprobs is not None
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops = StopMatcher(params.stop)
        self._splitter = splitter
        self._text: list[str] = []
        self._thinking: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.sampled_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The text so far, thinking left out."""
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        """The thinking part so far."""
        return "".join(self._thinking)

    def push(self, token: DecodedToken) -> list[Delta]:
        """Take one token; return its deltas, the first of which carries its id and log probability."""
        self.sampled_tokens += 1
        if token.token_id in self.end_ids:
            self.finish_reason = "stop"
            return []
        self.token_ids.append(token.token_id)
        logprobs = (self._logprob(token),) if self._with_logprobs else ()
        self.logprobs.extend(logprobs)
        text = self._stops.push(self._detokenizer.push(token.token_id))
        if self._stops.hit is not None:
            self.finish_reason = "stop"
        return self._deltas(text, (token.token_id,), logprobs)

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Flush what was held back and close with `reason`, unless the answer has stopped already."""
        rest = self._stops.push(self._detokenizer.finish()) + self._stops.flush()
        if self._stops.hit is not None:
            self.finish_reason = "stop"
        deltas = self._deltas(rest, (), ())
        if self._splitter is not None:
            deltas += [self._note(text, thinking) for text, thinking in self._splitter.flush() if text]
        self.finish_reason = self.finish_reason or reason
        return [*deltas, Delta("", finish_reason=self.finish_reason)]

    def _deltas(self, text: str, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> list[Delta]:
        pieces = self._splitter.push(text) if self._splitter is not None else [(text, False)]
        deltas = [self._note(piece, thinking) for piece, thinking in pieces if piece]
        if not ids:
            return deltas
        first = deltas[0] if deltas else Delta("")
        return [Delta(first.text, ids, logprobs, first.thinking), *deltas[1:]]

    def _note(self, text: str, thinking: bool) -> Delta:
        (self._thinking if thinking else self._text).append(text)
        return Delta(text, thinking=thinking)

    def _logprob(self, token: DecodedToken) -> TokenLogprob:
        top = tuple(self._named(token_id, logprob) for token_id, logprob in token.top)
        if token.logprob is None:
            raise ValueError("the backend returned no log probability although one was asked for")
        return self._named(token.token_id, token.logprob, top)

    def _named(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, raw.decode("utf-8", "replace"), tuple(raw), logprob, top)
