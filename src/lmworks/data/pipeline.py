"""`prepare`: sources → a folder of token shards, in parallel, resumable, the same whatever the number of workers.

    sources ─ parts ─┬─ encode ─┐
                     ├─ encode ─┼─ assemble (drop duplicates, split, write shards) ─ index.json
                     └─ encode ─┘

Everything that was asked for is hashed into a fingerprint. A folder whose index carries it is up to date; parts
that an interrupted run left under `.work/FINGERPRINT` are kept; anything else is made again. The result is
completed there too: a dataset that the folder held before stays readable until its successor takes its place.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import RunSpec
from ..spec.errors import DataError, SpecError
from ..spec.files import cache_root, check_writable, write_whole
from ..spec.run import NO_DATA
from .assemble import assemble, held_out
from .encode import (
    Job,
    as_digests,
    available_cores,
    content_digest,
    encode_part,
    map_as_completed,
    open_tokenizer,
    read_encoded,
    worker_pool,
)
from .folder import begin_result, begin_work, end_work, exclusive, swap_in, up_to_date
from .index import INDEX_FILE, TOKENIZER_FILE, VERSION, Index, dtype_for, read_index
from .progress import Progress, silent
from .sources import Part, Reading, documents_of, fingerprint_of, parts_of
from .tokenizer import CODE, CODE_TOKENS, ByteTokenizer, bpe_size, read_tokenizer, tokenizer_digest, train_bpe

SHARD_TOKENS = 2**27
BPE_SAMPLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Request:
    """What was asked for: all that the result depends on."""

    sources: tuple[str, ...]
    tokenizer: str
    eot: str
    val_fraction: float
    reading: Reading
    shard_tokens: int

    def check(self) -> None:
        if not self.sources:
            raise SpecError("no source: give files, folders, stdlib, or hf:NAME")
        if not 0 <= self.val_fraction < 1:
            raise SpecError(f"--val-fraction {self.val_fraction:g} is out of range: it must be at least 0, less than 1")
        if not 0 <= self.reading.metadata_dropout <= 1:
            raise SpecError(f"--metadata-dropout {self.reading.metadata_dropout:g} is out of range: it is a share")
        if min(self.shard_tokens, self.reading.part_bytes) < 1:
            raise SpecError(f"shard_tokens = {self.shard_tokens}, part_bytes = {self.reading.part_bytes}: at least 1")

    def fingerprint(self, parts: Sequence[Part]) -> str:
        reading: list[Any] = [self.reading.text_field, self.reading.glob, self.reading.separator]
        if self.reading.repositories:
            reading.append(self.reading.metadata_dropout)
        rules = [tokenizer_digest(self.tokenizer), self.eot, self.val_fraction, self.shard_tokens]
        text = json.dumps([VERSION, self.sources, fingerprint_of(parts), reading, rules])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Prepared:
    folder: Path
    index: Index
    up_to_date: bool  # it was, and nothing was done
    unreadable: tuple[str, ...] = ()  # files of a folder that are not UTF-8 text


def prepare(
    sources: Sequence[str],
    out: str | Path,
    tokenizer: str = "bytes",
    *,
    val_fraction: float = 0.05,
    workers: int = 0,
    progress: Progress = silent,
    reading: Reading = Reading(),
    eot: str = "",
    shard_tokens: int = SHARD_TOKENS,
) -> Prepared:
    """Tokenize `sources` into the folder `out`. `workers` = 0 means one a core; it never changes the result."""
    request = Request(tuple(sources), tokenizer, eot, val_fraction, reading, shard_tokens)
    request.check()
    if workers < 0:
        raise SpecError(f"--workers {workers} is out of range: it must be at least 0 (0: one a core)")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise SpecError(f"--out {out} is a file; name a folder for the data")
    check_writable(out, "--out")
    try:
        parts = [part for source in sources for part in parts_of(source, reading, out)]
        fingerprint = request.fingerprint(parts)
        with exclusive(out):
            index = up_to_date(out, fingerprint)
            if index:
                return Prepared(out, index, up_to_date=True)
            work = begin_work(out, f"{fingerprint[:16]}-{reading.part_bytes}")
            with worker_pool(min(workers or available_cores(), max(1, len(parts)))) as pool:
                token_file, end = resolve_tokenizer(pool, request, parts, work, progress)
                jobs = [Job(number, part, reading, token_file, end, work) for number, part in enumerate(parts)]
                encode(pool, jobs, progress)
            return finish(request, fingerprint, jobs, out, progress)
    except OSError as error:
        where = error.filename or out
        raise DataError(f"cannot prepare {out}: {where}: {error.strerror or error}; run again to continue") from None


def resolve_tokenizer(
    pool: Executor, request: Request, parts: list[Part], work: Path, progress: Progress
) -> tuple[str, int]:
    """('bytes' or a tokenizer.json in the work folder, end-of-text): the given one copied, or one trained now."""
    name = request.tokenizer
    if name == "bytes":
        return name, ByteTokenizer.eot
    path = work / TOKENIZER_FILE
    if not name.startswith("bpe:"):
        eot = read_tokenizer(Path(name), request.eot).eot
        write_whole(path, Path(name).read_bytes())
        return str(path), eot
    if not path.exists():
        progress("train tokenizer", 0, 0)
        # In the pool: training starts threads, and a process should not be forked after that.
        text = pool.submit(trained_bpe, parts, request.reading, request.val_fraction, name).result()
        write_whole(path, text.encode("utf-8"))
    return str(path), read_tokenizer(path).eot


def trained_bpe(parts: list[Part], reading: Reading, val_fraction: float, name: str) -> str:
    """Trained on the train split, or on an even sample of it where that is large."""
    texts: dict[bytes, str] = {}
    for part in parts:
        budget = BPE_SAMPLE_BYTES // len(parts)
        for document in documents_of(part, reading):
            if document.text.strip():
                texts[content_digest(document.text)] = document.text
            budget -= len(document.text)
            if budget <= 0:
                break
    val = held_out(as_digests(list(texts)), val_fraction)
    kept = [text for text, out in zip(texts.values(), val, strict=True) if not out]
    return train_bpe(kept, bpe_size(name), CODE_TOKENS if name.endswith(CODE) else ())


def encode(pool: Executor, jobs: list[Job], progress: Progress) -> None:
    waiting = [job for job in jobs if not job.done.exists()]
    done = len(jobs) - len(waiting)
    progress("tokenize", done, len(jobs))
    for _ in map_as_completed(pool, encode_part, waiting):
        done += 1
        progress("tokenize", done, len(jobs))


def finish(request: Request, fingerprint: str, jobs: list[Job], out: Path, progress: Progress) -> Prepared:
    encoded = [read_encoded(job) for job in jobs]
    read = sum(len(part.tokens) for part in encoded)
    unreadable = tuple(name for part in encoded for name in part.unreadable)
    if not read:
        raise DataError(no_text(request.sources, len(unreadable)))
    tokenizer = open_tokenizer(jobs[0].tokenizer, jobs[0].eot)
    dtype = dtype_for(tokenizer.vocab_size)
    result = begin_result(jobs[0].folder)
    splits = assemble(jobs, encoded, result, dtype, request.val_fraction, request.shard_tokens, progress)
    kept = sum(shard.documents for shards in splits.values() for shard in shards)
    if request.val_fraction and len(splits) < 2:
        raise DataError(
            f"{', '.join(request.sources)}: only one document, nothing can be held out; cut text files into documents "
            r"with --separator, e.g. '\n\n', or use --val-fraction 0"
        )
    given = b"bytes"
    if request.tokenizer != "bytes":
        given = Path(jobs[0].tokenizer).read_bytes()
        write_whole(result / TOKENIZER_FILE, given)
    index = Index(
        tokenizer=request.tokenizer if request.tokenizer.startswith("bpe:") else Path(request.tokenizer).name,
        tokenizer_sha256=hashlib.sha256(given).hexdigest(),
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        dtype=dtype.name,
        splits=splits,
        sources=request.sources,
        dropped={
            "duplicate": read - kept,
            "empty": sum(part.empty for part in encoded),
            "unreadable": len(unreadable),
        },
        fingerprint=fingerprint,
    )
    write_whole(result / INDEX_FILE, index.to_json().encode("utf-8"))
    swap_in(result, out)
    end_work(out)
    return Prepared(out, index, up_to_date=False, unreadable=unreadable)


def no_text(sources: Sequence[str], unreadable: int) -> str:
    why = f"{unreadable} files that are not UTF-8" if unreadable else "empty, or nothing but white space"
    return f"no text in {', '.join(sources)}: {why}"


# --- data.path of a spec ---------------------------------------------------------------------------------


def resolve(path: str, progress: Progress = silent) -> Path:
    """A prepared folder. `stdlib:TOKENIZER` is prepared on first use, by one of the processes that ask at once."""
    if not path:
        raise SpecError(NO_DATA)
    if path != "stdlib" and not path.startswith("stdlib:"):
        read_index(path)
        return Path(path)
    tokenizer = path.removeprefix("stdlib").removeprefix(":")
    if tokenizer.startswith("bpe:"):
        bpe_size(tokenizer)
    elif tokenizer != "bytes":
        raise SpecError(f"data.path = {path!r}: write stdlib:bytes, or stdlib:bpe:N, e.g. stdlib:bpe:4096")
    # Named by what it is made from, so that another Python or format has a folder of its own.
    folder = cache_root() / "data" / f"stdlib-{platform.python_version()}-{tokenizer.replace(':', '-')}-v{VERSION}"
    if not (folder / INDEX_FILE).exists():
        prepare(["stdlib"], folder, tokenizer, progress=progress)
    return folder


def check_vocabulary(spec: RunSpec, tokens: int) -> None:
    """A tokenizer with more tokens than the model has rows for; fewer are no harm."""
    if tokens > spec.model.vocab:
        raise SpecError(
            f"model.vocab = {spec.model.vocab} is less than the tokenizer's {tokens} tokens "
            f"({', '.join(spec.data.sources)}); use at least {tokens}"
        )
