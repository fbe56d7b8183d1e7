"""Bodies: nesting and counts are known before anything is parsed or validated, and work is done in other processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from api_server import MODEL, House
from worker_tasks import lost, nap

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.serve import workers as module
from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.body import NestingLimiter, parse
from lmworks.serve.limits import APIError, Limits
from lmworks.serve.prompts import encode
from lmworks.serve.protocols.responses.bodies import ResponsesRequest
from lmworks.serve.request_bodies import ChatRequest, CompletionRequest, EmbeddingRequest
from lmworks.serve.workers import PromptProcessor, WorkerPool

COMPLETION = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


# --- nesting ----------------------------------------------------------------------------------------------


def made(draw: random.Random, depth: int) -> Any:
    """Any JSON, with strings that look like what is around them."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice([1, -2.5e3, True, None, "", '"', "\\", '\\"[', "[{", "a\\\\", "é]}", ',"x":['])
    if draw.random() < 0.5:
        return [made(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(["a", '"', "\\", "[", "b\\"]) + str(i): made(draw, depth - 1) for i in range(draw.randrange(4))}


def depth_of(found: Any) -> int:
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


def containers_of(found: Any) -> int:
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
    return 0 if inside is None else 1 + sum(map(containers_of, inside))


def test_nesting_depth_for_any_chunking() -> None:
    draw = random.Random(0)
    for _ in range(400):
        found = made(draw, 6)
        raw = json.dumps(found, ensure_ascii=draw.random() < 0.5).encode()
        seen, at, deepest = NestingLimiter(100, 10**6), 0, 0
        while at < len(raw):
            size = draw.choice([1, 1, 2, 3, 7, 50])
            for byte in range(at, min(at + size, len(raw))) if size == 1 else ():
                seen.feed(raw[byte : byte + 1])
                deepest = max(deepest, seen.depth)
            if size > 1:
                seen.feed(raw[at : at + size])
            at += size
        assert seen.depth == 0 and seen.containers == containers_of(found) and not seen.open
        depth = depth_of(found)
        NestingLimiter(depth, 10**6).feed(raw)
        if depth:
            with pytest.raises(APIError, match=f"deeper than {depth - 1} levels"):
                NestingLimiter(depth - 1, 10**6).feed(raw)


def test_values_are_counted_incrementally() -> None:
    for part in (b"[],", b'"a",', b"{},"):
        seen = NestingLimiter(5, 1000)
        seen.feed(b"[" + part * 990)
        with pytest.raises(APIError, match="more than 1000 objects, lists and strings"):
            seen.feed(part * 20)
    NestingLimiter(5, 10).feed(b'["' + b'\\"' * 1000 + b'"]')  # one string


# --- counts -----------------------------------------------------------------------------------------------

LIMITS = Limits(prompts=3, messages=4, tools=1, stop=2, logit_bias=2, metadata=1)
PART, CALL = {"type": "text", "text": "a"}, {"id": "1", "function": {"name": "f", "arguments": "{}"}}
TOO_MANY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt": (COMPLETION, {"prompt": ["a"] * 4}),
    "messages": (CHAT, {"messages": CHAT["messages"] * 5}),  # type: ignore[operator]
    "messages: parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 3}] * 2}),
    "messages: calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 3}] * 2}),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}),
    "stop": (COMPLETION, {"stop": ["a", "b", "c"]}),
    "stop_token_ids": (COMPLETION, {"stop_token_ids": [1, 2, 3]}),
    "logit_bias": (COMPLETION, {"logit_bias": {"1": 1, "2": 1, "3": 1}}),
    "metadata": (COMPLETION, {"metadata": {"a": "1", "b": "2"}}),
    "guided_json": (COMPLETION, {"guided_json": {"enum": ["a" * 70_000]}}),
    "guided_choice": (COMPLETION, {"guided_choice": ["a"] * 20_000}),
    "guided_regex": (COMPLETION, {"guided_regex": "a" * 70_000}),
    "response_format.json_schema.schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 70_000]}}}},
    ),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_values_are_rejected_before_validation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, more = TOO_MANY[name]
    kind = ChatRequest if base is CHAT else CompletionRequest
    parse(None, json.dumps(base).encode(), kind, LIMITS)
    monkeypatch.setattr(kind, "model_validate", None)
    with pytest.raises(APIError, match="at most") as refusal:
        parse(None, json.dumps(base | more).encode(), kind, LIMITS)
    assert (refusal.value.status, refusal.value.param) == (400, name.partition(":")[0])


def test_token_ids_are_parsed_as_arrays() -> None:
    for prompt, expected in (
        ([1, 2], array("i", [1, 2])),
        ([[1], [2, 3]], [array("i", [1]), array("i", [2, 3])]),
        (["a", "b"], ["a", "b"]),
    ):
        body = parse(None, json.dumps(COMPLETION | {"prompt": prompt}).encode(), CompletionRequest, Limits())
        assert body.prompt == expected


# --- worker processes -------------------------------------------------------------------------------------


def test_worker_process_uses_model_tokenizer() -> None:
    processor = PromptProcessor("m", PromptTokenizer(ByteTokenizer()))

    async def use() -> None:
        workers = WorkerPool(1)
        try:
            plain = (None, False)
            prompts = ["Hé", array("i", [65])]
            texts, (ids, given), made = await workers.run("a", processor, encode, prompts, 257, True, plain, None)
            assert (texts, list(ids), list(given), made) == (["Hé", "A"], list("Hé".encode()), [65], 3)
            with pytest.raises(APIError, match="not below 257") as refusal:
                await workers.run("a", processor, encode, [array("i", [300])], 257, True, plain, None)
            assert (refusal.value.status, refusal.value.param) == (400, "prompt")
            pid = await workers.run("a", None, nap, 0)
            assert pid != os.getpid() and pid == await workers.run("a", None, nap, 0), "it is used again"
        finally:
            workers.close()

    asyncio.run(use())


def test_worker_pool_is_fair_and_restarts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def use() -> None:
        workers = WorkerPool(1)
        try:
            await workers.run("z", None, nap, 0)

            async def one(key: str, name: str) -> None:
                await workers.run(key, None, nap, 0.02)
                order.append(name)

            names = [("a", f"a{i}") for i in range(5)] + [("b", "b0"), ("b", "b1")]
            await asyncio.gather(*(one(*each) for each in names))
            with pytest.raises(RuntimeError, match="lost"):
                await workers.run("a", None, lost)
            assert await workers.run("a", None, nap, 0)
            monkeypatch.setattr(module, "WORK_SECONDS", 0.2)
            with pytest.raises(APIError, match=r"more than 0\.2 s"):
                await workers.run("a", None, nap, 60)
            monkeypatch.setattr(module, "WORK_SECONDS", 60)
            assert await workers.run("a", None, nap, 0)
            assert len(workers.all) == 1 and not workers.busy.total()
        finally:
            workers.close()

    asyncio.run(use())
    assert order.index("b0") <= 2 and order.index("b1") <= 4, "of one key's five, no more than its share came first"


# --- what it costs ----------------------------------------------------------------------------------------


def test_tokenize_and_rejected_requests_are_charged(house: House, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [
        ("tokens", "tokens_per_minute = 1000"),
        ("parsing", "tokens_per_minute = 1000"),
        ("few", "requests_per_minute = 2"),
    ]
    path.write_text("".join(f'[[keys]]\nname = "{name}"\nsecret = "key-of-{name}"\n{limit}\n' for name, limit in keys))
    api = house.open(path)

    def post(key: str, where: str, body: Any) -> str:
        found = api.post(where, body, headers={"authorization": f"Bearer key-of-{key}"})
        return "ok" if found.status_code == 200 else str(found.json()["error"]["code"])

    text = {"prompt": "x" * 600}
    assert [post("tokens", "/tokenize", text) for _ in range(3)] == ["ok", "ok", "tokens_per_minute"]
    wrong = {"model": MODEL, "prompt": "x" * 1600, "temperature": -1}
    found = [post("parsing", "/v1/completions", wrong) for _ in range(3)]
    assert found == ["invalid_request", "invalid_request", "tokens_per_minute"], "1,650 bytes each: 550 tokens"
    assert [post("few", "/detokenize", {}) for _ in range(3)] == ["invalid_request"] * 2 + ["requests_per_minute"]


# --- one field, several meanings --------------------------------------------------------------------------

ITEM = {"role": "user", "content": "a"}
INPUTS: list[tuple[type[Any], list[Any], str]] = [
    (ResponsesRequest, [ITEM] * 2000, ""),
    (ResponsesRequest, [ITEM] * 3000, "3000 items"),
    (EmbeddingRequest, [1] * 3000, ""),
    (EmbeddingRequest, ["a"] * 256, ""),
    (EmbeddingRequest, ["a"] * 257, "257 texts"),
    (EmbeddingRequest, [[1]] * 257, "257 texts"),
]


@pytest.mark.parametrize(
    ("kind", "given", "refused"), INPUTS, ids=[f"{len(given)} {given[0]!r:.10}" for _, given, _ in INPUTS]
)
def test_input_is_counted_as_what_it_holds(kind: type[Any], given: list[Any], refused: str) -> None:
    """Items of a conversation, token ids of one text, or texts: each has a limit of its own."""
    raw = json.dumps({"model": "m", "input": given}).encode()
    if not refused:
        assert len(parse(None, raw, kind, Limits()).input) == len(given)
        return
    with pytest.raises(APIError, match=refused):
        parse(None, raw, kind, Limits())
