"""A server process on scripted answers: `python -m tests.unit.server.program MODE`. It prints its port first.

slow: 20 words in a second. endless: words without end. failing: the device is lost after some words. loading: the model
never comes. broken: the model cannot be loaded.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onekernel.engine.engine import Engine
from onekernel.errors import DeviceError, ModelError
from onekernel.server.process import listen, serve
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from onekernel.text.tokenizer import Tokenizer
from tests.unit.server.serving import text_backend
from tests.unit.text.families import FAMILIES

WORDS = "The quick brown fox jumps over the lazy dog. "


def load(mode: str, folder: Path) -> Any:
    if mode == "loading":
        threading.Event().wait()
    if mode == "broken":
        raise ModelError("the weights are damaged: fetch them again")
    tokenizer = Tokenizer.from_directory(FAMILIES["qwen"].write(folder, "qwen_tools"), {}, {})
    error = DeviceError("an illegal address, see /tmp/secret/trace", context_lost=True) if mode == "failing" else None
    backend = text_backend(tokenizer, WORDS, token_s=0.05, endless=mode == "endless", error=error)
    engine = Engine(backend, tokenizer, {})
    return SimpleNamespace(loaded=SimpleNamespace(engine=engine), close=engine.close)


def main(mode: str) -> int:
    settings = ServerSettings(shutdown_s=0.5 if mode == "endless" else 20.0, failure_linger_s=1.5)
    with listen("127.0.0.1", 0) as listener, tempfile.TemporaryDirectory() as folder:
        print(listener.getsockname()[1], flush=True)
        return serve(
            lambda: load(mode, Path(folder)), Service(settings), listener, lambda text: print(text, flush=True)
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
