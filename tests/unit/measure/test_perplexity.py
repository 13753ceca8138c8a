"""Perplexity against a float64 computation written out the long way, and against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from onekernel.errors import ConfigError, NumericError
from onekernel.measure.perplexity import Estimate, running_perplexity, windows
from tests import oracle

VOCAB = 50


def table_logits(tokens: Sequence[int]) -> torch.Tensor:
    """Logits that depend on the last token and its position: enough to notice a shift by one."""
    positions = torch.arange(len(tokens))[:, None]
    return torch.sin(torch.tensor(tokens)[:, None] * 1.7 + positions * 0.3 + torch.arange(VOCAB) * 2.1) * 3


def logits_from(tokens: Sequence[int], first: int, part: int = 7) -> Iterator[torch.Tensor]:
    yield from table_logits(tokens)[first:].split(part)


def by_hand(token_ids: Sequence[int], n_ctx: int, bos: int | None) -> tuple[float, float]:
    """llama-perplexity's loop in plain Python: perplexity and its error."""
    losses = []
    for start in range(0, len(token_ids) // n_ctx * n_ctx, n_ctx):
        window = list(token_ids[start : start + n_ctx])
        if bos is not None:
            window[0] = bos
        logits = table_logits(window).double()
        for position in range(n_ctx // 2, n_ctx - 1):
            weights = [math.exp(float(logit)) for logit in logits[position]]
            losses.append(-math.log(weights[window[position + 1]] / sum(weights)))
    mean = sum(losses) / len(losses)
    variance = sum(loss * loss for loss in losses) / len(losses) - mean * mean
    return math.exp(mean), math.sqrt(variance / (len(losses) - 1)) * math.exp(mean)


@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("n_ctx", [4, 16, 33])
def test_it_is_the_written_out_computation(n_ctx: int, bos: int | None) -> None:
    token_ids = torch.randint(VOCAB, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    *_, estimate = running_perplexity(windows(token_ids, n_ctx, bos), logits_from)
    ppl, error = by_hand(token_ids, n_ctx, bos)
    assert estimate.ppl == pytest.approx(ppl, rel=1e-6)
    assert estimate.error == pytest.approx(error, rel=1e-6)
    assert estimate.tokens == (150 // n_ctx) * (n_ctx - 1 - n_ctx // 2)


def test_windows_do_not_overlap_and_the_rest_is_left_out() -> None:
    assert windows(range(10), 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(10), 4, 99) == [[99, 1, 2, 3], [99, 5, 6, 7]]


@pytest.mark.parametrize(
    ("tokens", "n_ctx", "message"),
    [(9, 10, "the text has 9 tokens and one window takes 10"), (9, 3, "a window of 3 tokens has no second half")],
)
def test_what_cannot_be_scored_is_refused(tokens: int, n_ctx: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windows(range(tokens), n_ctx, None)


def test_the_estimate_runs_over_more_and_more_windows() -> None:
    token_ids = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    running = list(running_perplexity(windows(token_ids, 16, None), logits_from))
    alone = [list(running_perplexity(windows(token_ids[: 16 * (n + 1)], 16, None), logits_from))[-1] for n in range(4)]
    assert running == alone


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    [estimate] = running_perplexity([list(range(20))], lambda tokens, first: [torch.zeros(len(tokens) - first, VOCAB)])
    assert estimate.ppl == pytest.approx(VOCAB)
    assert estimate.error == pytest.approx(0.0, abs=1e-5)


def test_non_finite_logits_name_the_window() -> None:
    def broken(tokens: Sequence[int], first: int) -> list[torch.Tensor]:
        return [torch.full((len(tokens) - first, VOCAB), math.nan)]

    with pytest.raises(NumericError, match="window 1"):
        list(running_perplexity([list(range(20))], broken))


def test_one_token_has_no_error_estimate() -> None:
    assert Estimate(1, 2.0, 4.0).error == 0.0


def test_through_the_backend_it_is_that_of_transformers(tmp_path: Path) -> None:
    """The real path: paged cache, prefill of the first half, logits of the second in chunks."""
    from onekernel.engine.backend import MemoryReport
    from onekernel.engine.reference_backend import ReferenceBackend
    from onekernel.models.load import load_weights
    from onekernel.models.model import Model
    from onekernel.models.registry import model_config
    from onekernel.weights.open import open_checkpoint

    theirs = oracle.make("llama", tmp_path, max_position_embeddings=2048)
    checkpoint = open_checkpoint(str(tmp_path))
    config = model_config(checkpoint.settings.config)
    weights = load_weights(checkpoint, config, dtype=torch.float32, device="cpu", progress=lambda done, total: None)
    backend = ReferenceBackend(
        Model(config, weights), max_context=1100, num_pages=18, vocab_limit=300, memory=MemoryReport(0, 0, 0)
    )
    n_ctx = 1100  # each half is more than one prefill chunk
    token_ids = torch.randint(300, (2 * n_ctx,), generator=torch.Generator().manual_seed(3)).tolist()
    cut = windows(token_ids, n_ctx, 1)
    *_, estimate = running_perplexity(cut, backend.logits)
    losses = []
    for window in cut:
        log_probabilities = oracle.logits(theirs, window).double().log_softmax(dim=1)
        losses += [-float(log_probabilities[p, window[p + 1]]) for p in range(n_ctx // 2, n_ctx - 1)]
    assert math.log(estimate.ppl) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert backend.logits(token_ids[:3], 0) is not None
