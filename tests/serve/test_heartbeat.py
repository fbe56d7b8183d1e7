"""Whatever one client sends, the event loop that serves all others goes on: no callback takes longer than 50 ms.

Measured as CPU time of the loop's thread in each callback, and of all other threads of the process: they could hold the
interpreter's lock. So a busy machine does not matter. `benchmarks/serve_heartbeat.py` measures the same by the clock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
from api_server import MODEL, Api, House, until

from lmworks.data.tokenizer import FileTokenizer, train_bpe
from lmworks.serve import sse
from lmworks.serve.backend import PromptTokenizer

LONGEST = 0.05  # seconds of CPU in one callback
OTHERS = 0.15  # …and of all other threads together
MIB = 2**20
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass
class Beat:
    longest: float = 0.0
    loop: float = 0.0


@pytest.fixture(scope="module")
def spoken(house: House, scripted: House) -> Iterator[Api]:
    """A server with a real tokenizer, which holds the interpreter's lock while it encodes, and a template that writes
    all that a message has.
    """
    inner = tokenizers.Tokenizer.from_str(train_bpe([TEXT * 20], 300))
    api = house.open(
        prompt_tokenizer=PromptTokenizer(FileTokenizer(inner, 0), folder=scripted.backend.prompt_tokenizer.folder)
    )
    assert api.post("/tokenize", {"model": MODEL, "prompt": TEXT * 1000}).status_code == 200  # a worker is there
    yield api


@pytest.fixture
def beat(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beat]:
    found, thread, run = Beat(), house.thread.ident, asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        began = time.thread_time()
        run(handle)
        took = time.thread_time() - began
        found.longest, found.loop = max(found.longest, took), found.loop + took

    monkeypatch.setattr(asyncio.Handle, "_run", measured)
    gc.collect()
    gc.freeze()  # as a server does when it has started: what other tests left is not looked at in the loop
    yield found  # still frozen: `gc.unfreeze` would give back all that was imported, to every collection that follows


def post(api: Api, path: str, content: bytes, framing: bytes = b"") -> tuple[int, bytes]:
    """Without a client's own work in this process."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n".encode()
    head += framing or b"content-length: %d\r\n" % len(content)
    found = bytearray()
    with socket.create_connection(("127.0.0.1", api.port), 60) as one:
        try:
            one.sendall(head + b"\r\n" + content)
            while part := one.recv(MIB):
                found += part
        except ConnectionError:
            pass
    return int(found.split(b" ", 2)[1]) if found else 0, bytes(found)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 2} | fields).encode()


def chat(**fields: Any) -> bytes:
    return body(**{"messages": [{"role": "user", "content": "Hi"}]} | fields)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


ATTACKS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "100,000 prompts": (COMPLETIONS, lambda: body(prompt=["a"] * 100_000), 400),
    "a prompt of a megabyte": (COMPLETIONS, lambda: body(prompt="a" * MIB), 400),
    "250 prompts of 1 KiB": (COMPLETIONS, lambda: body(prompt=[TEXT * 20] * 250), 400),
    "two million tokens": (COMPLETIONS, lambda: body(prompt=[1] * 1_300_000), 400),
    "two million tokens to echo": (COMPLETIONS, lambda: body(prompt=[1] * 1_300_000, echo=True), 400),
    "a million tokens in 256 prompts": (COMPLETIONS, lambda: body(prompt=[[1] * 5000] * 250, logprobs=1), 400),
    "27,000 empty messages": (CHATS, lambda: chat(messages=[{"role": "user", "content": ""}] * 27_000), 400),
    "2,000 messages": (CHATS, lambda: chat(messages=[{"role": "user", "content": TEXT * 4}] * 2000), 400),
    "a tool described in a megabyte": (CHATS, lambda: chat(tools=[tool(description=TEXT * (MIB // 45))]), 400),
    "long arguments": (
        CHATS,
        lambda: chat(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps([1] * 60_000)}}],
                }
            ]
        ),
        400,
    ),
    "a schema of three megabytes": (CHATS, lambda: chat(tools=[tool(parameters={"enum": ["ab"] * 500_000})]), 400),
    "a schema of many strings": (CHATS, lambda: chat(tools=[tool(parameters={"enum": ["ab"] * 60_000})]), 400),
    "a schema of many objects": (CHATS, lambda: chat(tools=[tool(parameters={"anyOf": [{}] * 60_000})]), 400),
    "a shape of three megabytes": (COMPLETIONS, lambda: body(prompt="a", guided_json={"enum": ["ab"] * 500_000}), 400),
    "200,000 fields": (COMPLETIONS, lambda: body(prompt="a", **{f"x{i}": 1 for i in range(200_000)}), 400),
    "5,000 fields": (COMPLETIONS, lambda: body(prompt="a", **{f"x{i}": 1 for i in range(5000)}), 400),
    "a million mixed items": (COMPLETIONS, lambda: body(prompt=[1, "a"] * 400_000), 400),
    "two million brackets": (COMPLETIONS, lambda: b'{"prompt":' + b"[]," * 1_300_000, 400),
    "a million levels": (COMPLETIONS, lambda: b"[" * 4_000_000, 400),
    "a million escapes": (COMPLETIONS, lambda: b'{"prompt": "' + b'\\"' * 2_000_000 + b'"}', 400),
    "a text to tokenize": ("/tokenize", lambda: json.dumps({"prompt": TEXT * (MIB // 45)}).encode(), 200),
    "a body in chunks of a byte": (COMPLETIONS, lambda: b"1\r\n \r\n" * 600_000, 413),
    "many headers": (COMPLETIONS, lambda: b"{}", 400),
    "tokens to detokenize": ("/detokenize", lambda: json.dumps({"tokens": [40] * 2**18}).encode(), 200),
    "too many tokens to detokenize": ("/detokenize", lambda: json.dumps({"tokens": [40] * 1_000_000}).encode(), 400),
}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LONG = TEXT * (MIB // 45)


def answered(**fields: Any) -> bytes:
    """A conversation of one message, an earlier answer."""
    return chat(messages=[{"role": "assistant", "content": "a"} | fields])


ATTACKS |= {
    "reasoning of a megabyte": (CHATS, lambda: answered(reasoning_content=LONG), 400),
    "half of 128 tools long": (CHATS, lambda: chat(tools=[tool()] * 64 + [tool(description=TEXT * 360)] * 64), 400),
    "a schema of 1,200,000 numbers": (CHATS, lambda: chat(tools=[tool(parameters={"enum": [1] * 1_200_000})]), 400),
    "variables of 1,200,000 numbers": (CHATS, lambda: chat(chat_template_kwargs={"a": [1] * 1_200_000}), 400),
    "200,000 tokens allowed": (COMPLETIONS, lambda: body(prompt="a", allowed_token_ids=[1] * 200_000), 200),
    "2,000 parts of one answer": (
        RESPONSES,
        lambda: json.dumps(
            {"model": MODEL, "input": [{"type": "message", "role": "assistant", "content": TEXT * 40}] * 2000}
        ).encode(),
        400,
    ),
    "thinking of three megabytes": (
        MESSAGES,
        lambda: answered(content=[{"type": "thinking", "thinking": LONG * 3}, {"type": "text", "text": "a"}]),
        400,
    ),
    "2,000 blocks of one message": (
        MESSAGES,
        lambda: answered(content=[{"type": "text", "text": TEXT * 40}] * 2000),
        400,
    ),
}

FRAMING = {
    "a body in chunks of a byte": b"transfer-encoding: chunked\r\n",
    "many headers": b"content-length: 2\r\n" + b"a:1\r\n" * 300_000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_event_loop_is_not_blocked(spoken: Api, beat: Beat, name: str) -> None:
    path, made, expected = ATTACKS[name]
    content = made()
    assert len(content) <= 4 * MIB
    process, own, loop = time.process_time(), time.thread_time(), beat.loop
    status, found = post(spoken, path, content, FRAMING.get(name, b""))
    others = time.process_time() - process - (time.thread_time() - own) - (beat.loop - loop)
    # A server that refuses before all was sent may not be heard: the connection is reset.
    assert status == expected or (not status and expected in (400, 413) and len(content) > MIB), found[:500]
    assert beat.longest < LONGEST and others < OTHERS, (beat.longest, others)
    until(lambda: spoken.serving.workers.busy.total() == 0)


def test_large_answer_is_written_in_parts(house: House, api: Api, beat: Beat, monkeypatch: pytest.MonkeyPatch) -> None:
    """161,280 log-probabilities: no callback of the loop, and no call that holds the lock in a thread, takes long."""
    longest, plain = [0.0], sse.encode

    def timed(value: Any) -> str:
        began = time.thread_time()
        found = plain(value)
        longest[0] = max(longest[0], time.thread_time() - began)
        return found

    monkeypatch.setattr(sse, "encode", timed)
    wishes = {"prompt": "a", "max_tokens": 480, "n": 16, "logprobs": 20, "ignore_eos": True}
    status, found = post(api, COMPLETIONS, body(**wishes))
    told = json.loads(found.partition(b"\r\n\r\n")[2])
    assert status == 200 and told["usage"]["completion_tokens"] == 16 * 480
    scored = [one["logprobs"] for one in told["choices"]]
    assert {len(one[name]) for one in scored for name in one} == {480}
    assert all(20 <= len(top) <= 21 for one in scored for top in one["top_logprobs"])
    assert beat.longest < LONGEST and longest[0] < LONGEST, (beat.longest, longest)


def test_log_probabilities_of_a_prompt_are_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the choices as in them: 500,000 values at once would hold the lock for half a second."""
    longest, plain = [0], sse.encode

    def counted(value: Any) -> str:
        longest[0] = max(longest[0], len(found := plain(value)))
        return found

    scored = [None, *({str(token): {"logprob": -1.5, "rank": 2, "decoded_token": "é"} for token in range(21)},) * 9999]
    choice = {"index": 0, "text": "a", "logprobs": None, "prompt_logprobs": scored}
    answer = {"id": "x", "choices": [choice] * 2, "usage": {"a": 1}, "prompt_logprobs": scored, "n": None}
    monkeypatch.setattr(sse, "encode", counted)
    assert json.loads(sse.to_json(answer)) == answer
    assert longest[0] < MIB, longest
