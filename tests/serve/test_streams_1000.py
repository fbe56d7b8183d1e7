"""A thousand clients at once, over real sockets: each gets its whole answer, and the server is as large as before."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from pathlib import Path

import pytest
from api_server import MODEL, House, until

STREAMS, TOKENS = 1000, 12
PAGE = resource.getpagesize()


def resident() -> int:
    return int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * PAGE


async def stream(port: int, number: int, leave: bool = False) -> tuple[int, bool]:
    """Chunks that came, and whether the stream was complete."""
    body = {"model": MODEL, "prompt": f"client {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    found = await reader.read(200) if leave else await reader.read()
    writer.close()
    return found.count(b'"text":'), b"data: [DONE]" in found


@pytest.mark.slow
def test_a_thousand_streams(house: House, tmp_path: Path) -> None:
    """Three rounds; in the last a hundred leave in the middle."""
    path = tmp_path / "wide.toml"
    path.write_text("[limits]\nqueue = 2000\nqueue_seconds = 300\n")
    api = house.open(path)

    async def round_of(leaving: frozenset[int]) -> list[tuple[int, bool]]:
        return await asyncio.gather(*(stream(api.port, number, number in leaving) for number in range(STREAMS)))

    sizes = []
    for leaving in (frozenset[int](), frozenset[int](), frozenset(random.Random(0).sample(range(STREAMS), 100))):
        found = asyncio.run(round_of(leaving))
        assert all(whole and chunks for number, (chunks, whole) in enumerate(found) if number not in leaving)
        until(house.idle)
        assert sum(api.serving.rate_limiter.open.values()) == 0
        sizes.append(resident())
    assert sizes[2] - sizes[0] < 30 * 2**20, [size >> 20 for size in sizes]
    assert api.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
