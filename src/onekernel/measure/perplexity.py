"""Perplexity of a text in llama-perplexity's windows, so that the figures can be set beside llama.cpp's.

The text is cut into windows of n_ctx tokens that do not overlap, a rest is left out; each window begins with the BOS
token in place of its first one, if the model adds it; tokens in its second half are scored, each given all before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from onekernel.errors import ConfigError, NumericError

LogitsFrom = Callable[[Sequence[int], int], Iterable[torch.Tensor]]
"""(tokens, first) -> logits after tokens[first], tokens[first + 1], ...: consecutive parts, (n, vocab_size) float32."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sums over scored tokens of the negative log likelihood (nats) and of its square."""

    tokens: int = 0
    nll: float = 0.0
    nll_squared: float = 0.0

    @property
    def ppl(self) -> float:
        """exp(mean negative log likelihood)."""
        return math.exp(self.nll / self.tokens)

    @property
    def error(self) -> float:
        """Standard error of `ppl`, by propagation of that of the mean, as llama-perplexity prints it."""
        if self.tokens < 2:
            return 0.0
        mean = self.nll / self.tokens
        variance = max(0.0, self.nll_squared / self.tokens - mean * mean)
        return math.sqrt(variance / (self.tokens - 1)) * self.ppl

    def plus(self, nll: torch.Tensor) -> Estimate:
        """Return the estimate with these tokens' losses, (n,) float64, added."""
        return Estimate(
            self.tokens + nll.numel(), self.nll + float(nll.sum()), self.nll_squared + float(nll.square().sum())
        )


def windows(token_ids: Sequence[int], n_ctx: int, bos_token_id: int | None) -> list[list[int]]:
    """Return the windows of n_ctx tokens; raises ConfigError if there is not one."""
    if n_ctx < 4:
        raise ConfigError(f"a window of {n_ctx} tokens has no second half to score; use --ctx-size 4 or more")
    cut = [list(token_ids[start : start + n_ctx]) for start in range(0, len(token_ids) - n_ctx + 1, n_ctx)]
    if not cut:
        raise ConfigError(
            f"the text has {len(token_ids)} tokens and one window takes {n_ctx}; "
            "take a longer text or a smaller --ctx-size"
        )
    if bos_token_id is not None:
        for window in cut:
            window[0] = bos_token_id
    return cut


def running_perplexity(cut: Sequence[Sequence[int]], logits_from: LogitsFrom) -> Iterator[Estimate]:
    """Yield the estimate over the first, the first two, ... windows.

    Raises NumericError naming the window if its logits are not finite.
    """
    estimate = Estimate()
    for number, window in enumerate(cut, start=1):
        first = len(window) // 2  # its logits give the token after it
        for nll in losses(window, first, logits_from):
            estimate = estimate.plus(nll)
        if not math.isfinite(estimate.nll):
            raise NumericError(f"window {number} has non-finite logits, so the text has no perplexity")
        yield estimate


def losses(window: Sequence[int], first: int, logits_from: LogitsFrom) -> Iterator[torch.Tensor]:
    """Yield negative log likelihoods, (n,) float64, of window[first + 1:], each given all tokens before it."""
    done = first + 1
    for logits in logits_from(window[:-1], first):
        targets = torch.tensor(window[done : done + len(logits)], device=logits.device)
        chosen = logits.gather(1, targets[:, None])[:, 0].double()
        yield (logits.double().logsumexp(dim=1) - chosen).cpu()
        done += len(logits)
