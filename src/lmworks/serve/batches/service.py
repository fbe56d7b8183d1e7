"""Files and batches of a server: those of its folder, which one server at a time may have."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from pathlib import Path

from starlette.types import ASGIApp

from ...record.claims import RENEW_S, Claim
from ...spec import LMWorksError
from ..limits import APIError, Limits
from ..serving import Serving
from ..telemetry import log
from .batch import Batch
from .bodies import BatchRequest
from .files import FileStore
from .runner import BatchRunner


class BatchService:
    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claim = Claim.take_soon(folder)
            if claim is None:
                raise LMWorksError(f"--batch-dir {folder}: another server has it; give each server its own folder")
            self.claim: Claim = claim
            self.folder = folder / "batches"
            self.folder.mkdir(exist_ok=True)
            self.files = FileStore(folder / "files")
        except OSError as error:
            raise LMWorksError(f"--batch-dir {folder}: {error.strerror}") from None
        found = [Batch(one) for one in self.folder.iterdir() if (one / "events.jsonl").is_file()]
        begun = [batch for batch in found if batch.fields]  # else the server was killed while it made one
        self.batches = {batch.id: batch for batch in sorted(begun, key=lambda batch: batch.fields["created_at"])}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.renewal: asyncio.Task[None] | None = None

    # --- running ----------------------------------------------------------------------------------------------

    def start(self, serving: Serving, app: ASGIApp) -> None:
        """Goes on with batches that have not ended."""
        self.runner = BatchRunner(serving, app, self.files)
        self.renewal = asyncio.create_task(self.renew(), name="claim of --batch-dir")
        for batch in self.batches.values():
            if not batch.ended:
                self.run(batch)

    def run(self, batch: Batch) -> None:
        task = self.tasks[batch.id] = asyncio.create_task(self.runner.run(batch), name=batch.id)
        task.add_done_callback(lambda _: self.tasks.pop(batch.id, None))

    async def renew(self) -> None:
        """A claim of a network file system has to be; where it is lost, another server goes on with the batches."""
        while self.claim.renew():
            await asyncio.sleep(RENEW_S / 2)
        log.error("another server has taken --batch-dir: no more batches are run here")
        await self.stop()

    async def stop(self) -> None:
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        if self.renewal is not None:
            self.renewal.cancel()
        await self.stop()
        self.claim.release()

    # --- batches ----------------------------------------------------------------------------------------------

    def of_tenant(self, tenant: str) -> list[Batch]:
        return [batch for batch in self.batches.values() if batch.fields["tenant"] == tenant]

    def get(self, tenant: str, batch_id: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or batch.fields["tenant"] != tenant:
            raise APIError(404, "batch_not_found", f"there is no batch {batch_id[:64]!r}", "batch_id")
        return batch

    def create(self, tenant: str, key: str, body: BatchRequest, limits: Limits) -> Batch:
        file = self.files.get(tenant, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise APIError(400, "invalid_request", "this file was not uploaded with purpose=batch", "input_file_id")
        self.files.check_room(tenant, 0, limits)  # for its results
        own = self.of_tenant(tenant)
        if sum(not batch.ended for batch in own) >= limits.batches:
            message = f"{limits.batches} batches are under way, the limit: wait for one, or cancel it"
            raise APIError(429, "too_many_batches", message, retry_after=60)
        for old in [batch for batch in own if batch.ended][: -limits.batch_files]:
            del self.batches[old.id]  # its files stay
            shutil.rmtree(old.folder)
        batch = Batch.create(
            self.folder / f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            key=key,
            endpoint=body.endpoint,
            input_file_id=file.id,
            metadata=body.metadata,
        )
        self.batches[batch.id] = batch
        self.run(batch)
        return batch

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """What is under way finishes."""
        batch = self.get(tenant, batch_id)
        if batch.status in ("validating", "in_progress"):
            batch.note("cancelling")
        elif batch.status != "cancelling":
            raise APIError(409, "batch_not_cancellable", f"this batch is {batch.status}", "batch_id")
        return batch

    def delete_file(self, tenant: str, file_id: str) -> None:
        file = self.files.get(tenant, file_id)
        using = (batch for batch in self.of_tenant(tenant) if batch.fields["input_file_id"] == file_id)
        if reader := next((batch for batch in using if not batch.ended), None):
            raise APIError(409, "file_in_use", f"{reader.id} reads it: cancel that first", "file_id")
        self.files.delete(file)
