"""Runs batches: each line is a request to the application itself, as a live one is, behind all live ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from ..limits import APIError, Limits
from ..serving import BATCH_KEY, Serving
from ..telemetry import log
from .batch import Batch, Results, write_lines
from .bodies import Status
from .files import FileStore, StoredFile
from .lines import Line, error_object, request_of, scan

TRIES = 3  # of a line that fails in the server
WAIT_S = 0.2  # between two looks whether a batch was cancelled
PAUSE_S = 10.0  # longest wait before a line that was turned away is tried again
RETRY_S = 30.0  # after a failure of the batch itself, such as a full disk
BUSY = (429, 503)  # tried again until the batch expires: nothing is wrong with the request


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Headers
    body: bytes


async def ask(app: ASGIApp, url: str, body: bytes, request_id: str, key: str) -> Answer:
    """A request that comes from no client: `key` is the name of the one that it is charged to."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "state": {},
        BATCH_KEY: key,
    }
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not whole:
            await asyncio.Event().wait()  # nobody disconnects
        return whole.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Answer(sent[0]["status"], Headers(raw=sent[0]["headers"]), b"".join(one["body"] for one in sent[1:]))


class BatchRunner:
    """At most `batch_in_flight` lines at once, of all batches together; batches take turns."""

    def __init__(self, serving: Serving, app: ASGIApp, files: FileStore) -> None:
        self.serving, self.app, self.files = serving, app, files
        self.in_flight = self.limits.batch_in_flight
        self.slots = asyncio.Semaphore(self.in_flight)

    @property
    def limits(self) -> Limits:
        return self.serving.settings.current().limits

    def may_start(self, batch: Batch) -> bool:
        return batch.starts_lines and not self.serving.draining

    async def run(self, batch: Batch) -> None:
        """Until it has ended, or the server shuts down."""
        while not (batch.ended or self.serving.draining):
            try:
                await self.advance(batch)
            except Exception as error:
                log.error("a batch failed; it is tried again", extra={"batch": batch.id}, exc_info=error)
                await asyncio.sleep(RETRY_S)

    async def advance(self, batch: Batch) -> None:
        lines = await self.lines(batch)
        if lines is None:
            return
        results = await asyncio.to_thread(Results, batch.results)
        try:
            count(batch, results)
            await self.run_lines(batch, lines, results)
            if len(results.places) == len(lines) or not (batch.starts_lines or self.serving.draining):
                await self.finish(batch, lines, results)
        finally:
            results.close()

    async def lines(self, batch: Batch) -> list[Line] | None:
        """None: the file is not valid, and the batch has failed."""
        index = batch.folder / "lines.jsonl"
        if "total" in batch.fields:
            return [Line(**json.loads(one)) for one in index.read_text(encoding="utf-8").splitlines()]
        fields, config = batch.fields, self.serving.settings.current()
        path = self.files.content(fields["input_file_id"])
        try:
            models = self.serving.visible_to(config.named(fields["key"]))
            lines, errors = await asyncio.to_thread(scan, path, [fields["endpoint"]], models, config.limits)
        except APIError as error:  # the key is gone
            lines, errors = [], [error_object(error.code, str(error), None)]
        if errors and batch.status == "validating":
            batch.note("failed", errors=errors)
            return None
        await asyncio.to_thread(write_lines, index, map(asdict, lines))
        if batch.status == "validating":
            batch.note("in_progress", total=len(lines))
        return lines

    async def run_lines(self, batch: Batch, lines: Sequence[Line], results: Results) -> None:
        own = asyncio.Semaphore(self.in_flight)  # with those that wait to be tried again
        async with asyncio.TaskGroup() as group:
            for line in lines:
                if line.number in results.places:
                    continue
                await own.acquire()
                if not self.may_start(batch):
                    break
                group.create_task(self.run_line(batch, line, results)).add_done_callback(lambda _: own.release())

    async def run_line(self, batch: Batch, line: Line, results: Results) -> None:
        """Until it has a result; none is written where the batch ends before."""
        path, fields = self.files.content(batch.fields["input_file_id"]), batch.fields
        failures = 0
        while self.may_start(batch):
            async with self.slots:
                if not self.may_start(batch):
                    return
                url, body = await asyncio.to_thread(request_of, path, line)
                answer = await ask(self.app, url, body, f"{batch.id}-{line.number}", fields["key"])
            failures += answer.status >= 500
            if answer.status not in BUSY and (answer.status < 500 or failures == TRIES):
                await asyncio.to_thread(write_result, line_id(batch, line), line, answer, results)
                count(batch, results)
                return
            await self.pause(batch, float(answer.headers.get("retry-after", "1")))

    async def pause(self, batch: Batch, seconds: float) -> None:
        end = time.monotonic() + min(seconds, PAUSE_S)
        while self.may_start(batch) and time.monotonic() < end:
            await asyncio.sleep(WAIT_S)

    async def finish(self, batch: Batch, lines: Sequence[Line], results: Results) -> None:
        """Writes both files; after a kill on the way the same ones are written again."""
        if batch.status == "in_progress":
            batch.note("finalizing")
        left = [line for line in lines if line.number not in results.places]
        ended: Status = "cancelled" if batch.status == "cancelling" else "expired" if left else "completed"
        errors = [*results.read(ok=False), *(unfinished(batch, line, ended) for line in left)]
        output = await self.write_file(batch, "output", results.read(ok=True))
        error = await self.write_file(batch, "error", iter(errors))
        batch.note(
            ended,
            total=len(lines),
            completed=len(results.places) - len(results.failures),
            failed=len(errors),
            output_file_id=output,
            error_file_id=error,
        )
        log.info("batch", extra={"batch": batch.id, "status": ended, **batch.shown()["request_counts"]})
        for name in ("results.jsonl", "lines.jsonl"):
            (batch.folder / name).unlink()

    async def write_file(self, batch: Batch, what: str, records: Iterator[dict[str, Any]]) -> str | None:
        """Its id; None where there are no records."""
        file_id = f"file-{batch.id.removeprefix('batch_')}-{what}"
        part = self.files.part(file_id)
        if not await asyncio.to_thread(write_lines, part, records):
            part.unlink()
            return None
        name, size = f"{batch.id}_{what}.jsonl", part.stat().st_size
        tenant = batch.fields["tenant"]
        self.files.commit(StoredFile(file_id, tenant, name, "batch_output", size, int(time.time())))
        return file_id


def count(batch: Batch, results: Results) -> None:
    batch.failed = len(results.failures)
    batch.completed = len(results.places) - batch.failed


def line_id(batch: Batch, line: Line) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"


def write_result(name: str, line: Line, answer: Answer, results: Results) -> None:
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": from_json(answer.body),
    }
    shown = {"id": name, "custom_id": line.custom_id, "response": response, "error": None}
    results.append(line, answer.status == 200, shown)


def unfinished(batch: Batch, line: Line, ended: str) -> dict[str, Any]:
    error = {"code": f"batch_{ended}", "message": f"the batch was {ended} before this line was run"}
    return {"id": line_id(batch, line), "custom_id": line.custom_id, "response": None, "error": error}
