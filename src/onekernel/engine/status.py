"""What an engine is doing, as a snapshot: for health checks and metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Pages of the KV cache, and how many prompt tokens the prefix cache was asked for and gave, since the start."""

    pages_used: int = 0
    """Held by running requests."""
    pages_cached: int = 0
    """Held by nothing but the prefix cache: free to whoever needs them."""
    pages_total: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of an engine; `running` requests have had a turn, `waiting` ones have not."""

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    failure: str | None
    """Why the engine takes no more requests, if it failed."""
    closed: bool
