"""Files of tenants: contents as they were uploaded or written by batches, and what is known of them beside.

A file is there once its description is: contents come first, both under another name until they are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ..limits import APIError, Limits
from .bodies import FileObject

Found = TypeVar("Found")


@dataclass(frozen=True)
class StoredFile:
    id: str
    tenant: str
    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: int
    created_at: int

    def shown(self) -> FileObject:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """All in one folder; the descriptions in memory, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.part"):
            left.unlink()  # of a process that was killed
        found = [StoredFile(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
        self.files = {file.id: file for file in sorted(found, key=lambda file: file.created_at)}

    def content(self, file_id: str) -> Path:
        return self.folder / f"{file_id}.jsonl"

    def part(self, file_id: str) -> Path:
        """Where the content is written until it is complete."""
        return self.folder / f"{file_id}.part"

    def commit(self, file: StoredFile) -> None:
        """Its content is complete in `part`."""
        os.replace(self.part(file.id), self.content(file.id))
        described = self.folder / f"{file.id}.json"
        self.part(file.id).write_text(json.dumps(asdict(file)), encoding="utf-8")
        os.replace(self.part(file.id), described)
        self.files[file.id] = file

    def of_tenant(self, tenant: str) -> list[StoredFile]:
        return [file for file in self.files.values() if file.tenant == tenant]

    def get(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        file = self.files.get(file_id)
        if file is None or file.tenant != tenant:
            raise APIError(404, "file_not_found", f"there is no file {file_id[:64]!r}", param)
        return file

    def check_room(self, tenant: str, size: int, limits: Limits) -> None:
        """Whether the tenant may have one more of this size; raises APIError."""
        own = self.of_tenant(tenant)
        if len(own) >= limits.batch_files:
            message = f"there are {len(own)} files, the limit is {limits.batch_files}: delete some"
            raise APIError(400, "limit_exceeded", message, "file")
        stored = sum(file.bytes for file in own)
        if stored + size > limits.batch_stored_bytes:
            message = f"files come to {stored + size} bytes, the limit is {limits.batch_stored_bytes}: delete some"
            raise APIError(400, "limit_exceeded", message, "file")

    def delete(self, file: StoredFile) -> None:
        (self.folder / f"{file.id}.json").unlink(missing_ok=True)
        self.content(file.id).unlink(missing_ok=True)
        del self.files[file.id]


def page_of(found: Sequence[Found], ids: Sequence[str], after: str | None, limit: int) -> tuple[list[Found], bool]:
    """Those behind `after`, at most `limit`, and whether there are more."""
    if after is not None and after not in ids:
        raise APIError(400, "invalid_request", f"after: {after[:64]!r} is not in this list", "after")
    start = 0 if after is None else ids.index(after) + 1
    return list(found[start : start + limit]), len(found) > start + limit
