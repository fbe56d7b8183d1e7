"""The temporary folder of a program: filled, watched and removed, whatever the program has put there."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

from .limits import Limits


def write_files(folder: str, files: Mapping[str, str], uid: int, gid: int) -> None:
    """Contents in base64; they belong to the program."""
    for name, content in files.items():
        path = Path(folder, name)
        missing = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
        for made in (path, *missing):
            os.chown(made, uid, gid)


def exceeds(folder: str, limits: Limits) -> bool:
    """More files or more bytes on the disk than allowed; names too long to be counted are too much as well."""
    count = size = 0
    ahead = [folder]
    while ahead:
        here = ahead.pop()
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    count += 1
                    if count > limits.disk_files:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    else:
                        size += 512 * entry.stat(follow_symlinks=False).st_blocks
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # it has changed meanwhile, or is closed
            continue
        except OSError:
            return True
    return size > limits.disk_bytes


def remove_folder(folder: str) -> None:
    """Folders inside folders are moved up before they are emptied, so that no path gets long and nothing recurses."""
    ahead, moved = [folder], 0
    made: list[str] = []
    while ahead:
        here = ahead.pop()
        made.append(here)
        os.chmod(here, 0o700)
        with os.scandir(here) as entries:
            listed = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_folder in listed:
            if not is_folder:
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            target = path
            if here != folder:
                target, moved = f"{folder}/.removed-{moved}", moved + 1
                os.rename(path, target)
            ahead.append(target)
    for here in reversed(made):
        os.rmdir(here)
