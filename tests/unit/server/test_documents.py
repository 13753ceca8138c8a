"""What a server says of itself: the OpenAPI document and the metrics."""

from __future__ import annotations

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from onekernel.server.fields import ChatBody
from onekernel.server.openapi import document
from tests.unit.server.conftest import Start


def test_the_document_lists_every_endpoint(http: httpx.Client) -> None:
    told = http.get("/openapi.json").json()
    assert told["openapi"].startswith("3.1")
    paths = {"/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
    assert paths == set(told["paths"])


def test_every_reference_leads_somewhere_and_members_are_those_that_are_read() -> None:
    told = document()
    text = msgspec.json.encode(told).decode()
    for name in {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in told["components"]["schemas"]
    assert set(told["components"]["schemas"]["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    assert told["components"]["schemas"]["ChatBody"]["required"] == ["messages"]


def test_the_metrics_count_what_happened(scripted: Start) -> None:
    server = scripted("abc")
    server.chat(max_tokens=2)
    server.chat()
    server.chat(n=100)
    server.http.get("/no/such/path")
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    found = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert found["onekernel_requests_total", "/v1/chat/completions", "200"] == 2
    assert found["onekernel_requests_total", "/v1/chat/completions", "400"] == 1
    assert found["onekernel_requests_total", "other", "404"] == 1
    assert found["onekernel_answers_total", "length"] == found["onekernel_answers_total", "stop"] == 1
    assert found["onekernel_tokens_total", "generated"] == server.backend.yielded
    assert found["onekernel_ttft_seconds_count",] == found["onekernel_time_per_token_seconds_count",] == 2
    assert found["onekernel_queue", "running"] == found["onekernel_queue", "waiting"] == 0
    assert ("onekernel_kv_pages", "total") in found and ("onekernel_memory_bytes", "weights") in found
    assert ("onekernel_prefix_cache_tokens_total", "hit") in found
    assert found["onekernel_failed",] == 0
