"""What the operator of a server may set: names, access, limits, time-outs."""

from __future__ import annotations

from dataclasses import dataclass

from onekernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and choices of one server. Times in seconds, sizes in bytes."""

    model_names: tuple[str, ...] = ("model",)
    """What clients may call the model; the first is the one that answers carry."""
    api_key: str | None = None
    """What clients must send as `Authorization: Bearer KEY`; None: nothing."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have; empty: any. Keeps web pages from reaching a local server by DNS."""
    cors_origins: tuple[str, ...] = ()
    """Origins of other web pages that may use this server from a browser; `*`: all."""
    keep_alive_s: float = 10.0
    """A stream in which nothing was sent for this long gets a comment, so that proxies do not cut it."""
    request_timeout_s: float = 600.0
    """A request, waiting included, is cancelled after this time."""
    body_timeout_s: float = 30.0
    """A request's header and its body must each have arrived after this time."""
    shutdown_s: float = 10.0
    """Open requests may take this long to end when the server is told to stop."""
    failure_linger_s: float = 2.0
    """After an engine failure /health still answers, with the reason, for this long; then the process ends."""
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 1024
    max_messages: int = 2048
    max_choices: int = 8
    max_stops: int = 16
    max_tools: int = 128
    max_schema_bytes: int = 64 * 2**10
    max_schema_depth: int = 32

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"model_names is {self.model_names!r}; give at least one name, none of them empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("the API key is empty or has characters that an HTTP header cannot carry; use ASCII")
        for name in ("keep_alive_s", "request_timeout_s", "body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a number of seconds above 0")
        for name in ("shutdown_s", "failure_linger_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a number of seconds from 0")
        for name in self.__slots__:
            if name.startswith("max_") and not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a whole number of at least 1")
