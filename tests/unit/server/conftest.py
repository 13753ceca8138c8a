"""A server on a tiny random model for all tests, and servers on scripted answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onekernel import LLM
from onekernel.engine.engine import Engine
from onekernel.server.app import create_app
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from onekernel.text.tokenizer import Tokenizer
from tests.unit.server.serving import TextBackend, serving, text_backend, tiny_llm
from tests.unit.text.families import FAMILIES


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("tiny"), max_context=1024) as llm:
        yield llm


@pytest.fixture(scope="session")
def address(llm: LLM) -> Iterator[str]:
    with serving(create_app(llm, ServerSettings(model_names=("tiny", "also-tiny")))) as address:
        yield address


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as http:
        yield http


class Scripted:
    """A server that answers by script: its backend, and a client for it."""

    def __init__(self, backend: TextBackend, service: Service, address: str) -> None:
        self.backend = backend
        self.service = service
        self.address = address
        self.http = httpx.Client(base_url=address, timeout=60, verify=False)  # no certificates to load: it is http

    @property
    def idle(self) -> bool:
        """Whether neither the server nor the engine has anything to do."""
        status = self.service.engine.status()
        return not self.service.runs and status.running == status.waiting == self.backend.open_sequences == 0

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def chat(self, **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return self.http.post("/v1/chat/completions", json=body)


Start = Callable[..., Scripted]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Start]:
    """Return start(text, *, family, template, settings, options, **backend) -> Scripted."""
    with contextlib.ExitStack() as stack:

        def start(
            text: str = "Hello",
            *,
            family: str = "qwen",
            template: str = "qwen_tools",
            settings: ServerSettings | None = None,
            options: Any = None,
            generation_config: dict[str, Any] | None = None,
            **backend: Any,
        ) -> Scripted:
            folder = FAMILIES[family].write(tmp_path / f"{family}-{template}", template)
            made = text_backend(Tokenizer.from_directory(folder, {}, {}), text, **backend)
            engine = Engine(made, made.tokenizer, generation_config or {}, options)  # type: ignore[arg-type]
            stack.callback(engine.close)
            service = Service(settings or ServerSettings(), engine)
            address = stack.enter_context(serving(create_app(service)))
            server = Scripted(made, service, address)
            stack.callback(server.http.close)
            return server

        yield start
