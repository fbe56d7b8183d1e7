"""The prepared folder: `index.json` describes its files, and is written last.

    index.json         this file: tokenizer, number format, shards with sizes and checksums
    tokenizer.json     the tokenizer (absent for `bytes`)
    train-00000.bin    token ids, uint16 or uint32, little-endian; every document is followed by end-of-text
    train-00000.idx    where documents start in it, int64, and its length as the last entry

A folder without an index was not finished, however complete it looks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import DataError, NoSuchData
from ..spec.files import unsafe_name

VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
OFFSET_DTYPE = np.dtype("<i8")


@dataclass(frozen=True)
class Shard:
    """One pair of files. `text_bytes` is the UTF-8 length of the documents, for bytes per token."""

    name: str
    tokens: int
    documents: int
    text_bytes: int
    bytes: int
    sha256: str
    offsets_sha256: str

    @property
    def bin(self) -> str:
        return f"{self.name}.bin"

    @property
    def idx(self) -> str:
        return f"{self.name}.idx"


@dataclass(frozen=True)
class Index:
    tokenizer: str  # "bytes", "bpe:N", or the name of the tokenizer.json that was given
    tokenizer_sha256: str  # two folders may be mixed when these agree
    vocab_size: int
    eot: int
    dtype: str
    splits: dict[str, tuple[Shard, ...]]
    sources: tuple[str, ...]
    dropped: dict[str, int]  # documents that were read and dropped: duplicate, empty, unreadable
    fingerprint: str  # of everything that was asked for; see pipeline.py
    version: int = VERSION

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def digest(self) -> str:
        """Identifies the tokens themselves: equal digests give equal batches."""
        sums = [shard.sha256 + shard.offsets_sha256 for shards in self.splits.values() for shard in shards]
        return hashlib.sha256("".join([self.tokenizer_sha256, *sums]).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self.splits.get(split, ()))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def read_index(folder: str | Path) -> Index:
    folder = Path(folder)
    path = folder / INDEX_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NoSuchData(missing(folder)) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None
    found = raw.get("version") if isinstance(raw, dict) else None
    if found != VERSION:
        raise DataError(f"{path} has version {found!r}, this lmworks reads version {VERSION}; prepare the folder again")
    try:
        splits = {name: tuple(Shard(**shard) for shard in shards) for name, shards in raw["splits"].items()}
        index = Index(**{**raw, "splits": splits, "sources": tuple(raw["sources"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); prepare the folder again") from None
    for shard in (shard for shards in splits.values() for shard in shards):
        if why := unsafe_name(shard.name):
            raise DataError(f"{path} names a shard {shard.name!r:.80}: {why}; prepare the folder again")
    return index


def missing(folder: Path) -> str:
    command = f"lmworks data prepare SOURCE --tokenizer bytes --out {folder}"
    if not folder.exists():
        return f"no prepared data at {folder}; make it with: {command}"
    if not folder.is_dir():
        return f"{folder} is a file, not a folder of prepared data; make one with: {command}-tokens"
    return f"{folder / INDEX_FILE} is missing: preparing was not finished; run the same `lmworks data prepare` again"
