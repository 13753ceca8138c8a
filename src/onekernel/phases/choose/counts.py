"""Which tokens a sequence already holds: the state behind the penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onekernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Presence in the prompt, bool (vocab,), and occurrences in the output, int32 (vocab,), by token id."""

    prompt: Tensor
    output: Tensor

    @classmethod
    def start(
        cls, token_ids: Sequence[int], prompt_tokens: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> TokenCounts:
        """Count a sequence of ids below vocab_size whose first `prompt_tokens` are the prompt and the rest output."""
        ids = torch.tensor(token_ids, dtype=torch.long)
        occurrences = torch.bincount(ids[prompt_tokens:], minlength=vocab_size).int()
        present = torch.bincount(ids[:prompt_tokens], minlength=vocab_size) > 0
        return cls(present.to(device), occurrences.to(device))

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        self.output[token_id] += 1

    def remove(self, token_id: int) -> None:
        """Take a token of the output back; raises ConfigError if there is none."""
        if int(self.output[token_id]) == 0:
            raise ConfigError(f"token {token_id} is not in the output, so it cannot be taken back")
        self.output[token_id] -= 1
