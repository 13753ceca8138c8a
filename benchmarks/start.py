"""How long it takes from starting a process to its first token: results/start.json.

    python benchmarks/start.py --models Llama-3.2-1B Llama-3.1-8B --folder /tmp/start      on a GPU

Each model is written to the folder first, random bf16 values in the published shape as safetensors, with the tokenizer
of models/ternary-small. Then `onekernel generate` answers from there, several times in processes of their own; the
first of them compiles and is not counted. So files are in the page cache, and the kernel in its own. `first_token_s` is
the time from the start of a process to the first character that it prints, `end_s` to its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from onekernel.measure.results import spread, write_results
from onekernel.weights.open import open_checkpoint
from onekernel.weights.shipped import read_shipped

TOKENIZER = Path(__file__).parent.parent / "models" / "ternary-small" / "tokenizer.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Llama-3.2-1B", "Llama-3.1-8B"])
    parser.add_argument("--layers", type=int, help="of each model instead of its own, for a try")
    parser.add_argument("--folder", type=Path, required=True, help="what is written there is removed at the end")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="of the sources, where there is no git")
    parser.add_argument("--out", type=Path, default=Path("results/start.json"))
    return parser.parse_args()


def write_model(values: dict[str, Any], folder: Path, device: str) -> int:
    """Write a checkpoint of random values and return its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    shutil.copy(TOKENIZER, folder)
    dummy = open_checkpoint(str(folder), load_format="dummy")
    state = {
        name: torch.randn(info.shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()
        for name, info in dummy.tensors.items()
    }
    save_torch_state_dict(state, folder)
    return sum(tensor.nbytes for tensor in state.values())


def run(folder: Path, device: str) -> tuple[float, float]:
    """Return the seconds to the first character of an answer and to the end of its process."""
    command = [sys.executable, "-u", "-m", "onekernel", "generate", str(folder), "--device", device, "--raw"]
    notes = folder / "notes.txt"
    began = time.perf_counter()
    with (
        notes.open("w") as errors,
        subprocess.Popen(
            [*command, "-p", "The", "-n", "8", "--temp", "0"], stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        first = process.stdout.read(1) if process.stdout is not None else b""
        seconds = time.perf_counter() - began
        process.communicate()
    if process.returncode != 0 or not first:
        raise SystemExit(f"onekernel generate ended with {process.returncode}:\n{notes.read_text()}")
    return seconds, time.perf_counter() - began


def describe(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def main() -> None:
    args = arguments()
    rows = []
    for model in args.models:
        folder = args.folder / model
        values = read_shipped(model) | ({"num_hidden_layers": args.layers} if args.layers else {})
        try:
            size = write_model(values, folder, args.device)
            run(folder, args.device)
            times = [run(folder, args.device) for _ in range(args.repeats)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows.append(
            {
                "model": model,
                "weights_gb": round(size / 1e9, 2),
                "first_token_s": spread([first for first, _ in times]),
                "end_s": spread([end for _, end in times]),
            }
        )
        print(rows[-1], flush=True)
    write_results(args.out, rows, commit=args.commit, device=describe(args.device))


if __name__ == "__main__":
    main()
