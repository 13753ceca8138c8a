"""What a benchmark times, in llama-bench's vocabulary.

pp512: a prompt of 512 tokens up to its first answer token. tg128: 128 decode steps. pp512+tg128: both together.
`@ d4096`: with 4,096 tokens in the cache already, whose own prefill is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onekernel.config import PREFILL_CHUNK_TOKENS
from onekernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed: a prompt of n_prompt tokens, then n_gen decode steps, after `depth` tokens."""

    n_prompt: int
    n_gen: int
    depth: int = 0

    def __post_init__(self) -> None:
        if min(self.n_prompt, self.n_gen, self.depth) < 0 or self.n_prompt + self.n_gen == 0:
            raise ConfigError(
                f"a test has {self.n_prompt} prompt and {self.n_gen} answer tokens at depth {self.depth}; "
                "none may be negative, and prompt and answer not both 0"
            )
        if self.n_prompt and self.depth % PREFILL_CHUNK_TOKENS:
            raise ConfigError(
                f"--n-depth is {self.depth}; with a prompt it must be a multiple of {PREFILL_CHUNK_TOKENS}, because "
                "prefill works in chunks of that size and is timed from the end of one"
            )

    @property
    def name(self) -> str:
        """The name llama-bench gives it."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that is submitted.

        Prefill leaves the last prompt token to decode, so a test with decode steps has one token more: n_prompt tokens
        are prefilled and n_gen steps decoded, as in llama-bench.
        """
        return self.depth + self.n_prompt + (self.n_gen > 0)

    @property
    def context(self) -> int:
        """The context it needs."""
        return self.prompt_tokens + max(1, self.n_gen)


def plan_workloads(
    n_prompt: Sequence[int], n_gen: Sequence[int], pairs: Sequence[tuple[int, int]], depths: Sequence[int]
) -> list[Workload]:
    """Return for each depth the prompts, the answers and the pairs, as llama-bench does; a count of 0 means none.

    Raises ConfigError if nothing is left.
    """
    workloads = []
    for depth in depths:
        workloads += [Workload(count, 0, depth) for count in n_prompt if count]
        workloads += [Workload(0, count, depth) for count in n_gen if count]
        workloads += [Workload(prompt, answer, depth) for prompt, answer in pairs]
    if not workloads:
        raise ConfigError("nothing is left to time: -p and -n are 0 and there is no -pg")
    return workloads
