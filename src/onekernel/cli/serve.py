"""Serve a model over HTTP, in the form of OpenAI's API.

The port answers while the model still loads (503; /health says so). SIGINT and SIGTERM let open requests end and exit
with 0; a failure of the engine exits with 1, so that a supervisor starts it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, add_sharing, engine_config, model_name
from onekernel.env import get
from onekernel.errors import ConfigError

if TYPE_CHECKING:
    from onekernel.server.settings import ServerSettings

HELP = "serve a model over HTTP (OpenAI's API)"
USAGE = "MODEL [--host HOST] [--port PORT] [options]"

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_LIMITS = {
    "request_timeout_s": ("--request-timeout", float, "seconds a request may take, waiting included (default 600)"),
    "shutdown_s": ("--shutdown-timeout", float, "seconds that open requests have to end when stopped (default 10)"),
    "max_body_bytes": ("--max-body-bytes", int, "size of a request (default 8388608)"),
    "max_choices": ("--max-choices", int, "answers in one request: n times prompts (default 8)"),
    "max_connections": ("--max-connections", int, "open connections (default 1024)"),
}
"""Field of ServerSettings -> its flag, type and help."""


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
    group.add_argument(
        "--api-key", metavar="KEY", help="what clients must send (default: ONEKERNEL_API_KEY, which `ps` does not show)"
    )
    group.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="name in the Host header (default: only this machine's when listening on loopback); may be repeated",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="web page that may use this server from a browser, such as https://chat.example; may be repeated",
    )
    for name, (flag, kind, help) in _LIMITS.items():
        group.add_argument(flag, dest=name, metavar="N", type=kind, help=help)
    add_context(parser)
    add_sharing(parser)
    add_model(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    name = model_name(args)
    engine_config(args)  # wrong flags are refused before anything is loaded

    settings = server_settings(args, name)
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

    if args.host not in LOOPBACK and settings.api_key is None:
        console.note("anybody who reaches this port can use the model; --api-key asks for a key")

    def load() -> Any:
        llm = open_llm(args, console)
        service.read_limit_us = read_limit_us(llm.loaded)
        console.note(f"ready after {llm.loaded.load_s:.1f} s")
        return llm

    return serve(load, service, listener, console.note)


def server_settings(args: argparse.Namespace, model: str) -> ServerSettings:
    """Return what the flags and ONEKERNEL_API_KEY say; raises ConfigError naming the flag."""
    from onekernel.server.settings import ServerSettings

    hosts = tuple(name.lower() for name in args.allowed_host)
    if args.host in LOOPBACK:
        hosts = (*LOOPBACK, *hosts)
    given = {name: getattr(args, name) for name in _LIMITS if getattr(args, name) is not None}
    try:
        return ServerSettings(
            model_names=tuple(args.served_model_name) or (_own_name(model),),
            api_key=get("ONEKERNEL_API_KEY") if args.api_key is None else args.api_key,
            allowed_hosts=hosts,
            cors_origins=tuple(args.cors_origin),
            **given,
        )
    except ConfigError as error:
        field, _, rest = str(error).partition(" ")
        flag = _LIMITS[field][0] if field in _LIMITS else {"model_names": "--served-model-name"}.get(field, field)
        raise ConfigError(f"{flag} {rest}") from None


def _own_name(model: str) -> str:
    """Return a hub id as it is, and of a path only the last part, which tells clients nothing about this machine."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
