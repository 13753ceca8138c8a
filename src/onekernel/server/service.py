"""The engine behind the HTTP interface, and where it stands: loading, ready or failed."""

from __future__ import annotations

from typing import Literal, cast

from onekernel.engine.engine import Engine
from onekernel.server.api_error import ApiError, without_paths
from onekernel.server.grammar import Grammars
from onekernel.server.metrics import Metrics
from onekernel.server.run import Run
from onekernel.server.settings import ServerSettings


class Service:
    """What all endpoints share. Without an engine it is loading."""

    def __init__(self, settings: ServerSettings, engine: Engine | None = None) -> None:
        self.settings = settings
        self.loaded_engine = engine
        self.metrics = Metrics()
        self.read_limit_us: float | None = None
        """The least time of a token, which is that of reading the weights; None where nobody measured it."""
        self.runs: set[Run] = set()
        """Requests that are being answered."""
        if engine is not None:
            self.ready(engine)

    def ready(self, engine: Engine) -> None:
        """Take requests from now on. May be called from any thread."""
        self._grammars = Grammars(engine.tokenizer, engine.backend.config.vocab_size)
        self.metrics.watch(engine)
        self.loaded_engine = engine

    @property
    def grammars(self) -> Grammars:
        """What makes constraints; raises what `engine` raises."""
        _ = self.engine
        return self._grammars

    @property
    def state(self) -> Literal["loading", "ready", "failed"]:
        """Where the engine stands."""
        if self.loaded_engine is None:
            return "loading"
        return "ready" if self.failure is None else "failed"

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests, None while it does."""
        engine = self.loaded_engine
        if engine is None or engine.failure is None:
            return None
        return without_paths(str(engine.failure)) or type(engine.failure).__name__

    @property
    def refusal(self) -> ApiError | None:
        """Return why no request is taken now, None if they are."""
        if self.loaded_engine is None:
            return ApiError(
                503,
                "the model is still loading; try again in a few seconds (/health says when it is ready)",
                kind="server_error",
                code="loading",
                headers={"Retry-After": "2"},
            )
        if self.failure is not None:
            return ApiError(503, f"the engine failed: {self.failure}", kind="server_error", code="engine_failed")
        return None

    @property
    def engine(self) -> Engine:
        """The engine; raises `refusal` if there is one."""
        if (refusal := self.refusal) is not None:
            raise refusal
        return cast("Engine", self.loaded_engine)

    def model_named(self, name: str | None) -> str:
        """Return the name an answer carries; raises a 404 ApiError for one that is not served."""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; use {' or '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    def end_runs(self, reason: str) -> None:
        """End every open request with an error that says why. Call it on the loop."""
        for run in list(self.runs):
            run.fail(ApiError(503, f"{reason}; the answer is not complete", kind="server_error", code="stopped"))
