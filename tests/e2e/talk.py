"""A model whose answers are written down, one for each question, so that what a client shows can be tested exactly."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from onekernel.config import Sampling
from onekernel.engine.backend import DecodedToken, SequenceState
from onekernel.engine.request import CancelToken
from onekernel.text.tokenizer import Tokenizer
from tests.unit.engine.conftest import EOS, Script, ScriptedBackend, ScriptedSequence, _bytes_to_letters

TEMPLATE = """{# a template that names </think> is one of a thinking model #}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """


@dataclass(frozen=True, slots=True)
class Line:
    """What is answered: text, token by token (a byte each), and then the end of the answer or an error."""

    text: str
    error: BaseException | None = None
    delay_s: float = 0.0


@dataclass
class TalkBackend(ScriptedBackend):
    """Answers the last question of the chat from `lines`; notes every prompt as text."""

    script: Script = field(default_factory=lambda: Script(()))
    lines: dict[str, Line] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        assert isinstance(sequence, ScriptedSequence)
        prompt = bytes(sequence.prompt).decode()
        line = self.lines[prompt.rpartition("user: ")[2].removesuffix("\nassistant: ")]
        self.samplings.append(sampling)
        if not sequence.made:  # a later call goes on where a slice ended
            self.prompts.append(prompt)
        tokens: Sequence[int] = [*line.text.encode(), EOS]
        for token in tokens[sequence.made :][:limit]:
            if cancel.is_set:
                return
            if token == EOS and line.error is not None:
                raise line.error
            time.sleep(line.delay_s)
            sequence.made += 1
            yield DecodedToken(token)


def byte_chat_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer whose ids are the bytes, with a chat template; writes its files to `folder`."""
    letters = {
        letter: byte for byte, letter in enumerate(_bytes_to_letters(sorted(pre_tokenizers.ByteLevel.alphabet())))
    }
    hub = HubTokenizer(models.BPE(vocab=letters, merges=[]))
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hub.decoder = decoders.ByteLevel()
    hub.add_special_tokens(["<eos>"])
    hub.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_directory(folder, {"eos_token_id": EOS}, {})
