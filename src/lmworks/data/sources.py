"""Where text comes from: a source is cut into parts, and a part is read as a stream of documents.

Parts are what worker processes share out and what a resumed run finds finished. The documents of all parts,
in order, are the documents of the source; how it was cut changes nothing in the result.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..spec.errors import DataError, NoSuchData, SpecError
from . import readers

STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    text_field: str = "text"  # of a JSON line, a parquet table or a Hugging Face dataset
    glob: str = "**/*"  # which files of a folder are documents
    separator: str = ""  # cuts a text file into documents; empty: the file is one
    part_bytes: int = 2 * 2**20


@dataclass(frozen=True)
class Part:
    """A piece of one source. `start` and `stop` are bytes (jsonl), row groups (parquet) or shards (hf)."""

    kind: str
    source: str
    files: tuple[str, ...] = ()
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Document:
    text: str
    skipped: str = ""  # why this file of a folder is not a document; then there is no text


def parts_of(source: str, reading: Reading, out: Path) -> list[Part]:
    """`out` is where the result goes: inside a source folder it is not part of the source."""
    if source == "stdlib":
        return file_parts(source, stdlib_files(), reading)
    if source.startswith("hf:"):
        return [Part("hf", source, start=i, stop=n) for n in [readers.hf_shards(source)] for i in range(n)]
    path = Path(source)
    if path.is_dir():
        return file_parts(source, folder_files(path, reading.glob, out), reading)
    if not path.is_file():
        raise NoSuchData(
            f"no source at {source!r}: give a file, a folder, stdlib, or hf:NAME for a Hugging Face dataset"
        )
    if path.suffix == ".jsonl":
        cuts = range(0, max(1, path.stat().st_size), reading.part_bytes)
        return [Part("jsonl", source, (source,), start, start + reading.part_bytes) for start in cuts]
    if path.suffix == ".parquet":
        return [Part("parquet", source, (source,), i, i + 1) for i in range(readers.parquet_groups(source))]
    return [Part("text", source, (source,))]


def documents_of(part: Part, reading: Reading) -> Iterator[Document]:
    """Everything a part holds, in order; a file of a folder that is no text comes as a skipped document."""
    if part.kind == "files":
        for file in part.files:
            text = readers.read_text(file)
            yield Document(text) if text is not None else Document("", skipped=file)
        return
    streams: dict[str, Callable[[], Iterator[str]]] = {
        "text": lambda: readers.separated_text(part.source, reading.separator),
        "jsonl": lambda: readers.jsonl_texts(part.source, part.start, part.stop, reading.text_field),
        "parquet": lambda: readers.parquet_texts(part.source, part.start, reading.text_field),
        "hf": lambda: readers.hf_texts(part.source, part.start, part.stop, reading.text_field),
    }
    for text in streams[part.kind]():
        yield Document(text)


def fingerprint_of(parts: Sequence[Part]) -> list[str]:
    """Changes when the files do: their names, sizes and times. A dataset on a hub counts by its name alone."""
    files = dict.fromkeys(file for part in parts for file in part.files)
    return [f"{file} {status.st_size} {status.st_mtime_ns}" for file in files for status in [os.stat(file)]]


def file_parts(source: str, files: list[str], reading: Reading) -> list[Part]:
    """Consecutive files, together about `part_bytes` long."""
    parts: list[Part] = []
    group: list[str] = []
    size = 0
    for file in files:
        group.append(file)
        size += os.stat(file).st_size
        if size >= reading.part_bytes:
            parts.append(Part("files", source, tuple(group)))
            group, size = [], 0
    return [*parts, Part("files", source, tuple(group))] if group else parts


def folder_files(folder: Path, glob: str, out: Path) -> list[str]:
    """Regular files that match, by name in a fixed order; hidden files and folders (.git) are left out."""
    try:
        found = [path for path in folder.glob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise SpecError(f"--glob {glob!r} cannot be used: {error}") from None
    own = [path for path in found if not path.resolve().is_relative_to(out.resolve())]
    visible = [path for path in own if not any(name.startswith(".") for name in path.relative_to(folder).parts)]
    if not visible:
        raise NoSuchData(f"no file in {folder} matches {glob!r}; choose others with --glob, e.g. '**/*.py'")
    return [str(path) for path in sorted(visible, key=lambda path: path.relative_to(folder).parts)]


def stdlib_files() -> list[str]:
    """The source of the standard library of the running interpreter: a corpus that is always there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in STDLIB_EXCLUDED)
        found += [str(Path(folder, name)) for name in sorted(names) if name.endswith(".py")]
    if not found:
        raise DataError(f"the standard library at {root} holds no .py files; give a folder of source files instead")
    return found
