"""One trace from the gateway to the engine's phases, received over OTLP; and no content in spans or logs."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from gateway_case import Answering, Asked, chunk, fake_server, pool_file, running, say
from lmworks.observability.tracing import PHASES, Tracing
from lmworks.serve.telemetry import JSONFormatter
from otlp_receiver import Received, otlp_receiver
from serve_processes import start_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET, ANSWER = "xyzzy-prompt", "plugh-answer"


def tracing_to(received: Received) -> Tracing:
    provider = TracerProvider(resource=Resource.create({"service.name": "gateway"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{received.url}/v1/traces")))
    return Tracing(provider)


def test_each_try_is_a_span_and_servers_are_below_it(tmp_path: Path) -> None:
    """The first server fails, the second one answers: it is told that its parent is the second try."""

    async def fails(asked: Asked, answering: Answering) -> None:
        await answering.whole({}, 503)

    async def answers(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, ANSWER)

    async def main(received: Received) -> None:
        async with (
            fake_server(fails) as bad,
            fake_server(answers) as good,
            running(pool_file(tmp_path / "g.toml", bad, good), tracing=tracing_to(received)) as case,
        ):
            body = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
            for _ in range(2):  # one of them is tried twice: servers take turns
                answer = await case.http.post("/v1/chat/completions", json=body, headers=CONTEXT)
                assert answer.status_code == 200
            spans = [span for _, span in received.spans()]
            *_, request = (span for span in spans if span.name != "try" and len(tries_of(spans, span)) == 2)
            first, second = tries_of(spans, request)
            assert request.trace_id.hex() == TRACE and request.parent_span_id.hex() == PARENT
            assert (request.kind, second.kind) == (2, 3), "SERVER, CLIENT"
            assert (first.status.code, second.status.code, request.status.code) == (2, 0, 0)
            told = [one.headers["traceparent"] for one in good.asked]
            assert f"00-{TRACE}-{second.span_id.hex()}-01" in told
            assert good.asked[0].headers["tracestate"] == "vendor=1"
            values = {one.key: one.value for one in request.attributes}
            assert values["lmworks.tenant"].string_value == "anyone" and values["lmworks.tries"].int_value == 2
            assert values["gen_ai.request.model"].string_value == "m"
            assert values["gen_ai.usage.output_tokens"].int_value == 1

    with otlp_receiver() as received:
        asyncio.run(main(received))
        assert not [body for body in received.bodies if SECRET.encode() in body or ANSWER.encode() in body]


def tries_of(spans: list[object], request: object) -> list[object]:
    found = [span for span in spans if span.parent_span_id == request.span_id]  # type: ignore[attr-defined]
    return sorted(found, key=lambda span: span.start_time_unix_nano)  # type: ignore[attr-defined]


def test_without_a_receiver_the_context_passes_through(tmp_path: Path) -> None:
    async def answers(asked: Asked, answering: Answering) -> None:
        await say(asked, answering, "x")

    async def main() -> None:
        async with fake_server(answers) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            await case.http.post("/v1/chat/completions", json={"model": "m", "messages": []}, headers=CONTEXT)
            await case.ask()
            seen = [{name: one.headers.get(name) for name in CONTEXT} for one in server.asked]
            assert seen == [CONTEXT, dict.fromkeys(CONTEXT)]

    asyncio.run(main())


def test_logs_have_no_content(tmp_path: Path) -> None:
    """Whatever becomes of a request: answered, refused, broken, of an unknown model."""

    async def behave(asked: Asked, answering: Answering) -> None:
        how = asked.json["messages"][0]["content"].removeprefix(SECRET)
        if how == "break":
            answering.begin_stream()
            await answering.event(chunk(ANSWER))
            answering.die()
        elif how == "refuse":
            await answering.whole({"error": {"message": f"{SECRET} is bad", "code": ANSWER}}, 400)
        elif how == "fail":
            await answering.whole({"error": {"message": f"{SECRET} {ANSWER}"}}, 500)
        else:
            await say(asked, answering, ANSWER)

    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JSONFormatter())
    log = logging.getLogger("lmworks.gateway")

    async def main() -> None:
        async with fake_server(behave) as server, running(pool_file(tmp_path / "g.toml", server)) as case:
            headers = {"authorization": "Bearer sk-frotz-key", "x-api-key": "sk-frotz-key"}
            for how in ("", "break", "refuse", "fail"):
                body = {"model": "m", "messages": [{"role": "user", "content": SECRET + how}], "stream": how == "break"}
                await case.http.post("/v1/chat/completions?key=sk-frotz-key", json=body, headers=headers)
            await case.http.post("/v1/chat/completions", json={"model": SECRET, "messages": []}, headers=headers)
            await case.http.post("/v1/chat/completions", content=f'{{"model": "m", "{SECRET}'.encode())
            await case.http.get(f"/{SECRET}")

    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        asyncio.run(main())
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = written.getvalue()
    assert lines.count('"message": "request"') == 4 and '"status": 400' in lines
    for text in (SECRET, ANSWER, "frotz"):
        assert text not in lines, [line for line in lines.splitlines() if text in line]


@pytest.mark.slow
def test_one_trace_through_real_processes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client → gateway → try → server → queue, prefill, decode, postprocess; nothing of the prompt in spans or logs."""
    with otlp_receiver() as received, socket.socket() as free:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        server = start_server(model / "tiny", model / "template.jinja", tmp_path / "server.log")
        file = tmp_path / "g.toml"
        file.write_text(f'[health]\ninterval = 0.2\n[[pools]]\nname = "local"\nurls = ["{server.url}"]\n')
        with (tmp_path / "gateway.log").open("wb") as log:
            command = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", str(port)]
            gateway = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            server.wait_ready()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
                end = time.monotonic() + 60
                while not ready(http):
                    assert time.monotonic() < end
                    time.sleep(0.1)
                body = {"model": "tiny", "prompt": SECRET, "max_tokens": 20, "ignore_eos": True, "stream": True}
                answer = http.post("/v1/completions", json=body, headers=CONTEXT)
                assert answer.status_code == 200
            while len(spans := of_trace(received)) < 7 and time.monotonic() < end + 30:
                time.sleep(0.1)
        finally:
            gateway.terminate()
            gateway.wait(30)
            server.kill()
    by_name = {(service, span.name): span for service, span in spans}
    request, tried = by_name["lmworks-gateway", "POST /v1/completions"], by_name["lmworks-gateway", "try"]
    served = by_name["lmworks", "POST /v1/completions"]
    assert request.parent_span_id.hex() == PARENT
    assert tried.parent_span_id == request.span_id and served.parent_span_id == tried.span_id
    parts = [by_name["lmworks", phase] for phase in PHASES]
    assert all(part.parent_span_id == served.span_id for part in parts)
    assert len(spans) == 7
    edges = [request.start_time_unix_nano, tried.start_time_unix_nano, served.start_time_unix_nano]
    edges += [part.start_time_unix_nano for part in parts]
    assert edges == sorted(edges), "each begins within the one before it"
    content = [text for text in (answer.text.split('"text":"')[1].split('"')[0],) if len(text) > 3]
    seen = b"".join(received.bodies) + (tmp_path / "server.log").read_bytes() + (tmp_path / "gateway.log").read_bytes()
    assert b'"message": "request"' in seen
    assert not [text for text in (SECRET, *content) if text.encode() in seen]


def of_trace(received: Received) -> list[Any]:
    """Without those of probes."""
    return [(service, span) for service, span in received.spans() if span.trace_id.hex() == TRACE]


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
