"""The small ternary model that is committed: it computes what its card says, on any machine.

benchmarks/train_ternary.py makes it on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.measure.perplexity import running_perplexity, windows

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "ternary-small"
MOST_BYTES = 16_000_000


@pytest.mark.slow
def test_the_committed_model_has_the_perplexity_that_it_states() -> None:
    """Of held-out text, and far under a uniform choice; it also goes on with a sentence in words of its own."""
    torch.set_num_threads(1)
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < MOST_BYTES
    assert "perplexity there: " in (MODEL / "README.md").read_text()
    stated = json.loads((MODEL / "held-out.json").read_text())
    with LLM(str(MODEL), device="cpu", backend="reference") as llm:
        ternary, backend = llm.loaded.config.ternary, llm.loaded.engine.backend
        assert ternary is not None and isinstance(backend, ReferenceBackend)
        text = (MODEL / "held-out.txt").read_text(encoding="utf-8")
        ids = llm.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        *_, found = running_perplexity(windows(ids, stated["window"], None), backend.logits)
        answer = llm.generate("The President of the United States", SamplingParams(max_tokens=32, temperature=0.0))
    assert found.ppl == pytest.approx(stated["perplexity"], rel=0.02)  # bf16 sums of another device and order
    assert found.ppl < llm.loaded.config.vocab_size / 20
    assert len(set(answer.token_ids)) > 8
