"""A request to profile the next steps of a run under way: a file in its folder, which rank 0 of the run looks for.

`lmworks profile attach` writes it; the run takes it, records a `profile` event with its id, and each chosen rank
writes a trace. An attempt removes what an earlier one has left when it begins, and its own when it ends.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec.files import write_whole
from .folder import RunFolder

FILE_NAME = "profile-request.json"
TRACE_SUFFIX = ".json.gz"


@dataclass(frozen=True)
class ProfileRequest:
    id: str
    steps: int
    ranks: list[int] | None = None  # None: all of them
    stacks: bool = False  # Python calls too

    @classmethod
    def new(cls, steps: int, ranks: list[int] | None = None, stacks: bool = False) -> ProfileRequest:
        return cls(uuid.uuid4().hex, steps, ranks, stacks)

    @property
    def is_valid(self) -> bool:
        """Whether a run can take it: anyone may have written the file."""
        ranks = [] if self.ranks is None else self.ranks
        return (
            isinstance(self.id, str)
            and type(self.steps) is int
            and self.steps > 0
            and isinstance(ranks, list)
            and all(type(rank) is int for rank in ranks)
            and isinstance(self.stacks, bool)
        )


def request_path(folder: RunFolder) -> Path:
    return folder.path / FILE_NAME


def write_request(folder: RunFolder, request: ProfileRequest) -> None:
    write_whole(request_path(folder), json.dumps(asdict(request)))


def read_request(folder: RunFolder) -> ProfileRequest | None:
    """None where there is none, or a file that is not one."""
    with suppress(OSError, ValueError, TypeError):
        request = ProfileRequest(**json.loads(request_path(folder).read_text(encoding="utf-8")))
        if request.is_valid:
            return request
    return None


def remove_request(folder: RunFolder) -> None:
    with suppress(OSError):
        request_path(folder).unlink(missing_ok=True)


def withdraw(folder: RunFolder, request: ProfileRequest) -> bool:
    """Remove this request; False if the run has taken it already."""
    found = read_request(folder)
    if found is None or found.id != request.id:
        return False
    remove_request(folder)
    return True


def trace_path(folder: RunFolder, rank: int, first: int, last: int) -> Path:
    return folder.traces / f"rank{rank}-steps-{first}-{last}{TRACE_SUFFIX}"
