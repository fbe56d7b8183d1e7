"""A batch file from the command line: each line is a request to the application in this process, or to a server.

Results are in `OUTPUT.partial/` until all lines have one, and then, in the order of the input, in OUTPUT. A run that
was killed goes on where it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.datastructures import Headers

from ...data.progress import Progress
from ...record.claims import Claim
from ...spec import LMWorksError, SpecError
from ..app import make_app
from ..keys import ANONYMOUS
from ..limits import Limits
from ..serving import Serving
from .batch import Results, write_lines
from .bodies import ENDPOINTS, BatchError
from .lines import Line, request_of, scan
from .runner import BUSY, TRIES, Answer, ask, write_result

FILE_ENDPOINTS = (*ENDPOINTS, "/v1/responses", "/v1/messages", "/v1/score", "/v1/rerank", "/v1/classify")
MOST_LINES = 2**40
SHOWN_ERRORS = 10
IN_FLIGHT = 64  # requests to a server at once
SPARE = 8  # lines that wait while the engine is full
REQUEST_S = 3600.0  # of one request to a server
PATIENCE_S = 300.0  # without any result, before a run that is turned away or hears nothing is given up
LONGEST_PAUSE_S = 10.0
TOKENS = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "completion_tokens": ("completion_tokens", "output_tokens"),
}

Post = Callable[[str, bytes, str], Awaitable[Answer]]  # path, body, id of the request


@dataclass(frozen=True)
class Summary:
    lines: int
    completed: int
    failed: int
    resumed: int  # lines that had results when this run began
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    output: str


class FileBatch:
    """`asked`: what the lines are asked of, which must not change between runs of one output."""

    def __init__(self, file: Path, output: Path, asked: object, models: Sequence[str] | None, limits: Limits) -> None:
        if output.exists():
            raise SpecError(f"{output} is there already: name another with --output")
        self.file, self.output, self.folder = file, output, output.with_name(f"{output.name}.partial")
        try:
            self.lines, errors = scan(file, FILE_ENDPOINTS, models, replace(limits, batch_lines=MOST_LINES))
            if errors:
                raise SpecError(f"{file}: {listed(errors)}")
            self.claim = self.begin({"input_sha256": sha256_of(file), "asked": asked})
        except OSError as error:
            raise LMWorksError(f"{error.filename or file}: {error.strerror}") from None
        self.results = Results(self.folder / "results.jsonl")
        self.resumed = len(self.results.places)
        self.last_result = time.monotonic()

    def begin(self, wanted: dict[str, Any]) -> Claim:
        self.folder.mkdir(parents=True, exist_ok=True)
        claim, begun = Claim.take_soon(self.folder), self.folder / "batch.json"
        if claim is None:
            raise LMWorksError(f"{self.folder}: another run of this batch has it")
        if begun.is_file() and json.loads(begun.read_text(encoding="utf-8")) != wanted:
            claim.release()
            raise SpecError(f"{self.folder} has results of another file or model: name another --output, or remove it")
        part = begun.with_suffix(".part")
        part.write_text(json.dumps(wanted), encoding="utf-8")
        os.replace(part, begun)
        return claim

    async def run(self, post: Post, in_flight: int, progress: Progress) -> None:
        slots = asyncio.Semaphore(in_flight)
        self.last_result = time.monotonic()
        progress("lines", self.resumed, len(self.lines))

        async def one(line: Line) -> None:
            try:
                await self.run_line(line, post)
                progress("lines", len(self.results.places), len(self.lines))
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                for line in self.lines:
                    if line.number not in self.results.places:
                        await slots.acquire()
                        group.create_task(one(line))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def run_line(self, line: Line, post: Post) -> None:
        name, failures = f"batch_req_{line.number}", 0
        url, body = await asyncio.to_thread(request_of, self.file, line)
        while True:
            pause, why = 1.0, ""
            try:
                answer = await post(url, body, name)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                failures += answer.status >= 500
                if answer.status not in BUSY and (answer.status < 500 or failures == TRIES):
                    await asyncio.to_thread(write_result, name, line, answer, self.results)
                    self.last_result = time.monotonic()
                    return
                why = f"status {answer.status}: {answer.body[:200].decode(errors='replace')}"
                pause = float(answer.headers.get("retry-after", "1"))
            if time.monotonic() - self.last_result > PATIENCE_S:
                raise LMWorksError(f"no line had a result for {PATIENCE_S:.0f} s ({why}); the same command goes on")
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))

    def finish(self) -> Summary:
        """Writes the output; after a kill on the way it is written again."""
        totals = dict.fromkeys(TOKENS, 0)
        for shown in self.results.read():
            usage = shown["response"]["body"].get("usage") or {}
            for total, names in TOKENS.items():
                totals[total] += sum(usage.get(name) or 0 for name in names)
        part = self.folder / "output.jsonl"
        write_lines(part, self.results.read())
        os.replace(part, self.output)
        failed = len(self.results.failures)
        self.close()
        shutil.rmtree(self.folder)
        return Summary(
            len(self.lines), len(self.lines) - failed, failed, self.resumed, **totals, seconds=0.0,
            output=str(self.output),
        )  # fmt: skip

    def close(self) -> None:
        self.results.close()
        self.claim.release()


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def listed(errors: Sequence[BatchError]) -> str:
    shown = [f"line {one['line']}: {one['message']}" if one["line"] else one["message"] for one in errors]
    more = [f"and {len(shown) - SHOWN_ERRORS} more"] if len(shown) > SHOWN_ERRORS else []
    return "\n  ".join([*shown[:SHOWN_ERRORS], *more])


async def run_here(batch: FileBatch, serving: Serving, in_flight: int | None, progress: Progress) -> None:
    """By engines of this process, which end with it."""
    app = make_app(serving)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(serving.close)
        await serving.start()
        room = sum(model.backend.card.max_seqs for model in serving.local_models) + SPARE
        await batch.run(lambda url, body, name: ask(app, url, body, name, ANONYMOUS.name), in_flight or room, progress)


async def run_against(
    batch: FileBatch, server: str, key: str | None, in_flight: int | None, progress: Progress
) -> None:
    """By a server with this API."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    count = in_flight or IN_FLIGHT
    limits, base = httpx.Limits(max_connections=count), server.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=REQUEST_S, limits=limits, trust_env=False
    ) as client:

        async def post(url: str, body: bytes, name: str) -> Answer:
            answer = await client.post(url, content=body, headers={"x-request-id": name})
            return Answer(answer.status_code, Headers(answer.headers), json_body(answer))

        await batch.run(post, count, progress)


def json_body(answer: httpx.Response) -> bytes:
    """What is no JSON (a proxy's page) as an error object."""
    try:
        json.loads(answer.content)
    except ValueError:
        return json.dumps({"error": {"message": answer.text[:500], "code": "not_json"}}).encode()
    return answer.content
