"""Files of examples → tokens of every example, by worker processes, kept in the cache folder.

What is kept depends on the files' content, the tokenizer and the template only; lengths, splits and what follows from
bad examples are settled by the reader (example_batches.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.align import CONVERSATIONS, PREFERENCES, PROMPTS
from ..spec.errors import DataError, NoSuchData, SpecError
from ..spec.files import cache_root
from ..spec.run import DataSpec
from .chat_tokenizer import ChatTokenizer, Encoded
from .encode import as_digests, available_cores, content_digest, map_as_completed, worker_pool
from .examples import BadExample, Example, read_example
from .progress import Progress, silent
from .sources import parquet_file
from .trained_turns import Rendered, Untrainable

VERSION = 1
FORMATS = (".jsonl", ".json", ".parquet")
CHUNK_BYTES = 2**20
ARRAYS = ("tokens", "trained", "offsets", "places", "digests", "labels", "margins")


@dataclass(frozen=True)
class Bad:
    """A record that cannot be used."""

    file: int
    line: int
    reason: str
    detail: str


@dataclass(frozen=True)
class ExampleSet:
    """Encoded examples in the order of their files. An example has one sequence, a pair two: chosen, rejected."""

    kind: str
    files: tuple[str, ...]
    tokens: NDArray[np.int32]  # of all sequences, one after the other
    trained: NDArray[np.bool_]  # of each token
    offsets: NDArray[np.int64]  # (sequences + 1,)
    places: NDArray[np.int64]  # (examples, 2): file and line, counted from 1
    digests: NDArray[np.uint64]  # (examples, 2): of the prompt, where there is one: it decides what is held out
    labels: NDArray[np.bool_]  # (examples,)
    margins: NDArray[np.float64]  # (examples,); NaN: none
    bad: tuple[Bad, ...]
    records: tuple[dict[str, Any], ...]  # of prompts: prompt and columns
    split: int  # conversations that became several examples
    trained_bytes: int  # UTF-8 bytes behind trained tokens
    digest: str = ""  # of the tokens and of what is trained

    def __len__(self) -> int:
        return len(self.places)

    @property
    def width(self) -> int:
        return 2 if self.kind == PREFERENCES else 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(examples, width) tokens of each sequence."""
        return np.diff(self.offsets).reshape(-1, self.width)

    def sequence(self, example: int, which: int = 0) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        number = example * self.width + which
        part = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[part], self.trained[part]

    def place(self, example: int) -> str:
        file, line = self.places[example].tolist()
        return place_name(self.files[file], line)

    def compute_digest(self) -> str:
        found = hashlib.sha256(self.kind.encode())
        for array in (self.tokens, self.trained, self.offsets, self.labels, self.margins):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def place_name(file: str, line: int) -> str:
    return f"{file} {'line' if file.endswith('.jsonl') else 'record'} {line}"


def load_examples(
    path: str, data: DataSpec, init: str, *, chat: ChatTokenizer | None = None, progress: Progress = silent
) -> ExampleSet:
    """From the cache folder, where the same files were encoded before."""
    files = example_files(path, "data.val_path" if path == data.val_path else "data.path")
    chat = chat or ChatTokenizer.open(data, init)
    content = [hash_file(file) for file in files]
    key = hashlib.sha256(json.dumps([VERSION, data.kind, chat.digest, content]).encode()).hexdigest()
    folder = cache_root() / "examples" / key[:32]
    if not (folder / "meta.json").is_file():
        keep(encode_files(files, data, (data.tokenizer, data.chat_template, init, chat.digest), progress), folder)
    return replace(read_kept(folder), files=tuple(files))


def example_files(path: str, key: str = "data.path") -> list[str]:
    """The file, or those of a folder, by name; `key`: of the spec, for errors."""
    place = Path(path)
    if place.is_dir():
        found = sorted(str(one) for one in place.iterdir() if one.suffix in FORMATS and one.is_file())
        if not found:
            raise NoSuchData(f"{key} = {path!r}: no file of examples ({', '.join(FORMATS)}) in this folder")
        return found
    if not place.is_file():
        raise NoSuchData(f"{key} = {path!r}: no such file; post-training reads {', '.join(FORMATS)} or a folder")
    if place.suffix not in FORMATS:
        raise NoSuchData(f"{key} = {path!r}: examples are read from {', '.join(FORMATS)} files")
    return [path]


def hash_file(file: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


# --- encoding --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Records of one file, beginning with number `first` (from 1): bytes of a jsonl file, or decoded records."""

    file: int
    first: int
    name: str
    span: tuple[int, int] = (0, 0)
    records: tuple[Any, ...] | None = None
    kind: str = ""
    source: tuple[str, str, str, str] = ("",) * 4  # data.tokenizer, data.chat_template, checkpoint.init; digest


@dataclass(frozen=True)
class EncodedChunk:
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: list[int]  # of the sequences
    places: list[tuple[int, int]]
    digests: list[bytes]
    labels: list[bool]
    margins: list[float]
    bad: list[Bad]
    records: list[dict[str, Any]]
    split: int
    trained_bytes: int


def encode_files(
    files: Sequence[str], data: DataSpec, source: tuple[str, str, str, str], progress: Progress
) -> ExampleSet:
    chunks = [
        replace(chunk, kind=data.kind, source=source)
        for number, file in enumerate(files)
        for chunk in chunks_of(number, file)
    ]
    done: dict[tuple[int, int], EncodedChunk] = {}
    progress("encode examples", 0, len(chunks))
    with worker_pool(min(available_cores(), max(1, len(chunks) // 2))) as pool:
        for place, made in map_as_completed(pool, encode_chunk, chunks):
            done[place] = made
            progress("encode examples", len(done), len(chunks))
    return join(data.kind, tuple(files), [done[place] for place in sorted(done)])


def chunks_of(number: int, file: str) -> Iterator[Chunk]:
    if file.endswith(".jsonl"):
        with open(file, "rb") as stream:
            first = start = lines = size = 0
            for line in stream:
                lines, size = lines + 1, size + len(line)
                if size - start >= CHUNK_BYTES:
                    yield Chunk(number, first + 1, file, (start, size))
                    first, start = lines, size
            if size > start:
                yield Chunk(number, first + 1, file, (start, size))
    elif file.endswith(".json"):
        try:
            records = json.loads(Path(file).read_bytes())
        except ValueError as error:
            raise DataError(f"{file} is not JSON: {error}") from None
        if not isinstance(records, list):
            raise DataError(f"{file}: a list of records is expected in a .json file; one record a line is .jsonl")
        yield Chunk(number, 1, file, records=tuple(records))
    else:
        first = 1
        for batch in parquet_file(file).iter_batches(batch_size=4096):
            yield Chunk(number, first, file, records=tuple(batch.to_pylist()))
            first += batch.num_rows


def records_of(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Number and record; the exception for what is not JSON."""
    if chunk.records is not None:
        yield from enumerate(chunk.records, chunk.first)
        return
    with open(chunk.name, "rb") as stream:
        stream.seek(chunk.span[0])
        raw = stream.read(chunk.span[1] - chunk.span[0])
    for number, line in enumerate(raw.split(b"\n"), chunk.first):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, BadExample("not JSON", f"not JSON: {error.msg} at character {error.pos + 1}")
            except ValueError as error:  # not UTF-8
                yield number, BadExample("not JSON", f"not JSON: {error}")


@functools.lru_cache(maxsize=1)
def open_chat(tokenizer: str, chat_template: str, init: str, digest: str) -> ChatTokenizer:
    """Once in a process; `digest` changes when the files do."""
    return ChatTokenizer.open(DataSpec(tokenizer=tokenizer, chat_template=chat_template), init)


def encode_chunk(chunk: Chunk) -> tuple[tuple[int, int], EncodedChunk]:
    chat = open_chat(*chunk.source)
    sequences: list[Encoded] = []
    made = EncodedChunk(np.empty(0, np.int32), np.empty(0, np.bool_), [], [], [], [], [], [], [], 0, 0)
    split = 0
    for line, record in records_of(chunk):
        try:
            if isinstance(record, BadExample):
                raise record
            example = read_example(record, chunk.kind)
            found = encode_example(chat, example, chunk.kind)
        except BadExample as bad:
            made.bad.append(Bad(chunk.file, line, bad.reason, bad.detail))
            continue
        digest = content_digest(json.dumps(example.prompt or example.answers, sort_keys=True))
        split += len(found) > 1
        for one in found:
            sequences.extend(one)
            made.places.append((chunk.file, line))
            made.digests.append(digest)
            made.labels.append(example.label)
            made.margins.append(np.nan if example.margin is None else example.margin)
        if chunk.kind == PROMPTS:
            made.records.append({"prompt": example.prompt, **example.columns})
    return (chunk.file, chunk.first), replace(
        made,
        tokens=np.concatenate([made.tokens, *(one.ids for one in sequences)]),
        trained=np.concatenate([made.trained, *(one.trained for one in sequences)]),
        lengths=[len(one) for one in sequences],
        split=split,
        trained_bytes=sum(one.trained_bytes for one in sequences),
    )


def encode_example(chat: ChatTokenizer, example: Example, kind: str) -> list[tuple[Encoded, ...]]:
    """The sequences of each example that a record becomes. Raises BadExample."""
    try:
        found = encode_parts(chat, example, kind)
    except Untrainable as error:
        raise BadExample("not as generated", str(error)) from None
    except SpecError as error:
        raise BadExample("refused by the template", str(error)) from None
    except DataError as error:
        raise BadExample("refused by the tokenizer", str(error)) from None
    if kind != PROMPTS and not all(one.trained.any() for sequences in found for one in sequences):
        raise BadExample("no assistant turn", "the chat template marks no token of it as generated")
    return found


def encode_parts(chat: ChatTokenizer, example: Example, kind: str) -> list[tuple[Encoded, ...]]:
    if kind == PROMPTS:
        return [(encode_prompt(chat, example),)]
    if kind == CONVERSATIONS and isinstance(example.prompt, list):
        messages = [*example.prompt, *example.answers[0]]
        return [(one,) for one in chat.turns(messages, example.tools, len(example.prompt))]
    return [tuple(encode_answer(chat, example, answer) for answer in example.answers)]


def encode_prompt(chat: ChatTokenizer, example: Example) -> Encoded:
    if isinstance(example.prompt, list):
        ids = chat.encode(chat.renderer.prompt(example.prompt, example.tools))
    else:
        ids = [*chat.begin, *chat.encode(example.prompt)]
    return Encoded(np.array(ids, np.int32), np.zeros(len(ids), np.bool_))


def encode_answer(chat: ChatTokenizer, example: Example, answer: str | list[Any]) -> Encoded:
    """Prompt and answer as one sequence, the tokens of the prompt being the same before every answer."""
    if isinstance(example.prompt, str) and isinstance(answer, str):
        return chat.completion(example.prompt, answer)
    messages = [*example.prompt, *answer]
    texts = chat.renderer.turns(messages, example.tools, len(example.prompt))
    if len(texts) != 1:
        raise BadExample(
            "several turns", "the chat template shows earlier turns of an answer in another way once others follow"
        )
    (rendered,) = texts
    start = rendered.trained[0][0] if rendered.trained else len(rendered.text)
    return chat.answer(rendered.text[:start], Rendered(rendered.text, rendered.trained))


def join(kind: str, files: tuple[str, ...], chunks: list[EncodedChunk]) -> ExampleSet:
    lengths = np.array([length for chunk in chunks for length in chunk.lengths], np.int64)
    digests = [one for chunk in chunks for one in chunk.digests]
    return ExampleSet(
        kind=kind,
        files=files,
        tokens=np.concatenate([np.empty(0, np.int32), *(chunk.tokens for chunk in chunks)]),
        trained=np.concatenate([np.empty(0, np.bool_), *(chunk.trained for chunk in chunks)]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        places=np.array([one for chunk in chunks for one in chunk.places], np.int64).reshape(-1, 2),
        digests=as_digests(digests),
        labels=np.array([one for chunk in chunks for one in chunk.labels], np.bool_),
        margins=np.array([one for chunk in chunks for one in chunk.margins], np.float64),
        bad=tuple(one for chunk in chunks for one in chunk.bad),
        records=tuple(one for chunk in chunks for one in chunk.records),
        split=sum(chunk.split for chunk in chunks),
        trained_bytes=sum(chunk.trained_bytes for chunk in chunks),
    )


# --- the cache folder ------------------------------------------------------------------------------------


def keep(examples: ExampleSet, folder: Path) -> None:
    """The folder appears complete, whoever else is making it at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        for name in ARRAYS:
            np.save(draft / f"{name}.npy", getattr(examples, name))
        meta = {
            "kind": examples.kind,
            "bad": [asdict(one) for one in examples.bad],
            "records": examples.records,
            "split": examples.split,
            "trained_bytes": examples.trained_bytes,
            "digest": examples.compute_digest(),
        }
        (draft / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        try:
            os.rename(draft, folder)
        except OSError:
            if not (folder / "meta.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_kept(folder: Path) -> ExampleSet:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    bad, records = tuple(Bad(**one) for one in meta.pop("bad")), tuple(meta.pop("records"))
    return ExampleSet(files=(), bad=bad, records=records, **arrays, **meta)
