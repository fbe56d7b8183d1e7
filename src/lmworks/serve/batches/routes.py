"""Routes of files and batches. Those of other tenants are 404, as ones that never were."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from typing import IO, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import FileResponse, Response
from starlette.types import Message

from ..body import BODY_SECONDS, read_body, too_large
from ..limits import APIError, Limits
from ..openapi import error_responses, request_body
from ..serving import Caller, Serving
from .bodies import (
    UPLOAD,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from .files import StoredFile, page_of
from .service import BatchService

FORM_BYTES = 4096  # of an upload beside the file's content
MAX_FILENAME = 256


class FileQuery(BaseModel):
    """Query parameters of GET /v1/files."""

    after: str | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchQuery(BaseModel):
    """Query parameters of GET /v1/batches."""

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)


def parameters(query: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's parameters of a query that the route validates itself: errors have our form."""
    properties = query.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]}


def ends(ids: list[str]) -> tuple[str | None, str | None]:
    """`first_id` and `last_id` of a page."""
    return (ids[0], ids[-1]) if ids else (None, None)


def batches_of(serving: Serving) -> BatchService:
    if serving.batches is None:
        message = "this server has no files and batches: start it with --batch-dir DIR"
        raise APIError(404, "batches_off", message)
    return serving.batches


def add_batch_routes(app: FastAPI, serving: Serving) -> None:
    add_file_routes(app, serving)

    @app.post(
        "/v1/batches",
        name="create_batch",
        openapi_extra=request_body(BatchRequest),
        responses=error_responses(400, 401, 404, 429, 503),
    )
    async def create(request: Request) -> BatchObject:
        """Run the requests of a file."""
        caller = serving.authenticate(request)
        service = batches_of(serving)
        body, _ = await read_body(serving, request, caller, BatchRequest)
        return service.create(caller.tenant, caller.key.name, body, caller.limits).shown()

    @app.get(
        "/v1/batches",
        name="list_batches",
        openapi_extra=parameters(BatchQuery),
        responses=error_responses(400, 401, 404, 503),
    )
    async def list_batches(request: Request) -> BatchList:
        """Batches, the newest first."""
        caller = serving.authenticate(request)
        query = BatchQuery.model_validate(dict(request.query_params))
        found = batches_of(serving).of_tenant(caller.tenant)[::-1]
        data, has_more = page_of(found, [one.id for one in found], query.after, query.limit)
        first, last = ends([one.id for one in data])
        shown = [one.shown() for one in data]
        return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}

    @app.get("/v1/batches/{batch_id}", name="retrieve_batch", responses=error_responses(401, 404, 503))
    async def retrieve(request: Request, batch_id: str) -> BatchObject:
        """How far a batch is, and the files of its results."""
        caller = serving.authenticate(request)
        return batches_of(serving).get(caller.tenant, batch_id).shown()

    @app.post("/v1/batches/{batch_id}/cancel", name="cancel_batch", responses=error_responses(401, 404, 409, 503))
    async def cancel(request: Request, batch_id: str) -> BatchObject:
        """Start no more of its requests; what there is by then is in its files."""
        caller = serving.authenticate(request)
        return batches_of(serving).cancel(caller.tenant, batch_id).shown()


def add_file_routes(app: FastAPI, serving: Serving) -> None:
    @app.post(
        "/v1/files",
        name="create_file",
        openapi_extra=UPLOAD,
        responses=error_responses(400, 401, 404, 429, 503),
    )
    async def create(request: Request) -> FileObject:
        """Upload the requests of a batch: lines of JSON."""
        caller = serving.authenticate(request)
        return await upload(batches_of(serving), caller, request)

    @app.get(
        "/v1/files",
        name="list_files",
        openapi_extra=parameters(FileQuery),
        responses=error_responses(400, 401, 404, 503),
    )
    async def list_files(request: Request) -> FileList:
        """Files that were uploaded, and those of results."""
        caller = serving.authenticate(request)
        query = FileQuery.model_validate(dict(request.query_params))
        own = batches_of(serving).files.of_tenant(caller.tenant)
        found = [file for file in own if query.purpose in (None, file.purpose)]
        if query.order == "desc":
            found.reverse()
        data, has_more = page_of(found, [file.id for file in found], query.after, query.limit)
        first, last = ends([file.id for file in data])
        shown = [file.shown() for file in data]
        return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}

    @app.get("/v1/files/{file_id}", name="retrieve_file", responses=error_responses(401, 404, 503))
    async def retrieve(request: Request, file_id: str) -> FileObject:
        """What is known of a file."""
        caller = serving.authenticate(request)
        return batches_of(serving).files.get(caller.tenant, file_id).shown()

    @app.get(
        "/v1/files/{file_id}/content",
        name="file_content",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}, **error_responses(401, 404, 503)},
    )
    async def content(request: Request, file_id: str) -> Response:
        """Its lines."""
        caller = serving.authenticate(request)
        files = batches_of(serving).files
        file = files.get(caller.tenant, file_id)
        return FileResponse(files.content(file.id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}", name="delete_file", responses=error_responses(401, 404, 409, 503))
    async def delete(request: Request, file_id: str) -> DeletedFile:
        """Delete a file, unless a batch reads it."""
        caller = serving.authenticate(request)
        batches_of(serving).delete_file(caller.tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}


async def upload(service: BatchService, caller: Caller, request: Request) -> FileObject:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise APIError(415, "unsupported_media_type", "send the file as multipart/form-data, with purpose=batch")
    limits, declared = caller.limits, request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.batch_file_bytes + FORM_BYTES:
        raise too_large(limits.batch_file_bytes)
    service.files.check_room(caller.tenant, 0, limits)
    await caller.meter.start()
    try:
        async with (
            asyncio.timeout(BODY_SECONDS),
            bounded(request, limits).form(max_files=1, max_fields=1, max_part_size=FORM_BYTES) as form,
        ):
            return await store(service, caller, form)
    except TimeoutError:
        raise APIError(408, "body_timeout", f"the body did not arrive within {BODY_SECONDS:g} s") from None


def bounded(request: Request, limits: Limits) -> Request:
    """Its body ends with an error at the limit, wherever it is read."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limits.batch_file_bytes + FORM_BYTES:
            raise too_large(limits.batch_file_bytes)
        return message

    return Request(request.scope, receive)


async def store(service: BatchService, caller: Caller, form: FormData) -> FileObject:
    file, purpose = form.get("file"), form.get("purpose")
    if unknown := sorted(form.keys() - {"file", "purpose"}):
        raise APIError(400, "invalid_request", f"unknown field {unknown[0][:64]!r}: there are file and purpose")
    if not isinstance(file, UploadFile):
        raise APIError(400, "invalid_request", "file: is missing, or has no filename", "file")
    if purpose != "batch":
        raise APIError(400, "invalid_request", 'purpose must be "batch"', "purpose")
    file_id, name = f"file-{uuid.uuid4().hex}", (file.filename or "batch.jsonl")[:MAX_FILENAME]
    part = service.files.part(file_id)
    size = await asyncio.to_thread(copy, file.file, part)
    try:
        service.files.check_room(caller.tenant, size, caller.limits)
        made = StoredFile(file_id, caller.tenant, name, "batch", size, int(time.time()))
        service.files.commit(made)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return made.shown()


def copy(file: IO[bytes], path: os.PathLike[str]) -> int:
    with open(path, "wb") as written:
        shutil.copyfileobj(file, written)
        return written.tell()
