"""What an engine costs beyond its kernel, and whether it stays as it was: results/engine.json.

    PYTHONPATH=src python3 benchmarks/engine.py --model Llama-3.2-1B

Random weights, made on the device. Every row has `us_per_token` of its kind, (host time of the last token - of the
first) / (tokens - 1), beside `greedy_us_per_token` of plain greedy answers of the same length, one of each in turn,
`p99_us` of the times between its tokens, and the device's memory in use before and after (`gpu_mb_start`, `gpu_mb_end`;
on a CPU that of this process). Where the comparison is another one, the row's `greedy` says which. Kinds: streaming
with a stop string that never comes, against the backend alone; the sampling settings, on logits sharpened to a top-1
probability of 0.3 to 0.7 and some on flat ones; a constraint; slices with 1, 2 and 4 clients (wall time over all
tokens); cancelling; a stop string that comes, from the host's match to the cancel word and on to the kernel's end
(without a kernel: to the answer's); the last tenth of a chat of many turns whose history is cut to 512 tokens, against
its first tenth. The file is written after every kind.
"""

from __future__ import annotations

import argparse
import queue
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import torch
from decode import DeviceDummy, our_engine

from onekernel import SamplingParams
from onekernel.device.facts import facts
from onekernel.engine.engine import Engine, Event
from onekernel.engine.megakernel import Megakernel
from onekernel.engine.paged_backend import PagedBackend
from onekernel.engine.request import CancelToken, Completion, Delta
from onekernel.measure.bench import random_ids
from onekernel.measure.results import git_commit, spread, write_results
from onekernel.models.registry import model_config
from onekernel.weights.open import open_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "top_k": 0, "seed": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature": SAMPLED,
    "top-k 40": {**SAMPLED, "top_k": 40},
    "top-p 0.9": {**SAMPLED, "top_p": 0.9},
    "min-p 0.05": {**SAMPLED, "min_p": 0.05},
    "penalties": {**SAMPLED, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "logit bias": {**SAMPLED, "logit_bias": {5: 1.0, 7: -1.0}},
    "logprobs 20": {**GREEDY, "logprobs": 20},
}
FLAT = ("temperature", "top-k 40", "top-p 0.9", "min-p 0.05")
HISTORY_TOKENS, TURN_TOKENS = 512, 16


class Everything:
    """A constraint that forbids nothing, but wants to be asked."""

    done = False

    def __init__(self, vocab_size: int) -> None:
        self._mask = torch.ones(vocab_size, dtype=torch.bool)

    def mask(self) -> torch.Tensor:
        return self._mask

    def accept(self, token_id: int) -> None:
        pass


@dataclass(slots=True)
class Sample:
    """One answer: when each of its tokens came, and how it ended."""

    token_s: list[float]
    completion: Completion | None = None

    @property
    def intervals_us(self) -> list[float]:
        return [(later - earlier) * 1e6 for earlier, later in pairwise(self.token_s)]

    @property
    def us_per_token(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) * 1e6 / (len(self.token_s) - 1)


Answer = Callable[[], Sample]


class Waiting:
    """An answer that runs: `end` waits for it."""

    def __init__(self, engine: Engine, ids: Sequence[int], new: int, constraint: Any = None, **params: Any) -> None:
        self.sample = Sample([])
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        settings = SamplingParams(max_tokens=new, **params)
        self.cancel = engine.submit(tuple(ids), settings, self._deliver, constraint=constraint)

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Delta) and event.token_ids:
            self.sample.token_s.append(time.perf_counter())
        self._events.put(event)

    def end(self) -> Sample:
        while isinstance(event := self._events.get(), Delta):
            pass
        if isinstance(event, BaseException):
            raise event
        self.sample.completion = event
        return self.sample


def bare(engine: Engine, ids: Sequence[int], new: int) -> Sample:
    """A greedy answer of the backend alone, in this thread: no text, no stops, no queue."""
    backend, sampling = engine.backend, SamplingParams(**GREEDY).resolve({})
    sequence, sample = backend.open(ids, len(ids) + new), Sample([])
    backend.prefill(sequence, CancelToken(), lambda done, total: None)
    with closing(backend.decode(sequence, sampling, new, frozenset(), CancelToken())) as tokens:
        for _ in tokens:
            sample.token_s.append(time.perf_counter())
    backend.release(sequence)
    return sample


def clients(engine: Engine, ids: Sequence[int], new: int, count: int) -> Sample:
    """Greedy answers of several clients at once, as one sample of all their tokens."""
    waiting = [Waiting(engine, ids, new, **GREEDY) for _ in range(count)]
    return Sample(sorted(moment for one in waiting for moment in one.end().token_s))


def used_mb(device: str) -> float:
    """Memory in use: of the whole device, or on a CPU the most that this process ever had."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return (total - free) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def p99(intervals: Sequence[float]) -> float:
    return quantiles(intervals, n=100, method="inclusive")[98] if len(intervals) > 1 else intervals[0]


def beside(kind: str, answer: Answer, greedy: Answer, repeats: int, device: str) -> dict[str, Any]:
    """Time an answer and its comparison in turn, after one of each that does not count."""
    before = used_mb(device)
    pairs = [(greedy(), answer()) for _ in range(repeats + 1)][1:]
    return {
        "kind": kind,
        "us_per_token": spread([sample.us_per_token for _, sample in pairs]),
        "greedy_us_per_token": spread([sample.us_per_token for sample, _ in pairs]),
        "p99_us": round(p99([us for _, sample in pairs for us in sample.intervals_us]), 1),
        "gpu_mb_start": round(before, 1),
        "gpu_mb_end": round(used_mb(device), 1),
    }


def chat(engine: Engine, turns: int, vocab_size: int, device: str) -> dict[str, Any]:
    """Talk for many turns; the history keeps its last 512 tokens, so that each turn is another prompt."""
    before, history, samples = used_mb(device), list[int](), list[Sample]()
    for turn in range(turns):
        history = [*history, *random_ids(TURN_TOKENS, vocab_size, turn)][-HISTORY_TOKENS:]
        samples.append(Waiting(engine, history, TURN_TOKENS, **GREEDY).end())
        completion = samples[-1].completion
        history += completion.token_ids if completion else ()
    part = max(1, turns // 10)
    return {
        "kind": f"chat of {turns} turns",
        "greedy": "its first tenth",
        "us_per_token": spread([sample.us_per_token for sample in samples[-part:]]),
        "greedy_us_per_token": spread([sample.us_per_token for sample in samples[:part]]),
        "p99_us": round(p99([us for sample in samples for us in sample.intervals_us]), 1),
        "gpu_mb_start": round(before, 1),
        "gpu_mb_end": round(used_mb(device), 1),
        "cached_tokens": sum(s.completion.usage.cached_tokens for s in samples if s.completion),
    }


def own_row(kind: str, samples: Sequence[Sample], before: float, device: str) -> dict[str, Any]:
    """Begin the row of a kind that is measured against itself; `before`: the GPU's memory at its start, MB."""
    us = spread([sample.us_per_token for sample in samples])
    return {
        "kind": kind,
        "greedy": "itself",
        "us_per_token": us,
        "greedy_us_per_token": us,
        "p99_us": round(p99([us for sample in samples for us in sample.intervals_us]), 1),
        "gpu_mb_start": round(before, 1),
        "gpu_mb_end": round(used_mb(device), 1),
    }


def cancelling(engine: Engine, ids: Sequence[int], new: int, repeats: int, device: str) -> dict[str, Any]:
    """Cancel in the middle of an answer: the time until the owner is told, and the tokens that still came."""
    before, milliseconds, late, samples = used_mb(device), list[float](), list[int](), list[Sample]()
    for _ in range(repeats):
        waiting = Waiting(engine, ids, new, **GREEDY)
        while len(waiting.sample.token_s) < new // 4:
            time.sleep(1e-4)
        asked = time.perf_counter()
        waiting.cancel.set()
        samples.append(waiting.end())
        milliseconds.append((time.perf_counter() - asked) * 1e3)
        late.append(sum(moment > asked for moment in samples[-1].token_s))
    return own_row("cancel", samples, before, device) | {
        "cancel_ms": spread(milliseconds),
        "tokens_after": max(late),
    }


class Ends:
    """When a kernel was told to end and when it had ended, and the tokens that it made in between.

    It stands before a megakernel's own `cancel` and `check`, which every launch, of at most `limit` tokens, ends with.
    """

    def __init__(self, megakernel: Megakernel, limit: int) -> None:
        self._megakernel, self._limit = megakernel, limit
        self._cancel, self._check = megakernel.cancel, megakernel.check
        self.told = self.ended = 0.0
        self.tokens_after = 0
        megakernel.cancel, megakernel.check = self._note_cancel, self._note_check  # type: ignore[method-assign]

    def close(self) -> None:
        self._megakernel.cancel, self._megakernel.check = self._cancel, self._check  # type: ignore[method-assign]

    def _made(self) -> int:
        return sum(self._megakernel.read(index) is not None for index in range(self._limit))

    def _note_cancel(self) -> None:
        self._cancel()
        self.told = time.perf_counter()
        self.tokens_after = -self._made()

    def _note_check(self) -> None:
        self.ended = time.perf_counter()
        self.tokens_after += self._made()
        self._check()


def stopping(engine: Engine, ids: Sequence[int], new: int, repeats: int, device: str) -> dict[str, Any]:
    """Answer up to a stop string in the middle: from its match to the cancel word, and from there to the kernel's end.

    The token that completes the string reaches its owner, on the engine's thread, right after the match.
    """
    before, samples, to_word, to_end, late = used_mb(device), list[Sample](), list[float](), list[float](), list[int]()
    free = Waiting(engine, ids, new, **GREEDY).end().completion
    stop = engine.tokenizer.decode(free.token_ids[new // 2 : new // 2 + 2]) if free else ""
    kernel: Megakernel | None = getattr(engine.backend, "megakernel", None)
    ends = None if kernel is None else Ends(kernel, new)
    for _ in range(repeats):
        samples.append(Waiting(engine, ids, new, stop=(stop,), **GREEDY).end())
        told, matched = time.perf_counter(), samples[-1].token_s[-1]
        to_word.append(((ends.told if ends else told) - matched) * 1e3)
        to_end.append(((ends.ended if ends else told) - matched) * 1e3 - to_word[-1])
        late.append(ends.tokens_after if ends else 0)
    if ends:
        ends.close()
    if any(sample.completion is None or sample.completion.finish_reason != "stop" for sample in samples):
        raise RuntimeError(f"the stop string {stop!r} came in no answer, though a free one holds it")
    return own_row("stop string", samples, before, device) | {
        "answer_tokens": len(samples[-1].token_s),
        "match_to_word_ms": spread(to_word),
        "match_to_word_p99_ms": p99(to_word),
        "word_to_end_ms": spread(to_end),
        "tokens_after": max(late),
    }


def top_probability(engine: Engine, ids: Sequence[int]) -> float:
    """Mean probability of the likeliest token over a short greedy answer."""
    completion = Waiting(engine, ids, 16, **{**GREEDY, "logprobs": 0}).end().completion
    return fmean(float(torch.tensor(entry.logprob).exp()) for entry in (completion and completion.logprobs) or ())


def sharpen(engine: Engine, ids: Sequence[int]) -> float:
    """Scale the final norm, and with it all logits, until the likeliest token has 0.3 to 0.7; return what it has."""
    backend = engine.backend
    if not isinstance(backend, PagedBackend):
        raise TypeError(f"the final norm of a {type(backend).__name__} is not known")
    norm = backend.model.weights.final_norm
    for _ in range(40):
        probability = top_probability(engine, ids)
        if 0.3 <= probability <= 0.7:
            break
        norm.mul_(1.25 if probability < 0.3 else 0.9)
    return probability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.2-1B", help="a shipped configuration or a config.json")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--new", type=int, default=256, metavar="N", help="generated tokens")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="answers of each side")
    parser.add_argument("--stops", type=int, default=200, metavar="N", help="answers that a stop string ends")
    parser.add_argument("--turns", type=int, default=1000, metavar="N", help="turns of the chat")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/engine.json"))
    args = parser.parse_args()
    begun, commit = time.monotonic(), args.commit or git_commit()
    torch.manual_seed(0)
    dummy = open_checkpoint(args.model, load_format="dummy")
    config = model_config(dummy.settings.config)
    context = max(args.prompt + args.new, HISTORY_TOKENS + 2 * TURN_TOKENS)
    checkpoint = DeviceDummy(dummy, args.device)
    engine = our_engine(checkpoint, config, args.device, context, contexts=4, prefix_cache=True)
    machine: dict[str, Any] = {"device": "CPU"}
    if args.device.startswith("cuda"):
        found = facts(args.device)
        machine = {"device": found.name, "driver": found.driver_version}
    ids = random_ids(args.prompt, config.vocab_size)
    about = {"model": dummy.settings.name, "backend": engine.backend.name, "new_tokens": args.new}
    rows: list[dict[str, Any]] = []

    def greedy() -> Sample:
        return Waiting(engine, ids, args.new, **GREEDY).end()

    def add(row: dict[str, Any], **more: Any) -> None:
        rows.append({**row, **about, **more})
        write_results(args.out, rows, commit=commit, **machine)
        us, base = row["us_per_token"]["median"], row["greedy_us_per_token"]["median"]
        print(f"{time.monotonic() - begun:6.1f} s  {row['kind']}: {us:.1f} us per token, beside {base:.1f}", flush=True)

    def compare(kind: str, answer: Answer, other: Answer = greedy, **more: Any) -> None:
        add(beside(kind, answer, other, args.repeats, args.device), **more)

    def setting(name: str) -> Answer:
        return lambda: Waiting(engine, ids, args.new, **SETTINGS[name]).end()

    never = {**GREEDY, "stop": ("no such words \u2603",)}
    compare(
        "streaming and stop",
        lambda: Waiting(engine, ids, args.new, **never).end(),
        lambda: bare(engine, ids, args.new),
        greedy="the backend alone",
    )
    for name in FLAT:
        compare(f"{name}, flat", setting(name), top_probability=round(top_probability(engine, ids), 4))
    probability = round(sharpen(engine, ids), 3)
    for name in SETTINGS:
        compare(name, setting(name), top_probability=probability)
    rule = Everything(config.vocab_size)
    compare("constraint", lambda: Waiting(engine, ids, args.new, constraint=rule, **GREEDY).end())
    for count in (1, 2, 4):
        compare(f"clients {count}", lambda count=count: clients(engine, ids, args.new, count))  # type: ignore[misc]
    add(cancelling(engine, ids, args.new, args.repeats, args.device))
    add(stopping(engine, ids, args.new, args.stops, args.device))
    add(chat(engine, args.turns, config.vocab_size, args.device))
    engine.close()


if __name__ == "__main__":
    main()
