"""Names of files that come from outside: from a manifest, an index, another machine's folder."""

from __future__ import annotations

import re

MOST_BYTES = 255  # of one name, on every file system that runs are kept on
DRIVE = re.compile(r"[A-Za-z]:")


def unsafe_name(name: object) -> str:
    """Why `name` must not be used for a file beside the list that names it; empty where it may.

    A list that was written elsewhere could name any file of this machine, to be read or overwritten. So only the plain
    name of a file in the list's own folder is taken: no path, no drive, nothing that a file system would refuse.
    """
    if not isinstance(name, str):
        return "it is not a string"
    if name in ("", ".", ".."):
        return "it does not name a file"
    if "/" in name or "\\" in name or DRIVE.match(name):
        return "it is a path, and only files of the same folder are read or written"
    if not name.isprintable():  # NUL, line breaks, halves of a surrogate pair
        return "it has characters that no file name should have"
    if len(name.encode()) > MOST_BYTES:
        return f"it is longer than {MOST_BYTES} bytes"
    return ""
