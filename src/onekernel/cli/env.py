"""Say what this installation sees: versions, devices, host, environment variables. For bug reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from onekernel.cli.console import Console

HELP = "versions, devices, environment variables"
USAGE = "[--json]"

Rows = list[tuple[str, str]]

_MORE_PACKAGES = ("nvidia-cuda-nvrtc", "numpy", "jinja2", "gguf", "prompt-toolkit", "transformers")
_SECRET = ("HF_TOKEN", "ONEKERNEL_API_KEY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; it succeeds whatever is missing or broken."""
    sections = {
        "installation": [*_probe("devices", _devices), *_probe("torch build", _torch), *_probe("packages", _packages)],
        "host": _probe("host", _host),
        "environment": _environment(),
    }
    if args.json:
        import json

        console.data(json.dumps({name: dict(rows) for name, rows in sections.items()}, indent=1))
        return 0
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    for title, rows in sections.items():
        console.data(f"{title}:")
        for name, value in rows:
            console.data(f"  {name:{width}}  {value}")
    return 0


def _probe(name: str, look: Callable[[], Iterable[tuple[str, str]]]) -> Rows:
    """Return what `look` finds; what breaks is a finding too."""
    try:
        return list(look())
    except Exception as error:
        return [(name, f"broken: {type(error).__name__}: {error}")]


def _devices() -> Rows:
    from onekernel.device.describe import describe

    return describe()


def _torch() -> Rows:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return [("torch build", f"{torch.__version__}, {build}, imports from {torch.__path__[0]}")]


def _packages() -> Rows:
    from importlib.metadata import PackageNotFoundError, version

    rows = []
    for name in _MORE_PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def _host() -> Rows:
    from onekernel.device.host import available_memory_bytes, default_threads

    return [
        ("threads by default", str(default_threads())),
        ("memory available", f"{available_memory_bytes() / 2**30:.1f} GiB"),
    ]


def _environment() -> Rows:
    from onekernel.env import VARIABLES, get

    rows = []
    for variable in VARIABLES:
        value = get(variable.name)
        if value is not None and variable.name in _SECRET:
            value = "(set, not shown)"
        rows.append((variable.name, "(not set)" if value is None else value))
    return rows
