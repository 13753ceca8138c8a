"""Decode speed on the CPU beside transformers: same process, same threads, same weights, interleaved.

    python benchmarks/cpu_decode.py .venv/models/SmolLM2-135M-Instruct.Q4_1.gguf

Both sides generate greedily after the same prompt; a rate is (tokens - 1) / (time of last - time of first token).
Writes results/cpu_decode.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from onekernel import LLM, SamplingParams
from onekernel.device.host import default_threads
from onekernel.measure.results import spread, write_results

PROMPT = "The capital of France is"


class Clock(BaseStreamer):
    """Notes when transformers hands out each token; its first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_per_s(self) -> float:
        tokens = self.times[1:]
        return (len(tokens) - 1) / (tokens[-1] - tokens[0])


def transformers_rate(model: Any, ids: tuple[int, ...], tokens: int) -> float:
    """Return tokens/s of transformers' generate with its default (dynamic) cache."""
    clock = Clock()
    model.generate(
        torch.tensor([ids]),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
    )
    return clock.tokens_per_s


def our_rate(llm: LLM, ids: tuple[int, ...], tokens: int) -> float:
    """Return tokens/s of our reference backend."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return llm.generate(list(ids), params).timings.decode_tokens_per_s


def measure(path: Path, dtype: str, tokens: int, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Return the two rows of one dtype."""
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    oracle = oracle.to(getattr(torch, dtype)).eval()
    rates: dict[str, list[float]] = {"onekernel": [], "transformers": []}
    with LLM(str(path), device="cpu", dtype=dtype, threads=threads) as llm:  # type: ignore[arg-type]
        ids = tuple(llm.tokenizer.encode_prompt(PROMPT))
        our_rate(llm, ids, 8)
        transformers_rate(oracle, ids, 8)
        for _ in range(repeats):
            rates["onekernel"].append(our_rate(llm, ids, tokens))
            rates["transformers"].append(transformers_rate(oracle, ids, tokens))
    ratio = spread(rates["onekernel"])["median"] / spread(rates["transformers"])["median"]
    return [
        {
            "model": "SmolLM2-135M",
            "backend": backend,
            "dtype": dtype,
            "threads": threads,
            "prompt_tokens": len(ids),
            "new_tokens": tokens,
            "tokens_per_s": spread(samples)["median"],
            **{f"tokens_per_s_{key}": value for key, value in spread(samples).items() if key != "median"},
            **({"ratio_to_transformers": ratio} if backend == "onekernel" else {}),
        }
        for backend, samples in rates.items()
    ]


def main() -> None:
    """Measure both dtypes and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the SmolLM2-135M GGUF")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=Path("results/cpu_decode.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in ("bfloat16", "float32"):
        rows += measure(args.model, dtype, args.tokens, args.repeats, args.threads)
    import transformers

    write_results(args.out, rows, commit=args.commit, device="CPU", transformers=transformers.__version__)
    for row in rows:
        print(f"{row['dtype']:9} {row['backend']:13} {row['tokens_per_s']:7.1f} tok/s")


if __name__ == "__main__":
    main()
