"""A few tokens of small models in the megakernel, for NVIDIA's compute-sanitizer, which slows it a thousand times.

    compute-sanitizer --tool memcheck --kernel-name kernel_substring=megakernel python -m tests.gpu.sanitized

docs/kernels.md says what its tools report. With `--prompt 1` nothing but the megakernel runs.
"""

from __future__ import annotations

import argparse

from onekernel.engine.running_launch import Patience
from tests.gpu.test_megakernel import SHAPES, Rig, case_of
from tests.megakernels import prompt_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["head96", "odd"], choices=SHAPES)
    parser.add_argument("--prompt", type=int, default=70, help="tokens")
    parser.add_argument("--new", type=int, default=4, help="tokens")
    options = parser.parse_args()
    for name in options.models:
        rig = Rig(case_of(SHAPES[name]))
        rig.backend.patience = Patience(token_s=60.0, stop_s=10.0)
        print(name, rig.decode(prompt_of(rig.case.config, options.prompt, seed=5), options.new), flush=True)


if __name__ == "__main__":
    main()
