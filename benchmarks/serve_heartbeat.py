"""How long a hostile request holds the server's event loop: the longest gap of a 5 ms heartbeat, by the clock.

python benchmarks/serve_heartbeat.py                       # on a machine that is otherwise idle

The same server, tokenizer and requests as in tests/serve/test_heartbeat.py, which counts CPU time instead and so holds
on a busy machine. The gap without any request is measured first: what is not ours.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serve"))

import tokenizers
from api_server import MODEL, House
from test_heartbeat import ATTACKS, FRAMING, TEXT, post

from lmworks.data.tokenizer import FileTokenizer, train_bpe
from lmworks.serve.backend import PromptTokenizer

BEAT_S, REPEATS, IDLE_S = 0.005, 3, 3.0


class Heartbeat:
    """Of an event loop: the longest time between two beats, beyond the time that was slept."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            self.longest = max(self.longest, now - before - BEAT_S)
            before = now


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        house, beat = House(Path(folder)), Heartbeat()
        inner = tokenizers.Tokenizer.from_str(train_bpe([TEXT * 20], 300))
        api = house.open(
            prompt_tokenizer=PromptTokenizer(FileTokenizer(inner, 0), folder=house.backend.prompt_tokenizer.folder)
        )
        api.post("/tokenize", {"model": MODEL, "prompt": TEXT * 1000})
        gc.collect()
        gc.freeze()  # as `lmworks serve` does
        beating = asyncio.run_coroutine_threadsafe(beat.run(), house.loop)
        time.sleep(IDLE_S)
        gaps: dict[str, Any] = {"(idle)": round(1000 * beat.longest, 2)}
        for name, (path, made, _) in ATTACKS.items():
            content, seen = made(), []
            for _ in range(REPEATS):
                beat.longest = 0.0
                post(api, path, content, FRAMING.get(name, b""))
                seen.append(beat.longest)
            gaps[name] = round(1000 * max(seen), 2)
            print(f"{gaps[name]:8.2f} ms  {name}")
        beating.cancel()
        house.close()
    print(f"longest: {max(gaps.values()):.2f} ms; without a request {gaps['(idle)']:.2f} ms")
    write_result("serve_heartbeat", {"beat_ms": 1000 * BEAT_S, "repeats": REPEATS, "longest_gap_ms": gaps})


if __name__ == "__main__":
    main()
