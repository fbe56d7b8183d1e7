"""What makes a folder a checkpoint: a manifest of its files, and a marker that vouches for the manifest.

    step-000100/
      __0_0.distcp, .metadata   written by Torch Distributed Checkpoint (DCP)
      manifest.json             size and SHA-256 of every file above, and what the run wants to remember
      COMMITTED                 SHA-256 of manifest.json; written last

DCP itself notices a short or missing shard, but loads a flipped bit, or a shard of another step, without
a word. Here every byte is covered by a checksum, the checksums by the marker, and the marker by being last.
A file that the manifest does not name is ignored: nothing ever reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...spec import CheckpointError
from ...spec.files import write_whole

FORMAT = 1
MANIFEST = "manifest.json"
MARKER = "COMMITTED"
FOLDER = re.compile(r"step-(\d+)(\.replaced-\d+)?")


@dataclass(frozen=True)
class Manifest:
    step: int
    meta: dict[str, Any]  # the run's own: data position, loss scale, spec … (anything JSON holds)
    files: dict[str, dict[str, Any]]  # name → {"bytes", "sha256"}
    time: str = ""
    torch: str = ""
    format: int = FORMAT


def step_of(folder: Path) -> int:
    match = FOLDER.fullmatch(folder.name)
    if not match:
        raise CheckpointError(f"{folder} is not a checkpoint: its name is not like step-000100")
    return int(match[1])


def seal(folder: Path, step: int, meta: dict[str, Any], torch: str) -> None:
    """Write the manifest of everything in `folder`. Until `commit`, it is still nothing that a run would load."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = Manifest(step, meta, files, time=now, torch=torch)
    write_whole(folder / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=1))


def commit(folder: Path) -> None:
    write_whole(folder / MARKER, sha256(folder / MANIFEST))


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest, or raise with the name of the file that is wrong."""
    step = step_of(folder)
    marker, path = folder / MARKER, folder / MANIFEST
    vouched = read(marker, "the save was never finished").decode(errors="replace").strip()
    text = read(path, "nothing says what the checkpoint should hold")
    if hashlib.sha256(text).hexdigest() != vouched:
        raise CheckpointError(f"{path} is not the one that {MARKER} vouches for (checksum mismatch)")
    fields = json.loads(text)
    if fields.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {fields.get('format')}; this version of LMWorks reads {FORMAT}")
    manifest = Manifest(**fields)
    if manifest.step != step:
        raise CheckpointError(f"{path} belongs to step {manifest.step}, not to {folder.name}")
    for name, entry in manifest.files.items():
        check_file(folder / name, entry["bytes"], entry["sha256"])
    return manifest


def check_file(path: Path, size: int, digest: str) -> None:
    try:
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes instead of {size}")
        if sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum does not match the manifest")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def read(path: Path, meaning: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {meaning}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
