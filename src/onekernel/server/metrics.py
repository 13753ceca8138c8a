"""What /metrics says, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from onekernel.engine.engine import Engine
from onekernel.engine.request import Completion

_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKEN_S = (0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Metrics:
    """Counters and histograms of one server, and gauges that are read from its engine when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "onekernel_requests", "Requests by endpoint and HTTP status", ("path", "status"), registry=self.registry
        )
        self._answers = Counter("onekernel_answers", "Finished answers", ("finish_reason",), registry=self.registry)
        self._tokens = Counter(
            "onekernel_tokens",
            "Tokens: prefilled, taken from the prefix cache, generated",
            ("kind",),
            registry=self.registry,
        )
        self._ttft = Histogram(
            "onekernel_ttft_seconds", "Submission to first token", buckets=_TTFT_S, registry=self.registry
        )
        self._per_token = Histogram(
            "onekernel_time_per_token_seconds",
            "Mean time between an answer's tokens",
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self._queued = Histogram(
            "onekernel_queue_seconds", "Submission to first turn", buckets=_TTFT_S, registry=self.registry
        )

    def answered(self, completion: Completion) -> None:
        """Count a finished answer."""
        timings, usage = completion.timings, completion.usage
        self._answers.labels(completion.finish_reason).inc()
        self._tokens.labels("prompt").inc(usage.prompt_tokens - usage.cached_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("generated").inc(usage.completion_tokens)
        self._queued.observe(timings.queue_ms / 1e3)
        if timings.decode_tokens:
            self._ttft.observe(timings.ttft_ms / 1e3)
        if timings.decode_tokens > 1:
            self._per_token.observe(timings.decode_ms / (timings.decode_tokens - 1) / 1e3)

    def watch(self, engine: Engine) -> None:
        """Add the gauges of an engine."""
        self.registry.register(_EngineCollector(engine))


class _EngineCollector(Collector):
    """Reads an engine's status once for each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and the prefix cache's counters."""
        status, memory = self._engine.status(), self._engine.backend.memory
        requests = GaugeMetricFamily("onekernel_queue", "Requests in the engine", labels=("state",))
        requests.add_metric(("running",), status.running)
        requests.add_metric(("waiting",), status.waiting)
        yield requests
        pages = GaugeMetricFamily("onekernel_kv_pages", "Pages of the KV cache", labels=("state",))
        pages.add_metric(("used",), status.kv_pages_used)
        pages.add_metric(("cached",), status.kv_pages_cached)
        pages.add_metric(("total",), status.kv_pages_total)
        yield pages
        cache = CounterMetricFamily("onekernel_prefix_cache_tokens", "Prompt tokens", labels=("kind",))
        cache.add_metric(("asked",), status.prefix_query_tokens)
        cache.add_metric(("hit",), status.prefix_hit_tokens)
        yield cache
        held = GaugeMetricFamily("onekernel_memory_bytes", "Memory of the model on its device", labels=("kind",))
        held.add_metric(("weights",), memory.weights_bytes)
        held.add_metric(("kv_cache",), memory.kv_bytes)
        held.add_metric(("workspace",), memory.workspace_bytes)
        yield held
        failed = GaugeMetricFamily("onekernel_failed", "1 after an engine failure")
        failed.add_metric((), 0 if status.failure is None else 1)
        yield failed


async def metrics(request: Request) -> Response:
    """Return all metrics as text."""
    body = generate_latest(request.app.state.service.metrics.registry)
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")
