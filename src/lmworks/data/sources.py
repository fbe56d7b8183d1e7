"""Where text comes from: a source is cut into parts, and a part is read as a stream of documents.

Parts are what worker processes share out and what a resumed run finds finished. The documents of all parts, in
order, are the documents of the source; how it was cut changes nothing in the result.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import mmap
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..spec.errors import DataError, NoSuchData, SpecError
from .repository import Pieces, repository_pieces

CURATED_FILE = "curated.json"  # a folder that `lmworks data curate` made: its documents are in the shards that it lists
SHARD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
WINDOW_BYTES = 16 * 2**20  # of a line that is looked for its end
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    text_field: str = "text"  # of a JSON line, a parquet table or a Hugging Face dataset
    glob: str = "**/*"  # which files of a folder are documents
    separator: str = ""  # cuts a text file into documents; empty: the file is one
    part_bytes: int = 2 * 2**20
    repositories: bool = False  # every folder in a source folder is one document: a repository (repository.py)
    metadata_dropout: float = 0.5  # share of the repositories without their names and paths


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
    pieces: Pieces = ()  # of a repository: special tokens and the texts after them, which `text` joins
    skipped: str = ""  # why this file of a folder is not a document; then there is no text


def parts_of(source: str, reading: Reading, out: Path) -> list[Part]:
    """`out` is where the result goes: inside a source folder it is not part of the source."""
    if source == "stdlib":
        return file_parts(source, stdlib_files(), reading)
    if source.startswith("hf:"):
        return [Part("hf", source, start=i, stop=n) for n in [hf_shards(source)] for i in range(n)]
    path = Path(source)
    if reading.repositories and not path.is_dir():
        raise SpecError(f"--repositories: {source!r} is no folder; give one that holds a folder for each repository")
    if reading.repositories:
        return repository_parts(source, folder_files(path, reading.glob, out))
    if path.is_dir():
        if (path / CURATED_FILE).is_file():
            return [part for shard in curated_shards(path) for part in shard_parts(str(path / shard), reading)]
        files = folder_files(path, reading.glob, out)
        if all(file.endswith(SHARD_SUFFIXES) for file in files):
            return [part for file in files for part in shard_parts(file, reading)]
        return file_parts(source, files, reading)
    if not path.is_file():
        raise NoSuchData(
            f"no source at {source!r}: give a file, a folder, stdlib, or hf:NAME for a Hugging Face dataset"
        )
    return shard_parts(source, reading) if source.endswith(SHARD_SUFFIXES) else [Part("text", source, (source,))]


def shard_parts(file: str, reading: Reading) -> list[Part]:
    """Of a file of many documents. A compressed one cannot be cut: it is one part."""
    if file.endswith(".parquet"):
        return [Part("parquet", file, (file,), i, i + 1) for i in range(parquet_groups(file))]
    size = os.stat(file).st_size
    if not file.endswith(".jsonl"):
        return [Part("jsonl", file, (file,), 0, size)]
    cuts = range(0, max(1, size), reading.part_bytes)
    return [Part("jsonl", file, (file,), start, start + reading.part_bytes) for start in cuts]


def curated_shards(folder: Path) -> list[str]:
    try:
        return [shard["file"] for shard in json.loads((folder / CURATED_FILE).read_bytes())["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / CURATED_FILE} cannot be read: {error!r}; curate the folder again") from None


def documents_of(part: Part, reading: Reading) -> Iterator[Document]:
    """Everything a part holds, in order; a file of a folder that is no text comes as a skipped document."""
    if part.kind == "files":
        for file in part.files:
            text = read_text(file)
            yield Document(text) if text is not None else Document("", skipped=file)
        return
    if part.kind == "repository":
        yield from repository_documents(part, reading)
        return
    streams: dict[str, Callable[[], Iterator[str]]] = {
        "text": lambda: separated_text(part.source, reading.separator),
        "jsonl": lambda: jsonl_texts(part.source, part.start, part.stop, reading.text_field),
        "parquet": lambda: parquet_texts(part.source, part.start, reading.text_field),
        "hf": lambda: hf_texts(part.source, part.start, part.stop, reading.text_field),
    }
    for text in streams[part.kind]():
        yield Document(text)


def fingerprint_of(parts: Sequence[Part]) -> list[str]:
    """Changes when the files do: their names, sizes and times. A dataset on a hub counts by its name alone."""
    files = dict.fromkeys(file for part in parts for file in part.files)
    return [f"{file} {size_and_time(file)}" for file in files]


def size_and_time(file: str) -> str:
    status = os.stat(file) if os.path.exists(file) else os.lstat(file)  # a link that leads nowhere
    return f"{status.st_size} {status.st_mtime_ns}"


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


def repository_parts(source: str, files: list[str]) -> list[Part]:
    """One for each folder in the source; files beside them are a repository with the name of the source."""
    groups: dict[str, list[str]] = {}
    for file in files:
        inner = Path(file).relative_to(source).parts
        groups.setdefault(str(Path(source, inner[0])) if len(inner) > 1 else source, []).append(file)
    return [Part("repository", root, tuple(group)) for root, group in groups.items()]


def repository_documents(part: Part, reading: Reading) -> Iterator[Document]:
    root = Path(part.source)
    files: dict[str, str] = {}
    for file in part.files:
        text = read_text(file)
        if text is None:
            yield Document("", skipped=file)
        elif text.strip():
            files[Path(file).relative_to(root).as_posix()] = text
    pieces = repository_pieces(root.resolve().name, files, reading.metadata_dropout)
    yield Document("".join(text for _, text in pieces), pieces if files else ())


def folder_files(folder: Path, glob: str, out: Path) -> list[str]:
    """Regular files that match, by name in a fixed order; hidden files and folders (.git) are left out."""
    result = out.resolve()
    holds_result = result.is_relative_to(folder.resolve())
    try:
        found = [  # as strings: a tree may have a million files
            str(path)
            for path in folder.glob(glob)
            if path.is_file()
            and not any(name.startswith(".") for name in path.relative_to(folder).parts)
            and not (holds_result and path.resolve().is_relative_to(result))
        ]
    except (ValueError, NotImplementedError) as error:
        raise SpecError(f"--glob {glob!r} cannot be used: {error}") from None
    if not found:
        raise NoSuchData(f"no file in {folder} matches {glob!r}; choose others with --glob, e.g. '**/*.py'")
    return sorted(found, key=lambda file: file.replace("/", "\0"))  # folder by folder


def broken_links(source: str, glob: str) -> list[str]:
    """Links of a folder that lead nowhere or in a circle. Links to folders are not followed."""
    if not os.path.isdir(source) or os.path.exists(os.path.join(source, CURATED_FILE)):
        return []
    return sorted(str(path) for path in Path(source).glob(glob) if path.is_symlink() and not path.exists())


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


# --- readers, one for each format ------------------------------------------------------------------------


Where = Callable[[], str]
"""Names the place of a record; called only for an error (a line number costs a scan)."""

EXTRA = "pip install 'lmworks[data]'"


def read_text(file: str) -> str | None:
    """A whole file; None where it is not UTF-8 text (an image, an archive, another encoding)."""
    try:
        with open(file, "rb") as stream:
            raw = stream.read()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    try:
        return None if b"\0" in raw else raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def separated_text(file: str, separator: str) -> Iterator[str]:
    text = read_text(file)
    if text is None:
        raise DataError(f"{file} is not UTF-8 text; convert it first (iconv -t UTF-8), or give .jsonl or .parquet")
    yield from text.split(separator) if separator else [text]


def jsonl_texts(file: str, start: int, stop: int, field: str) -> Iterator[str]:
    """The lines that begin in bytes [start, stop); all lines of a compressed file."""
    if not file.endswith(".jsonl"):
        with open_compressed(file) as stream:
            try:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield line_text(line, field, lambda number=number: f"{file} line {number}")  # type: ignore[misc]
            except damages(file) as error:
                raise DataError(f"{file} is damaged: {error}") from None
        return
    with open(file, "rb") as stream:
        if not stream.seek(0, 2):
            return
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            for at, end in line_spans(raw, start, stop):
                line = raw[at:end]
                if line.strip():
                    yield line_text(line, field, functools.partial(line_name, file, raw, at))


def line_spans(raw: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where lines begin and end that begin in bytes [start, stop): every line is in exactly one such range."""
    at = 0 if start == 0 else raw.find(b"\n", start - 1, stop) + 1
    # find gave -1: no line begins here, the last one reaches over this range
    while start <= at < min(stop, len(raw)):
        end = end_of_line(raw, at)
        yield at, end
        at = end + 1


def end_of_line(raw: mmap.mmap, at: int) -> int:
    """Of the line at `at`. A long one is looked through a window at a time, so that it does not fill the memory."""
    while at < len(raw):
        if (end := raw.find(b"\n", at, at + WINDOW_BYTES)) >= 0:
            return end
        at += WINDOW_BYTES
        if hasattr(mmap, "MADV_DONTNEED"):
            raw.madvise(mmap.MADV_DONTNEED)  # a file that is only read: its pages can be read again
    return len(raw)


def open_compressed(file: str) -> IO[bytes]:
    """A .gz or .zst file as a stream of bytes."""
    if file.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{file}: reading .zst needs zstandard: {EXTRA}") from None
    return io.BufferedReader(zstandard.open(file, "rb"))


def damages(file: str) -> tuple[type[Exception], ...]:
    """What reading a damaged file that `open_compressed` opened raises: the decoders have errors of their own."""
    if file.endswith(".gz"):
        return OSError, EOFError, zlib.error
    import zstandard

    return OSError, EOFError, zstandard.ZstdError


def line_name(file: str, raw: mmap.mmap, at: int) -> str:
    newlines = raw[:at].count(b"\n")
    return f"{file} line {newlines + 1}"


def line_text(line: bytes, field: str, where: Where) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where()} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where()} is not a JSON object with a field {field!r}")
    return field_text(record, field, where)


def field_text(record: Mapping[str, Any], field: str, where: Where) -> str:
    if field not in record:
        raise DataError(f"{where()}: no field {field!r}; it has {', '.join(record)}; choose one with --text-field")
    if not isinstance(record[field], str):
        raise DataError(f"{where()}: field {field!r} is not a string; choose another with --text-field")
    return without_surrogates(record[field])


def without_surrogates(text: str) -> str:
    """JSON can spell half a surrogate pair, which no UTF-8 text can hold; it becomes '?'."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace").decode("utf-8")


def parquet_file(file: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading parquet needs pyarrow: {EXTRA}") from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def parquet_groups(file: str) -> int:
    count: int = parquet_file(file).num_row_groups
    return count


def parquet_texts(file: str, group: int, field: str) -> Iterator[str]:
    for _, row in parquet_rows(file, group, field, [field]):
        # a null is a row without text, which is dropped like an empty one
        yield field_text({field: "" if row[field] is None else row[field]}, field, lambda: file)


def parquet_rows(
    file: str, group: int, field: str, columns: list[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the row group, row); `columns`: only these."""
    table = parquet_file(file)
    names = table.schema_arrow.names
    if field not in names:
        raise DataError(f"{file}: no column {field!r}; it has {', '.join(names)}; choose one with --text-field")
    number = 0
    batches = table.iter_batches(row_groups=[group], columns=columns, batch_size=256)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # pyarrow's errors are kinds of these
            raise DataError(f"{file} is damaged in row group {group}: {str(error).splitlines()[0]}") from None
        if batch is None:
            return
        for row in batch.to_pylist():
            yield number, row
            number += 1


@functools.lru_cache(maxsize=4)
def hf_stream(source: str) -> Any:
    """`hf:NAME[:CONFIG][:SPLIT]`, streamed: nothing is stored but our tokens."""
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise SpecError(f"{source!r}: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: reading Hugging Face datasets needs `datasets`: {EXTRA}") from None
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # network, name, access: many types, all of them the user's to see
        raise DataError(f"{source} cannot be opened: {' '.join(str(error).split())[:300]}") from None


def hf_shards(source: str) -> int:
    """Files that the hub keeps the dataset in; each becomes a part."""
    stream = hf_stream(source)
    shards: int = getattr(stream, "num_shards", 1)
    return max(1, shards) if hasattr(stream, "shard") else 1


def hf_texts(source: str, shard: int, shards: int, field: str) -> Iterator[str]:
    for record in hf_records(source, shard, shards):
        yield field_text(record, field, lambda: source)


def hf_records(source: str, shard: int, shards: int) -> Iterator[Mapping[str, Any]]:
    stream = hf_stream(source)
    records = iter(stream.shard(num_shards=shards, index=shard) if shards > 1 else stream)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # the network, mostly
            raise DataError(
                f"{source} broke off: {' '.join(str(error).split())[:300]}; run again to continue"
            ) from None
        yield record
