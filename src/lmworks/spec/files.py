"""Files of a run: atomic writes, the cache folder, names and JSON that come from outside, and paths in a spec."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LMWorksError, SpecError

if TYPE_CHECKING:
    from .run import RunSpec


def write_whole(path: Path, content: bytes | str) -> None:
    """The name appears, or changes what it stands for, only once all bytes are on the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def read_json_object(path: Path, kind: type[LMWorksError]) -> dict[str, Any]:
    """The content of a file; `kind` of the error where it is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except RecursionError:
        raise kind(f"{path}: cannot be read as JSON (it is nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise kind(f"{path}: cannot be read as JSON ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise kind(f"{path}: expected a JSON object")
    return found


def sync_folder(folder: Path) -> None:
    """A new or renamed entry survives a power cut only once its folder has been synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path, option: str) -> None:
    """Before any work is done for it: nothing can be made at `path`. `option` names it in the error."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "" if above.is_dir() else " (Not a directory)"
        raise SpecError(f"{option} {path}: nothing can be written into {above}{why}; name another place")


def cache_root() -> Path:
    """LMWORKS_CACHE, or the user's cache folder: what is in it can be made again."""
    if own := os.environ.get("LMWORKS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmworks"


# --- names -----------------------------------------------------------------------------------------------


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


# --- paths -----------------------------------------------------------------------------------------------


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The resolved spec repeats the run from any folder."""

    def absolute(path: str) -> str:
        return path if path in ("", "bytes") or path.startswith("stdlib:") else str(Path(path).absolute())

    def of_file(name: str) -> str:
        return absolute(name) if ".py:" in name else name

    def of_stage(stage: dict[str, Any]) -> dict[str, Any]:
        data = dict(stage.get("data", {}))
        if "mix" in data:
            data["mix"] = {absolute(path): weight for path, weight in data["mix"].items()}
        if "path" in data:
            data["path"] = absolute(data["path"])
        return {**stage, "data": data} if data else stage

    data = spec.data
    mix = {absolute(path): weight for path, weight in data.mix.items()}
    files = {name: absolute(getattr(data, name)) for name in ("path", "tokenizer", "chat_template", "val_path")}
    return spec.replace(
        data=data.replace(mix=mix, **files),
        align=spec.align.replace(
            **{
                name: absolute(getattr(spec.align, name)) for name in ("reference", "teacher", "reward_model", "critic")
            },
            rewards=[of_file(name) for name in spec.align.rewards],
            environment=of_file(spec.align.environment),
        ),
        lora=spec.lora.replace(init=absolute(spec.lora.init)),
        checkpoint=spec.checkpoint.replace(init=absolute(spec.checkpoint.init)),
        cluster=spec.cluster.replace(profile=absolute(spec.cluster.profile)),
        stages=[of_stage(stage) for stage in spec.stages],
    )
