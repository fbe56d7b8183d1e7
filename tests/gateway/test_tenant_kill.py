"""kill -9 of a real gateway in the middle of its load: what its clients had and what its servers had sent bound every
record of usage, and what had ended is counted to the token."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from gateway_case import Answering, Asked, chunk, fake_server
from tenant_case import administered, bearer, make_tenant, tenant_file

PROMPT, CLIENTS = 17, 24


class Load:
    """Servers that name their tokens, one to three an event, and what each request was sent and has received."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.done: set[str] = set()
        self.asked: set[str] = set()

    async def serve(self, asked: Asked, answering: Answering) -> None:
        id = asked.headers["x-request-id"]
        self.asked.add(id)
        dice = random.Random(id)
        answering.begin_stream()
        comment = b": prompt %d\n" % PROMPT
        for _ in range(dice.randint(1, 60)):
            tokens = [dice.randrange(1000) for _ in range(dice.randint(1, 3))]
            self.sent[id] += len(tokens)  # before it can have been read
            text = json.dumps(chunk("x" * len(tokens)))
            await answering.send(comment + f": tokens 0 {' '.join(map(str, tokens))}\ndata: {text}\n\n".encode())
            comment = b""
            await asyncio.sleep(0.004)
        counts = {"prompt_tokens": PROMPT, "completion_tokens": self.sent[id], "total_tokens": 0}
        await answering.event(chunk("", choices=[], usage=counts))
        await answering.end()

    async def client(self, http: httpx.AsyncClient, key: str, number: int) -> None:
        """One request after the other until the gateway is gone."""
        with suppress(httpx.TransportError):
            for count in range(1000):
                id = f"round-{number}-{count}"
                headers = {**bearer(key), "x-request-id": id}
                body = {"model": "m", "messages": [], "stream": True}
                async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status_code == 200
                    async for line in answer.aiter_lines():
                        found = re.search(r'"content": "(x*)"', line)
                        self.received[id] += len(found[1]) if found else 0
                        if line == "data: [DONE]":
                            self.done.add(id)


@contextmanager
def gateway_process(file: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with log.open("ab") as written:
        before = log.stat().st_size
        words = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", "0"]
        process = subprocess.Popen(words, stdout=written, stderr=written)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(rb"^(http://\S+)$", log.read_bytes()[before:], re.MULTILINE)):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        yield process, found[1].decode()
    finally:
        process.kill()
        process.wait()


async def wait_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(httpx.TransportError):
                if (await http.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.02)


async def kills(tmp_path: Path, ended: list[int]) -> None:
    """A kill each time that so many more requests have ended."""
    load = Load()
    async with fake_server(load.serve) as one, fake_server(load.serve) as two:
        file = tenant_file(tmp_path / "g.toml", one, two, kind="lmworks", pool="price_in = 1.0\nprice_out = 3.0")
        key = make_tenant(file)
        for number, more in enumerate(ended):
            with gateway_process(file, tmp_path / "log") as (process, url):
                limits = httpx.Limits(max_connections=CLIENTS)
                async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, limits=limits) as http:
                    await wait_ready(http)
                    clients = [
                        asyncio.create_task(load.client(http, key, number * 1000 + place)) for place in range(CLIENTS)
                    ]
                    wanted = len(load.done) + more
                    async with asyncio.timeout(60):
                        while len(load.done) < wanted:
                            await asyncio.sleep(0.003)
                    process.send_signal(signal.SIGKILL)
                    await asyncio.gather(*clients)
        with gateway_process(file, tmp_path / "log") as (process, url):  # which recovers, and then ends in order
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
                await wait_ready(http)
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait, 30)
    rows = sqlite3.connect(tmp_path / "gateway.db").execute(
        "SELECT id, prompt_tokens, completion_tokens, outcome, estimated, nanodollars FROM usage"
    )
    found = {id.rpartition(".")[0]: row for id, *row in rows}
    interrupted = 0
    for id in sorted(load.asked):
        if id not in found:
            assert not load.received[id], f"{id} had tokens, and no record"
            continue
        prompt, completion, outcome, estimated, nanodollars = found[id]
        assert load.received[id] <= completion <= load.sent[id], (id, load.received[id], completion, load.sent[id])
        if completion:
            assert prompt == PROMPT and not estimated
        assert nanodollars == prompt * 1000 + completion * 3000
        if id in load.done:
            assert completion == load.sent[id] == load.received[id]
        elif outcome == "interrupted":
            interrupted += 1
    assert interrupted > len(ended)
    assert found.keys() <= load.asked
    with administered(file) as admin:
        (row,) = admin.usage(["tenant"])
        assert row["completion_tokens"] == sum(one[1] for one in found.values())
        spent = admin.store.spent(["total"])["tenant:acme", "total"]
        assert (spent.requests, spent.tokens) == (len(found), row["prompt_tokens"] + row["completion_tokens"])


def test_a_gateway_that_is_killed_loses_no_token(tmp_path: Path, forked_python: None) -> None:
    asyncio.run(kills(tmp_path, [CLIENTS]))


@pytest.mark.slow
def test_a_gateway_that_is_killed_again_and_again_loses_no_token(tmp_path: Path) -> None:
    dice = random.Random(7)
    asyncio.run(kills(tmp_path, [dice.randint(1, 60) for _ in range(8)]))
