"""Documents of parts → shards of about equal size."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from ..spec.errors import DataError
from .reading import stored_documents

COPY_BYTES = 2**20
ROW_GROUP = 2000  # documents


def cut_shards(sizes: Sequence[int], shard_bytes: int) -> list[range]:
    """Ranges of parts, each ended by the part that reaches `shard_bytes`."""
    cuts, begin, size = [], 0, 0
    for number, part in enumerate(sizes):
        size += part
        if size >= shard_bytes:
            cuts.append(range(begin, number + 1))
            begin, size = number + 1, 0
    return [*cuts, range(begin, len(sizes))] if size else cuts


def write_shard(number: int, parts: Sequence[Path], form: str, folder: Path) -> dict[str, Any]:
    """A line of the index: name, documents, bytes, checksum."""
    path = folder / f"documents-{number:05d}.{form}"
    documents = write_parquet(parts, path) if form == "parquet" else write_lines(parts, path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
        os.fsync(file.fileno())
    return {"file": path.name, "documents": documents, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_lines(parts: Sequence[Path], path: Path) -> int:
    documents = 0
    with open(path, "wb") as file:
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if path.suffix == ".gz" else None
        out = cast(IO[bytes], packed or file)
        for part in parts:
            with open(part, "rb") as lines:
                while piece := lines.read(COPY_BYTES):
                    documents += piece.count(b"\n")
                    out.write(piece)
        if packed:
            packed.close()
    return documents


def write_parquet(parts: Sequence[Path], path: Path) -> int:
    """Columns id, text, and meta as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("meta", pa.string())])
    documents = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        rows: dict[str, list[str]] = {"id": [], "text": [], "meta": []}

        def flush() -> None:
            if rows["id"]:
                writer.write_table(pa.table(rows, schema))
                for column in rows.values():
                    column.clear()

        for part in parts:
            for document in stored_documents(part):
                rows["id"].append(document.id)
                rows["text"].append(document.text)
                rows["meta"].append(msgspec.json.encode(document.meta).decode())
                documents += 1
                if len(rows["id"]) == ROW_GROUP:
                    flush()
        flush()
    return documents


def check_format(form: str) -> None:
    if form == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise DataError("output.format = \"parquet\" needs pyarrow: pip install 'lmworks[data]'") from None


def move_shards(folders: Sequence[Path], out: Path) -> None:
    """Into the result, by name: a shard that is there already was moved before a kill."""
    for folder in folders:
        for path in folder.glob("documents-*"):
            path.replace(out / path.name)


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
