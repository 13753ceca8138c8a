"""Serve a model over HTTP, in the form of OpenAI's API.

The port answers while the model still loads (503; /health says so). SIGINT and SIGTERM let open requests end and exit
with 0; a failure of the engine exits with 1, so that a supervisor starts it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, add_sharing, engine_config, model_name
from onekernel.errors import ConfigError

HELP = "serve a model over HTTP (OpenAI's API)"
USAGE = "MODEL [--host HOST] [--port PORT] [options]"

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", metavar="N", type=int, default=8000, help="port (default 8000; 0: any free one)")
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="what clients call the model (default: its own name); may be repeated",
    )
    add_context(parser)
    add_sharing(parser)
    add_model(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    name = model_name(args)
    engine_config(args)  # wrong flags are refused before anything is loaded

    from onekernel.server.settings import ServerSettings

    settings = ServerSettings(**_settings(args, name))
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be from 0 to 65535")

    from onekernel.cli.session import open_llm
    from onekernel.measure.read_limit import read_limit_us
    from onekernel.server.process import listen, serve
    from onekernel.server.service import Service

    service = Service(settings)
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    console.note(
        f"listening on http://{f'[{host}]' if ':' in host else host}:{port}, loading {settings.model_names[0]}"
    )

    def load() -> Any:
        llm = open_llm(args, console)
        service.read_limit_us = read_limit_us(llm.loaded)
        console.note(f"ready after {llm.loaded.load_s:.1f} s")
        return llm

    return serve(load, service, listener, console.note)


def _settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    return {"model_names": tuple(args.served_model_name) or (_own_name(name),)}


def _own_name(model: str) -> str:
    """Return a hub id as it is, and of a path only the last part, which tells clients nothing about this machine."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
