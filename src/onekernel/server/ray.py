"""The HTTP interface as a Ray Serve application: replicas on the GPUs of one machine or several, and one address.

    serve run onekernel.server.ray:application model=HuggingFaceTB/SmolLM2-135M-Instruct replicas=2

Ray spreads requests over the replicas, starts them, watches them, and replaces one that dies or whose engine failed.
Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from ray import serve
from starlette.types import Receive, Scope, Send

from onekernel.config import EngineConfig
from onekernel.errors import ConfigError
from onekernel.llm import LLM
from onekernel.server.app import create_app
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What an application is made of. `engine` and `server` hold fields of EngineConfig and ServerSettings."""

    model: str
    replicas: int = 1
    gpus_per_replica: float = 1.0
    """0: replicas run on the CPU."""
    cpus_per_replica: float = 1.0
    open_requests_per_replica: int = 64
    """Ray sends a replica no more than this at once; what is above waits at Ray's proxy."""
    load_format: Literal["auto", "dummy"] = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)


def application(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for RaySettings given as a mapping, as `serve run` and a Serve config file give them.

    Numbers may be strings. Raises ConfigError for an unknown name or a wrong value, here and not in a replica.
    """
    settings = _read(RaySettings, arguments)
    engine = _read(EngineConfig, settings.engine)
    server = _read(ServerSettings, {"model_names": [_own_name(settings.model)], **settings.server})
    deployment = serve.deployment(
        name="onekernel",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.open_requests_per_replica,
        ray_actor_options={"num_gpus": settings.gpus_per_replica, "num_cpus": settings.cpus_per_replica},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=server.shutdown_s,
    )
    return deployment(Replica).bind(settings.model, settings.load_format, engine, server)


def _own_name(model: str) -> str:
    """Return a hub id as it is, and of a path only the last part."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.is_absolute() or path.exists() else model


def _read(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"{', '.join(unknown)}: no such argument; there are {', '.join(known)}")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the Ray application's arguments: {error}") from None


class _ToThisReplica:
    """Passes each request on to the application that this process's replica made when it started."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
            return
        await serve.get_replica_context().servable_object.http(scope, receive, send)


@serve.ingress(_ToThisReplica())
class Replica:
    """One engine with its HTTP interface, on the device that Ray gave to this process."""

    def __init__(
        self, model: str, load_format: Literal["auto", "dummy"], engine: EngineConfig, server: ServerSettings
    ) -> None:
        self._llm = LLM(model, load_format=load_format, **asdict(engine))
        self.service = Service(server, self._llm.loaded.engine)
        self.http = create_app(self.service)

    async def check_health(self) -> None:
        """Raise when the engine has failed, so that Ray replaces this replica."""
        _ = self.service.engine

    async def __del__(self) -> None:
        await asyncio.to_thread(self._llm.close)
