"""Token ids -> text, as they come."""

from __future__ import annotations

import codecs

from onekernel.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one answer into pieces of text that never split a character; special tokens are skipped.

    Each id is looked up as bytes and fed to an incremental UTF-8 decoder, which holds back at most the three bytes of
    an unfinished character. So the cost of a token depends on its own length, not on the answer's, and the pieces
    joined are `Tokenizer.decode` of all ids by construction: no window is decoded twice and compared.

    `continues` says that the text goes on from a prompt, so that SentencePiece's space before the first word is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokens = tokenizer.tokens
        self._skipped = tokenizer.skipped_token_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = continues

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is now certain, which may be empty. Invalid bytes become U+FFFD."""
        if token_id in self._skipped:
            return ""
        piece = self._tokens.of(token_id)
        if piece and not self._started:
            self._started = True
            piece = self._tokens.of_first(token_id)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """Return what is held back: U+FFFD if the answer ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)
