"""One reader a format. Each names the file, and the line where there is one, when it cannot go on."""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..spec.errors import DataError, SpecError

Where = Callable[[], str]
"""Names the place of a record; called only when there is something to say about it (a line number costs a scan)."""

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
    """The lines that begin in bytes [start, stop): every line is in exactly one such range."""
    with open(file, "rb") as stream:
        if not stream.seek(0, 2):
            return
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            at = 0 if start == 0 else raw.find(b"\n", start - 1) + 1
            # find gave -1: no line begins here, the last one reaches over this range
            while start <= at < min(stop, len(raw)):
                end = raw.find(b"\n", at)
                end = len(raw) if end < 0 else end
                line = raw[at:end]
                if line.strip():
                    yield line_text(line, field, functools.partial(line_name, file, raw, at))
                at = end + 1


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
    table = parquet_file(file)
    columns = table.schema_arrow.names
    if field not in columns:
        raise DataError(f"{file}: no column {field!r}; it has {', '.join(columns)}; choose one with --text-field")
    for batch in table.iter_batches(row_groups=[group], columns=[field]):
        for text in batch.column(0).to_pylist():
            # a null is a row without text, which is dropped like an empty one
            yield field_text({field: "" if text is None else text}, field, lambda: file)


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
        yield field_text(record, field, lambda: source)
