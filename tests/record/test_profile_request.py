"""A request to profile is read only where a run can take it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmworks.record import RunFolder
from lmworks.record.profile_request import ProfileRequest, read_request, request_path, write_request


def test_written_and_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for request in (ProfileRequest("a", 3), ProfileRequest("b", 1, [0, 7], True)):
        write_request(folder, request)
        assert read_request(folder) == request


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 5}, {"ranks": ["0"]}, {"ranks": [True]}, {"stacks": 1}, {"stacks": None}, {"steps": 0},
        {"steps": "3"}, {"steps": True}, {"id": 7}, {"other": 1},
    ],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path)
    request_path(folder).write_text(json.dumps({"id": "x", "steps": 3, **change}))
    assert read_request(folder) is None
