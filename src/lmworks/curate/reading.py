"""A part of a source → documents, and what is no document with the reason why not. Nothing is left out uncounted."""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from ..data.sources import (
    Part,
    damages,
    hf_records,
    line_spans,
    open_compressed,
    parquet_rows,
    without_surrogates,
)
from ..spec.errors import DataError
from .documents import Document
from .pipeline import ReadingSpec

TEXT_KINDS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
META_FIELDS = ("meta", "metadata")  # a table of them is laid flat: shards of ours, and of datatrove
BUILT_IN = {"id", "text"}


@dataclass(slots=True)
class Rejected:
    """What a source holds that is no document."""

    id: str
    reason: str
    bytes: int
    text: str = ""  # its beginning, where it can be shown


def read_part(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    readers = {
        "files": read_files,
        "links": lambda part, _: (Rejected(file, "broken_link", 0) for file in part.files),
        "text": read_text_file,
        "jsonl": read_lines,
        "parquet": read_rows,
        "hf": read_hub,
    }
    for found in readers[part.kind](part, reading):
        if isinstance(found, Document) and not found.text.strip():
            yield Rejected(found.id, "empty", len(found.text))
        else:
            yield found


def read_files(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    root = Path(part.source)
    for file in part.files:
        found = read_file(file, reading)
        if isinstance(found, Document):
            inside = root.is_dir() and Path(file).is_relative_to(root)
            found.meta = {"source": part.source, "path": str(Path(file).relative_to(root)) if inside else file}
        yield found


def read_text_file(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    whole = read_file(part.source, reading)
    if isinstance(whole, Rejected) or not reading.separator:
        if isinstance(whole, Document):
            whole.meta = {"source": part.source, "path": part.source}
        yield whole
        return
    for number, text in enumerate(whole.text.split(reading.separator)):
        yield Document(f"{part.source}#{number}", text, {"source": part.source}, whole.notes if not number else {})


def read_file(file: str, reading: ReadingSpec) -> Document | Rejected:
    """A whole file: UTF-8, or UTF-16 that says so in its first bytes."""
    try:
        size = os.stat(file).st_size
        if size > reading.max_document_bytes:
            return Rejected(file, "too_long", size)
        raw = Path(file).read_bytes()
    except OSError as error:
        return Rejected(file, "unreadable", 0, error.strerror or "")
    encoding = next((name for mark, name in TEXT_KINDS if raw.startswith(mark)), "utf-8")
    if b"\0" in raw and encoding != "utf-16":
        return Rejected(file, "binary", size)
    try:
        document = Document(file, raw.decode(encoding))
    except UnicodeDecodeError:
        if reading.invalid_utf8 == "drop" or encoding == "utf-16":
            return Rejected(file, "invalid_utf8", size, raw[:2000].decode("utf-8", "replace"))
        if reading.invalid_utf8 == "replace":
            document = Document(file, raw.decode("utf-8", "replace"))
        else:  # five bytes mean nothing in Windows-1252: those are taken as Latin-1
            text = raw.decode("cp1252", "surrogateescape")
            document = Document(file, "".join(chr(ord(c) - 0xDC00) if "\udc80" <= c <= "\udcff" else c for c in text))
        document.note("invalid_utf8")
    if encoding != "utf-8":
        document.note("utf16" if encoding == "utf-16" else "byte_order_mark")
    return document


def read_lines(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    """JSON lines. A line that is too long is not read into memory."""
    if part.source.endswith((".gz", ".zst")):
        yield from read_compressed(part, reading)
        return
    with open(part.source, "rb") as stream:
        if not stream.seek(0, 2):
            return
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            for start, stop in line_spans(raw, part.start, part.stop):
                name = f"{part.source}#{start}"
                if stop - start > reading.max_document_bytes:
                    yield Rejected(name, "too_long", stop - start)
                elif line := raw[start:stop].strip():
                    yield from_line(line, name, part.source, reading)


def read_compressed(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    with open_compressed(part.source) as stream:
        start = 0
        try:
            for line, size in limited_lines(stream, reading.max_document_bytes):
                name = f"{part.source}#{start}"
                if line is None:
                    yield Rejected(name, "too_long", size)
                elif line.strip():
                    yield from_line(line.strip(), name, part.source, reading)
                start += size
        except damages(part.source) as error:
            raise DataError(f"{part.source} is damaged at byte {start} of its text: {error}") from None


def limited_lines(stream: IO[bytes], limit: int) -> Iterator[tuple[bytes | None, int]]:
    """(line, its bytes); None for a line longer than `limit`, of which no more than that is ever in memory."""
    while line := stream.readline(limit + 1):
        size = len(line)
        if size <= limit or line.endswith(b"\n"):
            yield line, size
            continue
        while rest := stream.readline(limit + 1):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        yield None, size


def from_line(line: bytes, name: str, source: str, reading: ReadingSpec) -> Document | Rejected:
    try:
        record = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        try:  # msgspec refuses half a surrogate pair, which JSON can spell
            record = json.loads(line)
        except (ValueError, RecursionError):
            return Rejected(name, "not_json", len(line), line[:2000].decode("utf-8", "replace"))
    if not isinstance(record, dict):
        return Rejected(name, "not_json_object", len(line), line[:2000].decode("utf-8", "replace"))
    return from_record(record, name, source, reading)


def from_record(record: Mapping[str, Any], name: str, source: str, reading: ReadingSpec) -> Document | Rejected:
    text = record.get(reading.text_field)
    if text is None:
        return Rejected(name, "no_text_field", 0, f"it has {', '.join(map(str, record))}"[:2000])
    if not isinstance(text, str):
        return Rejected(name, "text_is_no_string", 0, repr(text)[:2000])
    meta = {key: value for key, value in record.items() if key != reading.text_field and key not in META_FIELDS}
    for key in META_FIELDS:
        inner = record.get(key)
        if isinstance(inner, str):  # our parquet shards
            inner = json_table(inner)
        meta |= inner if isinstance(inner, dict) else {}
    document = Document(name, text, {"source": source, **meta})
    if not text.isascii():
        clean = without_surrogates(text)
        if clean is not text:
            document.text = clean
            document.note("half_surrogate")
    return document


def json_table(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return None


def read_rows(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    for number, row in parquet_rows(part.source, part.start, reading.text_field):
        size = len(row[reading.text_field] or "") if isinstance(row[reading.text_field], str) else 0
        name = f"{part.source}#{part.start}.{number}"
        if size > reading.max_document_bytes:
            yield Rejected(name, "too_long", size)
        elif row[reading.text_field] is None:
            yield Rejected(name, "empty", 0)
        else:
            yield from_record(row, name, part.source, reading)


def read_hub(part: Part, reading: ReadingSpec) -> Iterator[Document | Rejected]:
    for number, record in enumerate(hf_records(part.source, part.start, part.stop)):
        yield from_record(record, f"{part.source}#{part.start}.{number}", part.source, reading)


# --- documents between two passes -------------------------------------------------------------------------


class Stored(msgspec.Struct):
    """A document in a shard: one JSON line."""

    id: str
    text: str
    meta: dict[str, Any]


encode = functools.partial(msgspec.json.Encoder(enc_hook=str).encode)  # dates of parquet tables become text
decode = msgspec.json.Decoder(Stored).decode


def stored_line(document: Document) -> bytes:
    return encode(Stored(document.id, document.text, document.meta)) + b"\n"


def stored_documents(file: Path) -> Iterator[Document]:
    with open(file, "rb") as stream:
        for line in stream:
            found = decode(line)
            yield Document(found.id, found.text, found.meta)
