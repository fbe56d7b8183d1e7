"""The manifest of a checkpoint, and the marker that commits it.

    step-000100/
      rank-00000.safetensors …  what each rank wrote: its pieces of the tensors
      index.json                location of each piece of each tensor
      manifest.json             size, rank and digests of every file above, and the metadata of the run
      COMMITTED                 SHA-256 of manifest.json; written last

Every byte is covered by a digest, the digests by the marker, and the marker is written last. Files that are not in the
manifest are ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Never

from ...spec import CheckpointError
from ...spec.files import unsafe_name, write_whole
from .digest import CHUNK, HEX_DIGITS, digest_of, new_hash, write_file, wrong_chunk


class DamagedError(CheckpointError):
    """A checkpoint that cannot be used; an older one may be."""


# --- validation of JSON ----------------------------------------------------------------------------------

# A digest shows that bytes are those that were hashed, not that they are valid: who can write a checkpoint can hash it,
# too. So type and range of every field are checked before it is used as a size, an address or a name.


def json_object(text: bytes, path: Path | str) -> dict[str, Any]:
    """The JSON object of a file, without duplicate keys."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        malformed(path, "its JSON is nested too deeply")
    except ValueError as error:  # no JSON, no UTF-8, a key twice, a number of thousands of digits
        malformed(path, f"it cannot be read as JSON ({error})")
    if not isinstance(found, dict):
        malformed(path, f"it holds {short_repr(found)} instead of a JSON object")
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} comes twice")
    return table


def expect(true: bool, path: Path | str, what: str) -> None:
    if not true:
        malformed(path, what)


def malformed(path: Path | str, what: str) -> Never:
    raise DamagedError(f"{path} is malformed: {what}")


def is_int(value: object, least: int = 0) -> bool:
    """An integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def short_repr(value: object) -> str:
    """At most 80 characters."""
    return f"{value!r:.80}"


# --- manifest and marker ---------------------------------------------------------------------------------

FORMAT = 2
INDEX = "index.json"
MANIFEST = "manifest.json"
MARKER = "COMMITTED"
FOLDER = re.compile(r"step-([0-9]+)(\.replaced-[0-9]+)?")

Files = dict[str, dict[str, Any]]  # name → {"bytes", "rank" that wrote it, "digests" of its chunks}


@dataclass(frozen=True)
class Manifest:
    step: int
    meta: dict[str, Any]  # of the run: data cursor, loss scale, spec … (any JSON)
    files: Files
    hash: str = "sha256"  # or xxh3: of every chunk
    chunk: int = CHUNK  # bytes per digest
    time: str = ""
    torch: str = ""
    format: int = FORMAT


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def refusal_text(folder: Path, reason: str) -> str:
    """In one line. An unfinished save is no damage: a process was killed before its commit."""
    unfinished = folder.is_dir() and not (folder / MARKER).exists()
    return f"{'skipped an unfinished' if unfinished else 'refused a damaged'} checkpoint: {reason}"


def step_of(folder: Path) -> int:
    match = FOLDER.fullmatch(folder.name)
    if not match:
        raise CheckpointError(f"{folder} is not a checkpoint: its name is not like step-000100")
    return int(match[1])


def write_files(work: Path, rank: int, contents: Iterable[memoryview], index: bytes, algorithm: str) -> Files:
    """A rank's file; with `index` (rank 0) also the index of all."""
    files = {shard_name(rank): contents} | ({INDEX: [memoryview(index)]} if index else {})
    return {name: {**write_file(work / name, parts, algorithm), "rank": rank} for name, parts in files.items()}


def os_error_text(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


def write_manifest(
    folder: Path, step: int, meta: dict[str, Any], files: Files, torch: str, hash: str = "sha256"
) -> None:
    """Write the manifest of `files`. Before `commit`, no run loads the folder."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = Manifest(step, meta, files, hash, time=now, torch=torch)
    try:
        check_sizes(folder, manifest)
    except DamagedError as error:  # a rank wrote to a disk of its own
        raise CheckpointError(f"{error} where rank 0 looks: all ranks must save to one file system") from None
    write_whole(folder / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=1))


def commit(folder: Path) -> None:
    write_whole(folder / MARKER, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest, if all its files exist with the right size. Their contents are not read."""
    manifest = read_committed(folder)
    check_sizes(folder, manifest)
    return manifest


def read_committed(folder: Path) -> Manifest:
    """The manifest, if its digest is the one in the marker."""
    step = step_of(folder)
    marker, path = folder / MARKER, folder / MANIFEST
    digest = read(marker, "the save was never finished").decode(errors="replace").strip()
    text = read(path, "nothing says what the checkpoint should hold")
    if hashlib.sha256(text).hexdigest() != digest:
        raise DamagedError(f"{path} does not match {MARKER} (checksum mismatch)")
    manifest = parse_manifest(text, path)
    if manifest.step != step:
        raise DamagedError(f"{path} belongs to step {manifest.step}, not to {folder.name}")
    return manifest


def parse_manifest(text: bytes, path: Path | str) -> Manifest:
    """Parse and validate; `path` is for messages."""
    fields = json_object(text, path)
    if fields.get("format") != FORMAT:
        raise DamagedError(
            f"{path} has format {short_repr(fields.get('format'))}; this version of LMWorks reads {FORMAT}"
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    for key in ("step", "meta", "files"):
        expect(key in fields, path, f"it has no '{key}'")
    for key in fields:
        expect(key in known, path, f"it has a key {short_repr(key)}, which this version of LMWorks does not know")
    manifest = Manifest(**fields)
    expect(is_int(manifest.step), path, f"step = {short_repr(manifest.step)} is not a whole number")
    expect(isinstance(manifest.meta, dict), path, f"meta = {short_repr(manifest.meta)} is not an object")
    expect(isinstance(manifest.files, dict), path, f"files = {short_repr(manifest.files)} is not an object")
    hashes = " or ".join(HEX_DIGITS)
    expect(
        manifest.hash in list(HEX_DIGITS), path, f"hash = {short_repr(manifest.hash)} is not known; it must be {hashes}"
    )
    expect(is_int(manifest.chunk, 1), path, f"chunk = {short_repr(manifest.chunk)} is not a number of bytes")
    for key in ("time", "torch"):
        expect(isinstance(getattr(manifest, key), str), path, f"{key} is not a string")
    expect(INDEX in manifest.files, path, f"files does not list {INDEX}")
    for name, entry in manifest.files.items():
        check_entry(name, entry, manifest, path)
    return manifest


def check_entry(name: str, entry: Any, manifest: Manifest, path: Path | str) -> None:
    """One file: a plain name, and one digest per chunk."""
    if why := unsafe_name(name) or ("it is not a rank's" if name in (MANIFEST, MARKER) else ""):
        raise DamagedError(f"{path} names a file {short_repr(name)}: {why}")
    expect(isinstance(entry, dict), path, f"files['{name}'] is not an object")
    for key in ("bytes", "rank"):
        value = entry.get(key)
        expect(is_int(value), path, f"files['{name}'] has {key} = {short_repr(value)} instead of a whole number")
    digests, digits = entry.get("digests"), HEX_DIGITS[manifest.hash]
    expect(
        isinstance(digests, list) and all(isinstance(one, str) and len(one) == digits for one in digests),
        path,
        f"the digests of files['{name}'] are not those of {manifest.hash}, {digits} digits each",
    )
    chunks = max(1, -(-entry["bytes"] // manifest.chunk))
    found = f"{len(digests)} digests for {entry['bytes']} bytes in chunks of {manifest.chunk}"
    expect(len(digests) == chunks, path, f"files['{name}'] has {found}; {chunks} belong there")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        check_size(folder / name, manifest)


def check_size(path: Path, manifest: Manifest) -> None:
    size = manifest.files[path.name]["bytes"]
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise DamagedError(f"{file_and_rank(path, manifest)} is missing") from None
    except OSError as error:
        raise unreadable(path, manifest, error) from None
    if found != size:
        raise DamagedError(f"{file_and_rank(path, manifest)} has {found} bytes instead of {size}")


def check_file(path: Path, manifest: Manifest) -> None:
    """Every byte of one file."""
    entry = manifest.files[path.name]
    try:
        wrong = wrong_chunk(path, entry["bytes"], entry["digests"], manifest.chunk, manifest.hash)
    except (OSError, EOFError) as error:
        raise unreadable(path, manifest, error) from None
    if wrong is not None:
        raise damaged(path, manifest, wrong)


def read_verified(path: Path, manifest: Manifest) -> bytes:
    """The verified content of one file, read once: a second read may differ."""
    try:
        content, size = path.read_bytes(), manifest.chunk
    except OSError as error:
        raise unreadable(path, manifest, error) from None
    new = new_hash(manifest.hash)
    found = [digest_of([memoryview(content)[at : at + size]], new) for at in range(0, max(1, len(content)), size)]
    for index, (was, now) in enumerate(zip_longest(manifest.files[path.name]["digests"], found)):
        if was != now:
            raise damaged(path, manifest, index)
    return content


def damaged(path: Path, manifest: Manifest, index: int) -> DamagedError:
    """For a wrong digest of chunk `index`."""
    first = index * manifest.chunk
    last = min(first + manifest.chunk, manifest.files[path.name]["bytes"])
    where = f"bytes {first} to {last}" if last else "it"
    return DamagedError(
        f"{file_and_rank(path, manifest)} is damaged: the checksum of {where} does not match the manifest"
    )


def unreadable(path: Path, manifest: Manifest, error: OSError | EOFError) -> DamagedError:
    reason = error.strerror or error if isinstance(error, OSError) else "it ends before its end"
    return DamagedError(f"cannot read {file_and_rank(path, manifest)}: {reason}")


def file_and_rank(path: Path, manifest: Manifest) -> str:
    return f"{path} (rank {manifest.files[path.name]['rank']})"


def read(path: Path, meaning: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: {meaning}") from None
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from None
