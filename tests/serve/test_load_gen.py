"""`lmworks bench serve`, against a server whose delays are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from api_server import until

from fake_server import FakeServer
from lmworks.bench.http_client import HttpExchange, Target, exchange
from lmworks.bench.serve import Slo, bench_serve
from lmworks.bench.workload import Arrivals, Lengths, Load, read_prefix
from lmworks.spec import LMWorksError, SpecError
from typed import lmworks

SHORT = Lengths(input=(3, 9), output=(4, 8))


async def promptly(talk):
    """As many tokens as it was asked for."""
    await talk.head()
    count = talk.body["max_tokens"]
    for number in range(count):
        await talk.token(finish="length" if number == count - 1 else None)
    await talk.end(count, len(talk.body.get("prompt", ())), cached=2)


# --- what is sent, and when -------------------------------------------------------------------------------


def test_arrivals_are_poisson():
    """Gaps: mean 1/rate, and as exponential as chance allows (Kolmogorov–Smirnov, 1 in 1000 for a fair draw)."""
    times = Arrivals(rate=20.0).times(4000, random.Random(1))
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    worst = max(abs((place + 1) / len(gaps) - (1 - math.exp(-20 * gap))) for place, gap in enumerate(gaps))
    assert worst < 1.95 / math.sqrt(len(gaps))


def test_burst_arrivals():
    times = Arrivals(rate=10.0, burst=5).times(1000, random.Random(2))
    assert all(len(set(times[place : place + 5])) == 1 for place in range(0, 1000, 5))
    assert len(set(times)) == 200 and times[-1] == pytest.approx(100, rel=0.2)
    assert Arrivals(burst=3).times(7, random.Random(0)) == [0, 0, 0, 1, 1, 1, 2]
    assert Arrivals().times(3, random.Random(0)) == [0, 0, 0]


def test_seed_repeats_requests():
    load = Load(50, Arrivals(rate=5), SHORT, shared_prefix=20, groups=3, seed=7)
    shots = load.draw("completions", "m")
    assert shots == load.draw("completions", "m") != Load(50, Arrivals(rate=5), SHORT, 20, 3).draw("completions", "m")
    bodies = [json.loads(shot.body) for shot in shots]
    prompts = [body["prompt"] for body in bodies]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3 and len({tuple(p[:22]) for p in prompts}) > 40
    assert {len(prompt) - 20 for prompt in prompts} == set(range(3, 10))
    assert {body["max_tokens"] for body in bodies} == set(range(4, 9))
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input": 5, "output": 70}\n{"input": 90, "output": 1}\n')
    bodies = [json.loads(shot.body) for shot in Load(30, lengths=Lengths.of_file(path)).draw("completions", "m")]
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} == {(5, 70), (90, 1)}
    for wrong in ('{"input": 5}', "[1, 2]", '{"input": 0, "output": 1}', "x", ""):
        path.write_text(wrong)
        with pytest.raises(SpecError, match="lengths"):
            Lengths.of_file(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Arrivals(rate=1, concurrency=2), "cannot be combined"),
        (lambda: Slo.parse("ttft"), "write seconds"),
        (lambda: Slo.parse("speed=1"), "write seconds"),
        (lambda: Slo.parse("ttft=nan"), "write seconds"),
        (lambda: read_prefix("12xy"), "TOKENSxGROUPS"),
        (lambda: Lengths(input=(5, 2)), "LOW:HIGH"),
        (lambda: Target.of("ftp://x"), "http://HOST:PORT"),
        (lambda: Target.of("http://x", "a\r\nb"), "not allowed in a header"),
    ],
)
def test_invalid_options_are_rejected(make, said):
    with pytest.raises(SpecError, match=said):
        make()


# --- what comes back --------------------------------------------------------------------------------------


def parsed(data, cuts):
    """An answer that arrives in pieces."""
    loop = asyncio.new_event_loop()
    talk = HttpExchange(b"", loop.create_future())
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        talk.data_received(data[begin:end])
    over = talk.done_future.done()
    loop.close()
    return over, talk.reply


def test_stream_parser_for_any_chunking():
    events = [{"choices": [{"text": f"é{n}", "index": 0, "finish_reason": None}]} for n in range(6)]
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events] + [b": hello\n\n"]
    body = b"".join([*lines, b"data: [DONE]\n\n"])
    luck = random.Random(3)
    for framing in ("chunked", "length"):
        if framing == "chunked":
            ends = sorted(luck.sample(range(1, len(body)), 5))
            parts = [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]
            sent = b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            how = b"Transfer-Encoding: chunked"
        else:
            sent, how = body, b"Content-Length: %d" % len(body)
        data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + how
        data += b"\r\nContent-Type: text/event-stream\r\n\r\n" + sent
        for cuts in [*([cut] for cut in range(len(data))), sorted(luck.sample(range(len(data)), 60))]:
            over, reply = parsed(data, cuts)
            assert (over, reply.status, len(reply.times), reply.done, reply.error) == (True, 200, 6, True, None)


def test_invalid_http_is_an_error():
    assert parsed(b"SSH-2.0-OpenSSH\r\n\r\n", [])[1].error == "the response is not HTTP"


def test_client_equals_httpx():
    async def mixed(talk):
        await talk.head("200 OK", "application/json")
        for piece in ('{"a": "', "é" * 5000, '"}'):
            await talk.chunk(piece.encode())
        await talk.chunk(b"")

    with FakeServer(mixed) as server:
        ours = asyncio.run(exchange(Target.of(server.url), "POST", "/v1/x", b"{}"))
        theirs = httpx.post(f"{server.url}/v1/x", content=b"{}", headers={"content-type": "application/json"})
    assert ours.document() == theirs.json() and ours.headers == dict(theirs.headers)


def test_run_summary():
    with FakeServer(promptly) as server:
        found = bench_serve(server.url, Load(40, Arrivals(concurrency=4), SHORT), Slo(e2e=10.0), key="sk-1").to_dict()
        sent = [talk.body for talk in server.talks]
        assert {talk.path for talk in server.talks} == {"/v1/completions"}
        assert {talk.headers["authorization"] for talk in server.talks} == {"Bearer sk-1"}
    assert (found["model"], found["requests"], found["completed"]) == ("fake", 40, 40)
    assert found["output_tokens"] == sum(body["max_tokens"] for body in sent)
    assert found["input_tokens"] == sum(len(body["prompt"]) for body in sent) and found["cached_tokens"] == 80
    assert found["rejected"] == found["errors"] == {} and found["goodput"]["share"] == 1.0
    assert "sk-1" not in json.dumps(found)


def test_times_match_server():
    """0.1 s to the first token, then 20 ms each but one of 120: no less, and little more, in one try of ten."""

    async def paced(talk):
        await talk.head()
        await asyncio.sleep(0.1)
        for gap in (0.02, 0.02, 0.12, 0.02, 0.0):
            await talk.token()
            await asyncio.sleep(gap)
        await talk.end(5)

    tries = []
    with FakeServer(paced) as server:
        for _ in range(10):
            load = Load(5, Arrivals(concurrency=1), SHORT)
            found = bench_serve(server.url, load, Slo(ttft=0.099), model="m").to_dict()
            assert found["ttft_s"]["p50"] >= 0.099 and found["e2e_s"]["p50"] >= 0.279
            assert found["goodput"]["requests"] == 0  # no first token can be there in less than 0.1 s
            tries.append([found[name]["p50"] for name in ("ttft_s", "itl_s", "request_itl_s")])
            tries[-1].append(found["itl_s"]["max"])
            if as_paced(tries[-1]):
                break
    assert as_paced(tries[-1]), tries


def as_paced(times):
    """On a machine that is not busy at every try: a token that is read late has the next one soon after it."""
    least, most = (
        (0.099, 0.019, 0.044, 0.119),
        (0.16, 0.06, 0.09, math.inf),
    )  # the third: (0.02 + 0.02 + 0.12 + 0.02) / 4
    return all(low <= found < high for low, found, high in zip(least, times, most, strict=True))


def test_open_loop_includes_stall():
    """Coordinated omission: the server accepts nothing for half a second; 50 requests a second were meant to come."""
    stall = 0.5

    async def stalling(talk):
        if talk.number == 0:
            time.sleep(stall)  # the whole server
        await promptly(talk)

    latest = []
    for _ in range(10):  # a busy machine may make some late, but not at every try
        with FakeServer(stalling) as server:
            measured = bench_serve(server.url, Load(25, Arrivals(rate=50), SHORT), Slo(), model="m")
        waits = [one.ttft for one in measured.outcomes]
        assert all(one.ttft >= stall - one.scheduled - 0.05 for one in measured.outcomes)
        assert statistics.mean(waits) > 0.15  # one polite client would have reported 0.5 s / 25
        latest.append(max(one.late for one in measured.outcomes))
        if latest[-1] < 0.3:
            break
    assert latest[-1] < 0.3, latest


def test_rejections_are_not_errors():
    async def overloaded(talk):
        error = {"error": {"message": "full", "type": "x", "param": None, "code": "queue_full"}}
        match talk.number % 5:
            case 0:
                await talk.document("429 Too Many Requests", error, "retry-after: 1\r\n")
            case 1:
                await talk.document("503 Service Unavailable", error)
            case 2:
                await talk.document("500 Oops", error)
            case 3:
                await talk.head()
                await talk.token()
                talk.writer.transport.abort()
            case _:
                await promptly(talk)

    with FakeServer(overloaded) as server:
        load = Load(25, Arrivals(concurrency=1), SHORT)
        found = bench_serve(server.url, load, Slo(ttft=60.0), model="m").to_dict()
    assert found["completed"] == 5 and found["rejected"] == {"429": 5, "503": 5}
    assert found["errors"] == {"full": 5, "the stream broke off": 5}
    assert found["goodput"]["share"] == 0.2 and found["rejected_s"]["p99"] < 5


def test_errors_within_a_stream_and_streams_without_an_end():
    async def failing(talk):
        await talk.head()
        await talk.token()
        if talk.number == 0:
            await talk.event({"error": {"message": "the engine stopped", "code": "engine"}})
            await talk.event(b"[DONE]")
        await talk.chunk(b"")

    with FakeServer(failing) as server:
        found = bench_serve(server.url, Load(2, Arrivals(concurrency=1), SHORT), Slo(), model="m").to_dict()
    assert found["errors"] == {"the engine stopped": 1, "the stream broke off": 1}


def test_request_timeout():
    async def silent(talk):
        await talk.head()
        await talk.token()
        await asyncio.sleep(30)

    with FakeServer(silent) as server:
        found = bench_serve(server.url, Load(3, Arrivals(), SHORT), Slo(), model="m", timeout=0.2).to_dict()
    assert found["errors"] == {"no end after 0.2 s": 3} and found["seconds"] < 25  # not what the server sleeps


def test_empty_first_chat_chunk_is_not_ttft():
    async def chat(talk):
        await talk.head()
        choice = lambda delta, finish=None: {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}  # noqa: E731
        await talk.event(choice({"role": "assistant", "content": ""}))
        await asyncio.sleep(0.1)
        for text in ("a", "", "b"):  # the second is half a character
            await talk.event(choice({"content": text}))
        await talk.event(choice({}, "stop"))
        await talk.event(b"[DONE]")
        await talk.chunk(b"")

    with FakeServer(chat) as server:
        measured = bench_serve(server.url, Load(2, Arrivals(concurrency=1), SHORT), Slo(), endpoint="chat")
        assert server.talks[0].path == "/v1/chat/completions" and server.talks[0].body["messages"][0]["content"]
    assert [one.tokens for one in measured.outcomes] == [3, 3]  # this server counts nothing: events
    assert all(one.ttft >= 0.099 for one in measured.outcomes)


def test_no_server():
    with pytest.raises(LMWorksError, match="cannot connect"):
        bench_serve("http://127.0.0.1:9", Load(1), Slo())


# --- the command ------------------------------------------------------------------------------------------


def test_the_command(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    with FakeServer(promptly) as server:
        line = f"bench serve --url {server.url}/v1 --rate 200 --burst 4 --requests 12 --input 3:9 --output 4:8"
        extra = ["--slo", "ttft=5,tpot=5", "--shared-prefix", "8x2", "--plot", str(tmp_path / "bench.png")]
        code, out, err = lmworks(capsys, *line.split(), *extra, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["completed"] == 12 and found["goodput"]["slo"] == {"ttft": 5.0, "tpot": 5.0, "itl": 5.0}
        assert (tmp_path / "bench.png").read_bytes()[1:4] == b"PNG"
        code, out, err = lmworks(capsys, *line.split(), *extra[:2])
    assert code == 0 and "goodput" in out and "time to first token" in out and "p99" in out


def test_run_without_success_fails(capsys):
    async def full(talk):
        await talk.document("429 Too Many Requests", {"error": {"message": "full"}})

    with FakeServer(full) as server:
        code, out, _ = lmworks(capsys, "bench", "serve", "--url", server.url, "--requests", "2", "--input", "3")
    assert code == 1 and "2 with 429" in out


# --- our own server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_own_server(api, endpoint):
    """What the client counts is what the server says, and what was drawn."""
    load = Load(12, Arrivals(concurrency=6), SHORT, shared_prefix=48, seed=3)
    found = bench_serve(api.url, load, Slo(e2e=60.0), endpoint=endpoint).to_dict()
    sent = [json.loads(shot.body) for shot in load.draw(endpoint, "tiny")]
    assert found["model"] == "tiny" and found["completed"] == 12 and found["goodput"]["share"] == 1.0
    assert found["output_tokens"] == sum(body["max_tokens"] for body in sent)
    assert found["cached_tokens"] >= 32 * 5  # two blocks of 16 that all begin with; the first six may come at once
    if endpoint == "completions":
        assert found["input_tokens"] == sum(len(body["prompt"]) for body in sent)


def test_own_server_with_full_queue(house, tmp_path):
    """64 run at once, none may wait: of 100 that come together the rest is turned away, and nothing fails."""
    config = tmp_path / "serve.toml"
    config.write_text("[limits]\nqueue = 0\n")
    load = Load(100, Arrivals(), Lengths((5, 5), (60, 60)), shared_prefix=1)  # no prompt begins with 13, its bane
    api, engine = house.open(config), house.backend.handle.process
    engine.send_signal(signal.SIGSTOP)  # else it may be done with the first before the last have come
    try:
        with ThreadPoolExecutor(1) as one:
            measured = one.submit(bench_serve, api.url, load, Slo())
            until(lambda: 'status="429"} 36.0' in api.http.get("/metrics").text)
            engine.send_signal(signal.SIGCONT)
            found = measured.result().to_dict()
    finally:
        engine.send_signal(signal.SIGCONT)
    assert found["errors"] == {} and found["completed"] == 64 and found["rejected"] == {"429": 36}
