"""Parse the command line, run one command, and turn what goes wrong into one line and an exit code.

Exit codes: 0 success, 1 failure, 2 usage (a flag or a value is wrong), 130 interrupted. Nothing heavy is imported
here or by the commands' `add_arguments`: `--help` and usage errors are immediate.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from onekernel import __version__
from onekernel.cli import bench, chat, convert, env, generate, info, perplexity, plan, serve, sparsify, trace, train
from onekernel.cli.console import Console
from onekernel.cli.lifetime import end_in_order
from onekernel.cli.parser import CommandParser, Help
from onekernel.errors import ConfigError, OnekernelError

if TYPE_CHECKING:
    import logging

COMMANDS: dict[str, ModuleType] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "bench": bench,
    "perplexity": perplexity,
    "info": info,
    "convert": convert,
    "train": train,
    "sparsify": sparsify,
    "plan": plan,
    "trace": trace,
    "env": env,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command sets `run` to its function."""
    parser = argparse.ArgumentParser(
        prog="onekernel",
        usage="%(prog)s COMMAND [options]",
        description="Generate text on one GPU at the memory limit, or anywhere on the PyTorch reference.",
        epilog="`onekernel COMMAND --help` lists a command's options.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"onekernel {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND [options]", required=True, parser_class=CommandParser
    )
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            prog=f"onekernel {name}",
            usage=f"onekernel {name} {module.USAGE}",
            help=module.HELP,
            description=module.__doc__,
            formatter_class=Help,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("-v", "--verbose", action="store_true", help="say more, and show tracebacks")
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; a usage error and `--help` raise SystemExit, as argparse does."""
    _open_closed_streams()
    if argv is None:  # the process is ours
        end_in_order()
    args = build_parser().parse_args(argv)
    console = Console(verbose=args.verbose)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?' for what it lacks
    try:
        _set_up_logging(args.verbose)
        code: int = args.run(args, console)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of stdout has gone, as in `onekernel generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at exit
        return 1
    except KeyboardInterrupt:
        _ignore_interrupts()
        console.note("interrupted")
        return 130
    except OnekernelError as error:
        console.error(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        _report_unexpected(error, args.verbose, console)
        return 1
    finally:
        console.clear_bar()


def _open_closed_streams() -> None:
    """Open the standard streams this process was started without, as by `2>&-`, on nothing.

    Python has None for them, to which print writes on stdout, and a model's file would get their free numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


def _ignore_interrupts() -> None:
    """Let a second Ctrl-C not turn the end of an interrupted command into a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _report_unexpected(error: Exception, verbose: bool, console: Console) -> None:
    if verbose:
        import traceback

        console.note(traceback.format_exc().rstrip())
    hint = "" if verbose else " (-v shows where)"
    if isinstance(error, ImportError):
        hint = f"; `onekernel env` shows what is installed{hint}"
    console.error(f"{type(error).__name__}: {error}{hint}")


def _set_up_logging(verbose: bool) -> None:
    """Send the log to stderr, one line a record; tracebacks only with -v."""
    import logging

    from onekernel.env import get

    level = (get("ONEKERNEL_LOG") or "warning").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"ONEKERNEL_LOG is {level.lower()!r}; it must be debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if not verbose:
        handler.addFilter(_without_traceback)
    logger = logging.getLogger("onekernel")
    logger.handlers = [handler]
    logger.setLevel(level)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True
