"""The lines of an input file: which are there, what is wrong with them, and the request that one is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ..body import NestingLimiter
from ..limits import APIError, Limits
from ..sse import encode
from .bodies import BatchError

MAX_ERRORS = 100  # that are listed; a file with one does not run
MAX_CUSTOM_ID = 512  # characters
FIELDS = ("custom_id", "method", "url", "body")
AROUND = 8  # values around the body of a line


@dataclass(frozen=True)
class Line:
    """A request, by its place in the file."""

    number: int  # from 1, as editors count
    custom_id: str
    start: int
    size: int


class LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def scan(
    path: Path, endpoints: Collection[str], models: Collection[str] | None, limits: Limits
) -> tuple[list[Line], list[BatchError]]:
    """All requests, and the errors that were found. `models`: those that may be named; None: any."""
    lines: list[Line] = []
    errors: list[BatchError] = []
    seen: dict[str, int] = {}
    for number, start, raw in raw_lines(path, limits.body_bytes):
        if len(lines) >= limits.batch_lines:
            errors.append(error_object("too_many_lines", f"more than {limits.batch_lines} lines, the limit", number))
            break
        try:
            custom_id = check_line(raw, endpoints, models, limits)
            if custom_id in seen:
                first = f"custom_id {custom_id[:64]!r} is that of line {seen[custom_id]}"
                raise LineError("duplicate_custom_id", first, "custom_id")
        except LineError as error:
            errors.append(error_object(error.code, str(error), number, error.param))
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen[custom_id] = number
        lines.append(Line(number, custom_id, start, len(raw)))
    if not lines and not errors:
        errors.append(error_object("empty_file", "the file has no lines", None))
    return lines, errors


def error_object(code: str, message: str, line: int | None, param: str | None = None) -> BatchError:
    return {"code": code, "message": message, "param": param, "line": line}


def raw_lines(path: Path, longest: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, start and bytes of lines that are not blank; of one that is too long, one byte more than is allowed."""
    with path.open("rb") as file:
        number = start = 0
        while raw := file.readline(longest + 1):
            number += 1
            rest = raw
            while len(rest) > longest and not rest.endswith(b"\n"):
                rest = file.readline(longest + 1)
            if raw.strip():
                yield number, start, raw
            start = file.tell()


def check_line(raw: bytes, endpoints: Collection[str], models: Collection[str] | None, limits: Limits) -> str:
    """Its custom_id; raises LineError. What its endpoint refuses is in the error file, later."""
    if len(raw) > limits.body_bytes:
        raise LineError("line_too_long", f"the line has more than {limits.body_bytes} bytes, the limit")
    request = parse_line(raw, limits)
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise LineError("invalid_custom_id" if "custom_id" in request else "missing_custom_id", message, "custom_id")
    if unknown := sorted(request.keys() - {*FIELDS}):
        raise LineError("invalid_request", f"unknown field {unknown[0][:64]!r}: there are {', '.join(FIELDS)}")
    if request.get("method") != "POST":
        raise LineError("invalid_method", 'method must be "POST"', "method")
    if request.get("url") not in endpoints:
        shown = str(request.get("url"))[:64]
        message = f"url is {shown!r}, and this batch is of {', '.join(endpoints)}"
        raise LineError("mismatched_endpoint", message, "url")
    body = request.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be an object", "body")
    if body.get("stream"):
        raise LineError("invalid_body", "stream = true: an answer of a batch is not streamed", "body.stream")
    model = body.get("model")
    if not isinstance(model, str):
        raise LineError("invalid_body", "body.model must be the name of a model", "body.model")
    if models is not None and model not in models:
        message = f"the model {str(model)[:80]!r} is not served; available: {', '.join(sorted(models))}"
        raise LineError("model_not_found", message, "body.model")
    return custom_id


def parse_line(raw: bytes, limits: Limits) -> dict[str, Any]:
    try:
        NestingLimiter(limits.depth + 1, limits.values + AROUND).feed(raw)
        found = from_json(raw, allow_inf_nan=False)
    except APIError as error:
        raise LineError("invalid_json_line", str(error)) from None
    except ValueError as error:
        raise LineError("invalid_json_line", f"the line is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineError("invalid_json_line", "the line is no JSON object")
    return found


def request_of(path: Path, line: Line) -> tuple[str, bytes]:
    """Path and body of a line that `scan` has accepted."""
    with path.open("rb") as file:
        file.seek(line.start)
        request = from_json(file.read(line.size))
    return request["url"], encode(request["body"]).encode()
