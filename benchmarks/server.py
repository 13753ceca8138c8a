"""What HTTP costs: the same engine asked directly and through the server, taking turns: results/server.json.

    python benchmarks/server.py                                               on a CPU
    python benchmarks/server.py --model Llama-3.2-1B --load-format dummy --device cuda:0

`us_per_token` is (arrival of an answer's last piece at the client - of its first) / (tokens - 1), streamed over
loopback to a client in a process of its own; `engine_us_per_token` the same between the engine's own events. Both are
medians over all answers of all rounds, with several `clients` all of one round at once. Kinds: `instant`, a backend
that yields its tokens at once, so that nothing but engine and server is timed (they arrive in few pieces, so here a
time is that of the whole request, divided by its tokens); `paced`, one that yields a token each `--pace-us`, as a GPU
would; then the backend of `--model`. Greedy, random prompts, end-of-sequence tokens ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import uvicorn

from onekernel import LLM, SamplingParams
from onekernel.config import ModelConfig
from onekernel.engine.backend import DecodedToken, MemoryReport, never
from onekernel.engine.engine import Engine, Event
from onekernel.engine.request import Completion, Delta
from onekernel.engine.status import CacheUse
from onekernel.measure.bench import random_ids
from onekernel.measure.results import git_commit, spread, write_results
from onekernel.server.app import create_app
from onekernel.server.protocol import GuardedProtocol
from onekernel.server.settings import ServerSettings
from onekernel.text.tokenizer import Tokenizer

CLIENT = Path(__file__).with_name("server_client.py")
VOCAB = 1000
CONTEXT = 4096


@dataclass(slots=True)
class Seen:
    """One answer as its reader saw it; `whole_us` from the request to the last token, over the tokens."""

    us_per_token: float
    whole_us: float
    ttft_ms: float


@dataclass(slots=True)
class Words:
    """A sequence of the backend below."""

    prompt_tokens: int
    length: int = 0
    made: int = 0


class WordsBackend:
    """Yields tokens without a model, at once or one each `pace_us`."""

    device = "cpu"
    config = ModelConfig("LlamaForCausalLM", 64, 64, 1, 1, 1, 64, VOCAB, CONTEXT)
    memory = MemoryReport(0, 0, 0)
    max_context = CONTEXT

    def __init__(self, name: str, pace_us: float) -> None:
        self.name = name
        self._pace_s = pace_us / 1e6

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        return True

    def open(self, prompt: Sequence[int], total_tokens: int) -> Words:
        return Words(len(prompt))

    def prefill(self, sequence: Any, cancel: Any, progress: Callable[[int, int], None], pause: Any = never) -> None:
        sequence.length = sequence.prompt_tokens - 1

    def decode(
        self, sequence: Any, sampling: Any, limit: int, stop_ids: Any, cancel: Any, mask: Any = None
    ) -> Generator[DecodedToken, None, None]:
        for _ in range(limit):
            if self._pace_s:
                time.sleep(self._pace_s)
            sequence.made += 1
            yield DecodedToken(sequence.made % VOCAB)

    def release(self, sequence: Any, *, failed: bool = False) -> None:
        return None

    def cache_use(self) -> CacheUse:
        return CacheUse()

    def close(self) -> None:
        return None


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve the engine on loopback, in a thread, with `onekernel serve`'s parser and loop; yield the address."""
    app = create_app(engine, ServerSettings(model_names=("bench",)))
    config = uvicorn.Config(app, port=0, log_level="warning", loop="uvloop", http=GuardedProtocol, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def ask_engine(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> list[Seen]:
    """Submit all prompts at once; return each answer."""
    params = SamplingParams(max_tokens=new, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    times: list[list[float]] = [[] for _ in prompts]

    def deliver_to(seen: list[float]) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            if isinstance(event, Delta):
                seen.extend([time.perf_counter()] * bool(event.text))
            else:
                ended.put(event)

        return deliver

    begun = time.perf_counter()
    for prompt, seen in zip(prompts, times, strict=True):
        engine.submit(prompt, params, deliver_to(seen))
    for _ in prompts:
        if not isinstance(event := ended.get(), Completion):
            raise RuntimeError(f"the engine answered with {event!r}")
    return [
        Seen((seen[-1] - seen[0]) / (new - 1) * 1e6, (seen[-1] - begun) / new * 1e6, (seen[0] - begun) * 1e3)
        for seen in times
    ]


def ask_server(url: str, prompts: Sequence[tuple[int, ...]], new: int) -> tuple[list[Seen], list[str]]:
    """Send all prompts at once from another process; return each answer that came whole, and the errors."""
    options = {"max_tokens": new, "temperature": 0, "repetition_penalty": 1, "ignore_eos": True, "stream": True}
    bodies = json.dumps([{"prompt": list(prompt), **options} for prompt in prompts])
    done = subprocess.run([sys.executable, CLIENT, url], input=bodies, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    errors = [answer["error"] for answer in answers if "error" in answer]
    errors += [f"{a['tokens']} tokens instead of {new}" for a in answers if a.get("tokens", new) != new]
    whole = [answer for answer in answers if "error" not in answer]
    return [Seen(answer["us_per_token"], answer["whole_us"], answer["ttft_ms"]) for answer in whole], errors


@dataclass(slots=True)
class Sides:
    """What both sides showed so far."""

    engine: list[Seen] = field(default_factory=list)
    server: list[Seen] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def row(self, kind: str, **about: Any) -> dict[str, Any]:
        """Return the row of the results."""
        time_of = attrgetter("whole_us" if kind == "instant" else "us_per_token")
        ours, bare = ([time_of(seen) for seen in side] for side in (self.server, self.engine))
        row: dict[str, Any] = {"kind": kind, **about}
        row |= {"us_per_token": spread(ours), "engine_us_per_token": spread(bare)}
        row["overhead_us"] = row["us_per_token"]["median"] - row["engine_us_per_token"]["median"]
        row["ttft_ms"] = spread([seen.ttft_ms for seen in self.server])
        row["engine_ttft_ms"] = spread([seen.ttft_ms for seen in self.engine])
        return {**row, "errors": len(self.errors)}


def measure(engine: Engine, kind: str, clients: int, *, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Return the row of one engine and a number of clients; a first round is not counted. Every prompt is another."""
    vocab = min(engine.backend.config.vocab_size, engine.tokenizer.vocab_limit)
    seeds = iter(range(10**9))
    sides = Sides()
    with serving(engine) as url:
        for turn in range(repeats + 1):
            first, second = ([random_ids(prompt, vocab, next(seeds)) for _ in range(clients)] for _ in range(2))
            bare = ask_engine(engine, first, new)
            streamed, errors = ask_server(url, second, new)
            sides.errors += errors
            if turn:
                sides.engine += bare
                sides.server += streamed
    if not sides.server:
        raise SystemExit(f"no answer came through the server: {sides.errors[0]}")
    return sides.row(kind=kind, clients=clients, prompt_tokens=prompt, new_tokens=new)


def engines(args: argparse.Namespace) -> Iterator[tuple[Engine, str, str | None]]:
    """Yield each engine with its kind and model, and close it afterwards."""
    for kind, pace_us in (("instant", 0.0), ("paced", args.pace_us)):
        if kind in args.kinds:
            engine = Engine(WordsBackend(kind, pace_us), Tokenizer.placeholder(VOCAB), {})
            with contextlib.closing(engine):
                yield engine, kind, None
    if "model" in args.kinds:
        options = {"device": args.device, "load_format": args.load_format, "threads": args.threads}
        with LLM(args.model, max_context=args.context, **options) as llm:
            yield llm.loaded.engine, llm.loaded.engine.backend.name, llm.loaded.settings.name


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; ends the program if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument(
        "--kinds", nargs="+", choices=("instant", "paced", "model"), default=["instant", "paced", "model"]
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8], metavar="N")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--new", type=int, default=1024, metavar="N", help="answer tokens without a model")
    parser.add_argument("--model-new", type=int, default=32, metavar="N", help="answer tokens of the model")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds that count")
    parser.add_argument("--pace-us", type=float, default=500.0, metavar="US")
    parser.add_argument("--context", type=int, default=2048, metavar="N")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="CPU threads of the model")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/server.json"))
    args = parser.parse_args(arguments)
    if min(args.new, args.model_new) < 2 or min([args.prompt, args.repeats, *args.clients]) < 1:
        parser.error("answers need at least 2 tokens; prompts, repeats and clients at least 1")
    return args


def rows_of_others(path: Path, device: str) -> list[dict[str, Any]]:
    """Return the file's rows that another device's run wrote."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["device"] != device]


def main() -> None:
    """Measure every kind with every number of clients and write the results file, in which other devices' rows stay."""
    args = parse()
    load, commit, device = os.getloadavg()[0], args.commit or git_commit(), "CPU"
    if args.device.startswith("cuda"):
        import torch

        device = torch.cuda.get_device_name(args.device)
    rows = []
    for engine, kind, model in engines(args):
        for clients in args.clients:
            new = args.model_new if model else args.new
            row = measure(engine, kind, clients, prompt=args.prompt, new=new, repeats=args.repeats)
            rows.append({**row, **({"model": model} if model else {}), "device": device, "commit": commit})
            ours, bare = row["us_per_token"]["median"], row["engine_us_per_token"]["median"]
            print(f"{kind:10} {clients:3} clients  {ours:9.1f} us/token, engine {bare:9.1f}, {row['errors']} errors")
    # Many of these times are those of threads that wake each other: on a busy machine they say little.
    rows = rows_of_others(args.out, device) + rows
    write_results(args.out, rows, commit=commit, device=device, load_average=round(load, 2))


if __name__ == "__main__":
    main()
