"""The real SmolLM2-135M-Instruct on a real GPU: the tokens of the bf16 reference on the same weights."""

from __future__ import annotations

import os
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from onekernel import LLM, SamplingParams
from onekernel.engine.megakernel_backend import MegakernelBackend
from tests.megakernels import Reference

pytestmark = pytest.mark.timeout(120)

GPU = "cuda:0"
TOKENS = 256
TEXTS = ["The capital of France is", "def fibonacci(n):\n"]


@pytest.fixture(scope="module")
def gguf() -> Path:
    """Where `smollm2_gguf` looks; machines that are lent for their GPU may lack the file."""
    folder = Path(os.environ.get("ONEKERNEL_TEST_MODELS", Path(sys.prefix) / "models"))
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing: run `python3 dev.py install`, or set ONEKERNEL_TEST_MODELS")
    return path


def test_256_greedy_tokens_are_the_reference_s_or_within_the_noise(
    gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each token is the likeliest in float32 after those before it, or closer to that than the noise of bf16."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    with LLM(str(gguf), device=GPU, max_context=512, backend="reference") as llm:
        prompts = [llm.tokenizer.encode_prompt(text) for text in TEXTS]
        wanted = [llm.generate(prompt, params).token_ids for prompt in prompts]
    with LLM(str(gguf), device=GPU, max_context=512) as llm:
        backend = llm.loaded.engine.backend
        assert isinstance(backend, MegakernelBackend)
        reference = Reference(backend.model, 512, step=64)
        for prompt, theirs in zip(prompts, wanted, strict=True):
            ours = llm.generate(prompt, params).token_ids
            assert len(ours) == TOKENS
            reference.check_greedy(prompt, list(ours))
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
            with capsys.disabled():
                print(f"\n  {equal} of {TOKENS} tokens equal before the first difference", end="")
