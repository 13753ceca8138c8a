"""What a launch is told about choosing tokens: a record for each sequence, counts, bias and mask, on the device.

Counts are made anew from the accepted tokens at each launch, so that what a launch made beyond them never counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from onekernel.config import Sampling
from onekernel.device.kernel import Arg
from onekernel.errors import ConfigError
from onekernel.phases.choose.filters import BAN, COLDEST
from onekernel.plan.abi import MAX_LAUNCH_TOKENS, PROMPT_TOKEN, REPORT_WORDS, SAMPLING, ChooseFlag, ChooseMode
from onekernel.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Choosing:
    """How one sequence's tokens are chosen. `tokens` are those so far, the first `prompt_tokens` of them the prompt.

    mask: bool (vocab_size,) on the CPU, True where a token is allowed; it holds for all tokens of the launch.
    """

    sampling: Sampling
    tokens: Sequence[int] = ()
    prompt_tokens: int = 0
    mask: torch.Tensor | None = None

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p may drop tokens; greedy takes no notice of them."""
        sampling = self.sampling
        return not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)

    @property
    def mode(self) -> ChooseMode:
        """What the kernel must do for it."""
        sampling = self.sampling
        if self.filtered or sampling.logprobs is not None:
            return ChooseMode.ROUNDS
        plain = sampling.greedy and not sampling.penalised and not sampling.logit_bias and self.mask is None
        return ChooseMode.GREEDY if plain else ChooseMode.SCORED

    @property
    def record(self) -> npt.NDArray[np.void]:
        """The record that the kernel reads."""
        sampling = self.sampling
        flags = ChooseFlag.MASKED * (self.mask is not None) | ChooseFlag.BIASED * bool(sampling.logit_bias)
        flags |= ChooseFlag.PENALISED * sampling.penalised | ChooseFlag.TOP_P * (sampling.top_p < 1.0)
        flags |= ChooseFlag.FILTERED * self.filtered
        values = {
            "seed": sampling.seed,
            "top_p": sampling.top_p,
            "flags": flags,
            "top_k": min(sampling.top_k, 2**32 - 1),
            "logprobs": 0 if sampling.logprobs is None else sampling.logprobs + 1,
            "temperature": 0.0 if sampling.greedy else max(sampling.temperature, COLDEST),
            "least": math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
            "repetition": sampling.repetition_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
        }
        record = np.zeros((), SAMPLING.dtype)
        for name, value in values.items():
            record[name] = value
        return record


class ChooseBuffers:
    """The arrays of `struct Choosing` in phases/choose/launch.cuh, for all launches of one plan."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        sequences, vocab = plan.limits.sequences, plan.config.vocab_size
        self._vocab_limit = int(plan.header["vocab_limit"])
        self._device = device
        self._sampling = torch.zeros(sequences * SAMPLING.dtype.itemsize, dtype=torch.uint8, device=device)
        self._counts = torch.zeros(sequences, vocab, dtype=torch.int32, device=device)
        self._bias = torch.zeros(sequences, vocab, dtype=torch.float32, device=device)
        self._allowed = torch.zeros(sequences, -(-vocab // 32), dtype=torch.int32, device=device)
        self._scores = torch.empty(sequences, vocab, dtype=torch.float32, device=device)
        self._words = torch.zeros(sequences, plan.choice_words, dtype=torch.int64, device=device)
        reports = torch.zeros(
            MAX_LAUNCH_TOKENS, sequences, REPORT_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._reports, self._report_words = reports, reports.numpy()
        self._reported: list[int | None] = [None] * sequences
        """For each sequence, how many of the likeliest tokens are reported."""

    def load(self, choosing: Sequence[Choosing], limit: int) -> tuple[ChooseMode, list[Arg]]:
        """Write what a launch of `limit` tokens reads, and return its arguments; without `choosing` all are greedy.

        Raises ConfigError for a bias on a token that does not exist.
        """
        mode = max((one.mode for one in choosing), default=ChooseMode.GREEDY)
        self._reported = [None] * len(self._reported)
        if mode > ChooseMode.GREEDY:
            records = np.stack([one.record for one in choosing])
            self._sampling.copy_(torch.from_numpy(records.view(np.uint8).reshape(-1)))
            for sequence, one in enumerate(choosing):
                self._load_one(sequence, one)
        if mode == ChooseMode.ROUNDS:
            self._words.zero_()
            self._report_words[:limit] = 0
        buffers = [self._sampling, self._counts, self._bias, self._allowed, self._scores, self._words, self._reports]
        return mode, [int(mode), *buffers]

    def report(self, index: int, sequence: int) -> tuple[float | None, tuple[tuple[int, float], ...]] | None:
        """Return a token's log probability and (id, log probability) of the likeliest; None if not all of it is there.

        Every word carries the token's tag, so it does not matter in which order they become visible.
        """
        named = self._reported[sequence]
        if named is None:
            return None, ()
        words = self._report_words[index, sequence, : 1 + 2 * named].copy()
        if (words >> 32 != index + 1).any():
            return None
        low = (words & 0xFFFFFFFF).astype(np.uint32)
        logprobs = low.view(np.float32)
        return float(logprobs[0]), tuple(zip(low[1::2].tolist(), logprobs[2::2].tolist(), strict=True))

    def _load_one(self, sequence: int, one: Choosing) -> None:
        sampling = one.sampling
        if sampling.logprobs is not None:
            self._reported[sequence] = min(sampling.logprobs, self._vocab_limit)
        if sampling.logit_bias:
            ids = list(sampling.logit_bias)
            if max(ids) >= self._vocab_limit:
                raise ConfigError(
                    f"logit_bias names token {max(ids)}; the vocabulary ends at {self._vocab_limit - 1}: leave it out"
                )
            bias = torch.tensor([-math.inf if b <= BAN else b for b in sampling.logit_bias.values()])
            self._scatter(self._bias[sequence], torch.tensor(ids), bias.float())
        if sampling.penalised:
            seen, where = np.unique(np.asarray(one.tokens, np.int64), return_inverse=True)
            output = np.bincount(where[one.prompt_tokens :], minlength=len(seen))
            prompt = np.bincount(where[: one.prompt_tokens], minlength=len(seen)) > 0
            counts = (output | np.where(prompt, PROMPT_TOKEN, 0)).astype(np.uint32).view(np.int32)
            self._scatter(self._counts[sequence], torch.from_numpy(seen), torch.from_numpy(counts))
        if one.mask is not None:
            bits = np.zeros(4 * self._allowed.shape[1], np.uint8)
            packed = np.packbits(one.mask.cpu().numpy(), bitorder="little")
            bits[: len(packed)] = packed
            self._allowed[sequence].copy_(torch.from_numpy(bits.view(np.int32)))

    def _scatter(self, row: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
        row.zero_()
        row[ids.to(self._device)] = values.to(self._device)
