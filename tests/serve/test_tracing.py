"""OpenTelemetry's own exporter sees a request's time, part by part, below the span that it came from."""

from __future__ import annotations

import pytest
from api_server import MODEL, House, until

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmworks.observability.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stream", [False, True])
def test_spans(house: House, stream: bool) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    api = house.open(tracing=Tracing(provider))
    body = {"model": MODEL, "prompt": "Hello secret", "max_tokens": 20, "ignore_eos": True, "stream": stream}
    api.post("/v1/completions", body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    until(lambda: len(exporter.get_finished_spans()) == 5)
    *parts, whole = exporter.get_finished_spans()
    assert [part.name for part in parts] == ["queue", "prefill", "decode", "postprocess"]
    assert whole.name == "POST /v1/completions" and whole.context is not None and whole.parent is not None
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes is not None and whole.attributes["gen_ai.usage.output_tokens"] == 20
    assert all(part.parent is not None and part.parent.span_id == whole.context.span_id for part in parts)
    edges = [part.start_time or 0 for part in parts] + [parts[-1].end_time or 0]
    assert edges == sorted(edges) and [part.end_time for part in parts] == edges[1:]
    assert (whole.start_time or 0) <= edges[0] and edges[-1] <= (whole.end_time or 0)
    assert parts[2].end_time - parts[2].start_time > 1e6, "twenty tokens take more than a millisecond"  # type: ignore
    assert "secret" not in whole.to_json()
