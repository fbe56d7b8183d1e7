"""Logs of the server and the gateway.

Logs are JSON. Of a request: key, route, times and token counts, never content.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import uuid
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


log = logging.getLogger("lmworks.serve")

LogFields = dict[str, Any]  # of one request: collected while it runs, logged when it ends
LOG_FIELDS = "lmworks.log_fields"
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
ENCODER = json.JSONEncoder(default=str)  # made once: json.dumps makes one for each call with a default
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class JSONFormatter(logging.Formatter):
    """One object a line: time, level, message, and whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: LogFields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in STANDARD},
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields |= error_location(record.exc_info[1])
        return ENCODER.encode(fields)


def error_location(error: BaseException) -> LogFields:
    """Type and location of an error, without its message: that may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}


def log_as_json() -> None:
    """For the whole process, uvicorn included."""
    # Not in our lines, and the caller's place is a third of a record's cost (the logging HOWTO, "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("lmworks.serve", "lmworks.gateway"):
        logging.getLogger(name).setLevel(logging.INFO)


def log_fields_of(scope: MutableMapping[str, Any]) -> LogFields:
    found: LogFields = scope.setdefault(LOG_FIELDS, {})
    return found


def request_id(given: str | None) -> str:
    """The client's, where it is valid."""
    return given if given and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
