"""Prefill apart from decode: which requests go where, what does not fit together, and real servers that are killed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, FakeServer, Running, fake_server, running, say
from lmworks.gateway.config import GatewayConfig
from lmworks.spec import SpecError
from serve_processes import ServeProcess, start_server
from tiny import make_spec, train

BLOCKS = "tcp://10.0.0.1:7071"
SETTINGS = {
    "fingerprint": "ab", "block": 16, "dtype": "fp32", "kv_dtype": "auto", "context": 512, "listen": "", "peers": [],
}  # fmt: skip
PREFILL = SETTINGS | {"listen": BLOCKS}
DECODE = SETTINGS | {"peers": [BLOCKS]}
FILE = """
[health]
interval = 0.05
[timeouts]
first_token = {first_token}
[[pools]]
name = "prompts"
urls = [{prefill}]
[[pools]]
name = "answers"
urls = [{decode}]
[[models]]
name = "{model}"
prefill_pools = ["prompts"]
pools = ["answers"]
policy = ["round_robin"]
"""


def write_file(file: Path, prefill: Any, decode: Any, model: str = "m", first_token: float = 60.0) -> Path:
    urls = [", ".join(f'"{server.url}"' for server in servers) for servers in (prefill, decode)]
    file.write_text(FILE.format(prefill=urls[0], decode=urls[1], model=model, first_token=first_token))
    return file


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "hel", "lo")


async def busy(asked: Asked, answering: Answering) -> None:
    await answering.whole({"error": {"message": "busy", "code": "busy"}}, 503)


async def wrong(asked: Asked, answering: Answering) -> None:
    await answering.whole({"error": {"message": "no such field", "code": "invalid_request"}}, 400)


async def dying(asked: Asked, answering: Answering) -> None:
    answering.die()


async def hanging(asked: Asked, answering: Answering) -> None:
    await asyncio.sleep(60)


@asynccontextmanager
async def pools(
    folder: Path, prefill: list[dict[str, Any]], decode: list[dict[str, Any]], first_token: float = 60.0
) -> AsyncGenerator[tuple[Running, list[FakeServer], list[FakeServer]], None]:
    """Fake servers with these settings of transfers; `behave` among them says how one answers."""
    async with AsyncExitStack() as stack:
        found = [
            [
                await stack.enter_async_context(fake_server(one.get("behave", hello), transfers={"m": settings(one)}))
                for one in pool
            ]
            for pool in (prefill, decode)
        ]
        file = write_file(folder / "g.toml", *found, first_token=first_token)
        yield await stack.enter_async_context(running(file)), *found


def settings(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "behave"}


async def prefills(case: Running) -> dict[str, float]:
    """By who computed the prompt."""
    lines = (await case.http.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("lmworks:gateway_prefills_total{")]
    return {line.split('where="')[1].split('"')[0]: float(line.split()[-1]) for line in counted}


# --- which requests go where ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_goes_to_a_prefill_server_for_one_token_first(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with pools(tmp_path, [PREFILL], [DECODE]) as (case, [prefill], [decode]):
            answer = await case.ask(stream=stream, max_completion_tokens=9, n=2, seed=3, logprobs=True, user="u")
            assert answer.status_code == 200 and "hel" in answer.text
            [first], [second] = prefill.asked, decode.asked
            assert first.json == {
                "model": "m", "messages": [], "seed": 3, "user": "u", "max_tokens": 1, "stream": False,
            }  # fmt: skip
            assert second.json["kv_transfer_params"] == {"remote": BLOCKS}
            assert (second.json["max_completion_tokens"], second.json["n"], second.json["stream"]) == (9, 2, stream)
            assert await prefills(case) == {"remote": 1}

    asyncio.run(main())


@pytest.mark.parametrize("behave", [dying, busy])
def test_another_prefill_server_is_asked_where_one_fails(tmp_path: Path, behave: Any) -> None:
    other = "tcp://10.0.0.2:7071"
    good, decode = SETTINGS | {"listen": other}, SETTINGS | {"peers": [BLOCKS, other]}

    async def main() -> None:
        async with pools(tmp_path, [PREFILL | {"behave": behave}, good], [decode]) as (case, prefill, [decoding]):
            for _ in range(2):  # taken in turn: at least one of both begins with the server that fails
                assert (await case.ask()).status_code == 200
            assert [bool(prefill[0].asked), len(prefill[1].asked)] == [True, 2]
            assert [one.json["kv_transfer_params"]["remote"] for one in decoding.asked] == [other, other]

    asyncio.run(main())


@pytest.mark.parametrize("behave", [dying, busy, wrong, hanging])
def test_decode_server_computes_the_prompt_where_no_prefill_server_does(tmp_path: Path, behave: Any) -> None:
    async def main() -> None:
        prefill = PREFILL | {"behave": behave}
        async with pools(tmp_path, [prefill], [DECODE], first_token=1.0) as (case, [asked], [decode]):
            assert "hel" in (await case.ask(stream=True)).text
            assert asked.asked and "kv_transfer_params" not in decode.asked[0].json
            assert await prefills(case) == {"local": 1}

    asyncio.run(main())


def test_a_prefill_server_that_is_down_is_not_waited_for_and_answers_where_no_other_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with pools(tmp_path, [PREFILL], [DECODE]) as (case, [prefill], [decode]):
            prefill.healthy = False
            await case.until(lambda: [one.up for one in case.gateway.servers] == [False, True])
            assert (await case.ask()).status_code == 200
            prefill.healthy, decode.healthy = True, False
            await case.until(lambda: [one.up for one in case.gateway.servers] == [True, False])
            assert (await case.ask(max_tokens=7)).status_code == 200
            assert [one.json.get("max_tokens") for one in prefill.asked] == [7]
            assert await prefills(case) == {"local": 1}

    asyncio.run(main())


def test_requests_that_need_the_whole_prompt_computed_go_to_the_decode_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with pools(tmp_path, [PREFILL], [DECODE]) as (case, [prefill], [decode]):
            assert (await case.ask(prompt_logprobs=1)).status_code == 200
            body = {"model": "m", "input": "x"}
            assert (await case.http.post("/v1/embeddings", json=body)).status_code == 200
            assert not prefill.asked and len(decode.asked) == 2

    asyncio.run(main())


def test_names_without_a_rule_are_answered_by_other_pools(tmp_path: Path) -> None:
    found = GatewayConfig.from_dict(
        {
            "pools": [{"name": name, "urls": ["http://a/v1"]} for name in ("p", "d", "e")],
            "models": [{"name": "m", "prefill_pools": ["p"], "pools": ["d"]}, {"name": "n"}],
        }
    )
    assert found.rule("n").pools == found.rule("other").pools == ["d", "e"]
    assert [found.transfers(name) for name in "pde"] == [True, True, False]


# --- what does not fit together ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ({"block": 32}, {}, r"engine.block is 32 at http://127.0.0.1:\d+/v1 and 16 at http"),
        ({"kv_dtype": "fp8"}, {}, "engine.kv_dtype is fp8 at"),
        ({"tp": 2}, {}, "engine.tp is 2 at"),
        ({"context": 256}, {}, "engine.context is 256 at"),
        ({"fingerprint": "cd"}, {}, "have other weights of 'm'"),
        ({"listen": ""}, {}, "hands out no KV blocks of 'm': set its engine.kv_listen"),
        ({}, {"peers": ["tcp://10.0.0.9:1"]}, "lacks 'tcp://10.0.0.1:7071'"),
    ],
)
def test_settings_that_disagree_are_refused_by_name(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], message: str
) -> None:
    async def main() -> None:
        async with pools(tmp_path, [PREFILL | prefill], [DECODE | decode]) as (case, [asked], [decoding]):
            answer = await case.ask()
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "prefill_disagrees"
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(answer.json()["error"]["message"])
            assert not asked.asked and not decoding.asked

    asyncio.run(main())


def test_servers_that_fit_together_are_paired(tmp_path: Path) -> None:
    """Two versions of the weights in both pools, and a decode server that fits to nobody."""
    one, other = ({"fingerprint": name, "listen": f"tcp://{name}:1"} for name in ("ab", "cd"))
    peers = {"peers": ["tcp://ab:1", "tcp://cd:1"]}
    decode = [SETTINGS | peers | {"fingerprint": name} for name in ("ab", "cd", "ef")]

    async def main() -> None:
        async with pools(tmp_path, [SETTINGS | one, SETTINGS | other], decode) as (case, prefill, decoding):
            for _ in range(4):
                assert (await case.ask()).status_code == 200
            assert [len(each.asked) for each in (*prefill, *decoding)] == [2, 2, 2, 2, 0]
            remotes = [{each.json["kv_transfer_params"]["remote"] for each in one.asked} for one in decoding[:2]]
            assert remotes == [{"tcp://ab:1"}, {"tcp://cd:1"}]

    asyncio.run(main())


def test_an_address_of_all_interfaces_is_that_of_the_server(tmp_path: Path) -> None:
    prefill = SETTINGS | {"listen": "tcp://0.0.0.0:7071"}

    async def main() -> None:
        async with pools(tmp_path, [prefill], [SETTINGS | {"peers": ["tcp://127.0.0.1:7071"]}]) as (case, _, [decode]):
            assert (await case.ask()).status_code == 200
            assert decode.asked[0].json["kv_transfer_params"] == {"remote": "tcp://127.0.0.1:7071"}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models": [{"name": "m", "prefill_pools": ["p"]}]}, "prefill_pools need pools"),
        ({"models": [{"name": "m", "prefill_pools": ["p"], "pools": ["p"]}]}, "'p' is one of pools and of"),
        ({"models": [{"name": "m", "prefill_pools": ["q"], "pools": ["d"]}]}, "no pool is called 'q'"),
        ({"rollouts": [{"model": "m", "stable": "d", "candidate": "e"}]}, "cannot have a rollout"),
        ({"pools": [{"name": "p", "urls": ["http://a/v1"], "kind": "vllm"}, {"name": "d", "urls": ["http://b/v1"]}]},
         "kind = 'lmworks' on both sides"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(changed: dict[str, Any], message: str) -> None:
    file = {
        "pools": [{"name": name, "urls": ["http://a/v1"]} for name in ("p", "d", "e")],
        "models": [{"name": "m", "prefill_pools": ["p"], "pools": ["d"]}],
    }
    GatewayConfig.from_dict(file)
    with pytest.raises(SpecError, match=message):
        GatewayConfig.from_dict(file | changed)


# --- real servers -----------------------------------------------------------------------------------------

PROMPTS = [[(number * i * i + 3 * i) % 250 for i in range(100)] for number in range(7, 19)]
HOST = ("engine.kv_host_gib=0.05", "engine.batch_invariant=true")


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module", params=["dense", "moe"])
def served(request: pytest.FixtureRequest, model: Path, dataset: Path) -> Path:
    if request.param == "dense":
        return model / "tiny"
    folder = model / "moe"
    train(make_spec(dataset, "model.context=512", "model.experts=4", "model.top_k=2", "optim.steps=4"), folder)
    return folder


@contextmanager
def processes(served: Path, folder: Path, *options: tuple[str, ...]) -> Iterator[list[ServeProcess]]:
    template = served.parent / "template.jinja"
    found = [
        start_server(served, template, folder / f"{number}.log", *HOST, *each) for number, each in enumerate(options)
    ]
    try:
        for each in found:
            each.wait_ready()
        yield found
    finally:
        for each in found:
            each.kill()


async def complete(http: httpx.AsyncClient, url: str, prompt: list[int], **more: Any) -> tuple[list[str], int]:
    """The tokens of a stream, and how many of its prompt were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "logprobs": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0, **more}
    tokens: list[str] = []
    cached = -1
    async with http.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    tokens += choice["logprobs"]["tokens"]
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens, cached


@pytest.mark.slow
def test_streams_are_those_of_one_server_while_prefill_servers_are_killed(served: Path, tmp_path: Path) -> None:
    blocks = [free_address(), free_address()]
    options = [*((f"engine.kv_listen={each}",) for each in blocks), (f"engine.kv_peers={json.dumps(blocks)}",), ()]
    sampled = {"temperature": 1.0, "seed": 5}

    async def main(prefill: list[ServeProcess], decode: ServeProcess, alone: ServeProcess) -> None:
        file = write_file(tmp_path / "g.toml", prefill, [decode], "tiny")
        async with httpx.AsyncClient(trust_env=False) as http, running(file) as case:
            url = str(case.http.base_url).rstrip("/") + "/v1"
            await case.until(lambda: all(one.up for one in case.gateway.servers))
            want = [(await complete(http, alone.url, prompt))[0] for prompt in PROMPTS]
            assert await complete(http, url, PROMPTS[0]) == (want[0], 96)
            seeded = (await complete(http, alone.url, PROMPTS[0], **sampled))[0]
            assert (await complete(http, url, PROMPTS[0], **sampled))[0] == seeded != want[0]
            assert await prefills(case) == {"remote": 2}
            # The first dies while prompts are under way, the second between two requests.
            reading = [asyncio.create_task(complete(http, url, prompt)) for prompt in PROMPTS[1:6]]
            await case.until(lambda: any(one.open for one in case.gateway.servers))
            prefill[0].kill()
            assert [(await one)[0] for one in reading] == want[1:6]
            assert await prefills(case) == {"remote": 7}  # the other prefill server computes them
            prefill[1].kill()
            assert [(await complete(http, url, prompt)) for prompt in PROMPTS[6:8]] == [(one, 0) for one in want[6:8]]
            assert await prefills(case) == {"remote": 7, "local": 2}

    with processes(served, tmp_path, *options) as [*prefill, decode, alone]:
        asyncio.run(main(prefill, decode, alone))


@pytest.mark.slow
def test_real_servers_with_other_blocks_are_refused(model: Path, tmp_path: Path) -> None:
    blocks = free_address()
    options = ((f"engine.kv_listen={blocks}", "engine.block=32"), (f'engine.kv_peers=["{blocks}"]',))

    async def main(prefill: ServeProcess, decode: ServeProcess) -> None:
        async with running(write_file(tmp_path / "g.toml", [prefill], [decode], "tiny")) as case:
            await case.until(lambda: all(one.up for one in case.gateway.servers))
            answer = await case.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert answer.status_code == 503
            message = f"engine.block is 32 at {prefill.url} and 16 at {decode.url}: they must be the same"
            assert message in answer.json()["error"]["message"]

    with processes(model / "tiny", tmp_path, *options) as found:
        asyncio.run(main(*found))
