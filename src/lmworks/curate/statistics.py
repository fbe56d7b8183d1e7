"""What a corpus holds, in numbers that add up over its parts: sizes, languages, domains, tokens."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..data.encode import open_tokenizer
from .documents import Document

MOST_DOMAINS = 1000  # that a part reports by name; the others are "other"
COUNTED = 2**16  # bytes at once
TOKENIZED = 16  # with a tokenizer: one of so many documents, by the hash of its name


class Statistics:
    """Of the documents of a part that are kept."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer
        self.documents = self.bytes = 0
        self.sizes: Counter[int] = Counter()  # documents by the power of two that their bytes reach
        self.languages: dict[str, list[int]] = {}  # documents, bytes
        self.domains: dict[str, list[int]] = {}
        self.tokens = np.zeros(256 if tokenizer == "bytes" else 0, np.int64)
        self.token_bytes = 0

    def add(self, document: Document, raw: bytes) -> None:
        """`raw`: its text in UTF-8."""
        size = len(raw)
        self.documents += 1
        self.bytes += size
        self.sizes[size.bit_length()] += 1
        for table, name in ((self.languages, language_of(document)), (self.domains, domain_of(document))):
            entry = table.setdefault(name, [0, 0])
            entry[0] += 1
            entry[1] += size
        if self.tokenizer == "bytes":
            for at in range(0, size, COUNTED):  # bincount makes 8 bytes of each
                self.tokens += np.bincount(np.frombuffer(raw, np.uint8, min(COUNTED, size - at), at), minlength=256)
            self.token_bytes += size
        elif zlib.crc32(document.id.encode()) % TOKENIZED == 0:
            ids = np.asarray(open_tokenizer(self.tokenizer, 0).encode(document.text), np.int64)
            counts = np.bincount(ids, minlength=len(self.tokens))
            counts[: len(self.tokens)] += self.tokens
            self.tokens = counts
            self.token_bytes += size

    def to_dict(self) -> dict[str, Any]:
        used = np.flatnonzero(self.tokens)
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "sizes": {str(power): count for power, count in sorted(self.sizes.items())},
            "languages": largest(self.languages),
            "domains": largest(self.domains),
            "tokens": {str(token): int(self.tokens[token]) for token in used},
            "token_bytes": self.token_bytes,
        }


def language_of(document: Document) -> str:
    return str(document.meta.get("language") or "unknown")


def domain_of(document: Document) -> str:
    """The host of its address, or else its first folder and kind of file."""
    url = document.meta.get("url")
    if isinstance(url, str) and "://" in url:
        try:
            return urlsplit(url).hostname or "unknown"
        except ValueError:
            return "unknown"
    path = PurePosixPath(str(document.meta.get("path") or document.meta.get("source") or ""))
    return path.suffix.lower() or path.name or "unknown"


def largest(table: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """By bytes; what is beyond the most that is listed is added up."""
    ordered = sorted(table.items(), key=lambda item: (-item[1][1], item[0]))
    rest = [entry for _, entry in ordered[MOST_DOMAINS:]]
    found = dict(ordered[:MOST_DOMAINS])
    if rest:
        before = found.get("other", [0, 0])
        found["other"] = [sum(entry[i] for entry in rest) + before[i] for i in (0, 1)]
    return found


def add_statistics(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    documents = size = token_bytes = 0
    sizes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    tables: dict[str, dict[str, list[int]]] = {"languages": {}, "domains": {}}
    for part in parts:
        documents += part["documents"]
        size += part["bytes"]
        token_bytes += part["token_bytes"]
        sizes.update(part["sizes"])
        tokens.update(part["tokens"])
        for name, table in tables.items():
            for key, entry in part[name].items():
                before = table.setdefault(key, [0, 0])
                table[key] = [before[0] + entry[0], before[1] + entry[1]]
    counted = sum(tokens.values())
    return {
        "documents": documents,
        "bytes": size,
        "mean_bytes": size / documents if documents else 0.0,
        "sizes": {
            f"< {2 ** int(power)}": count for power, count in sorted(sizes.items(), key=lambda item: int(item[0]))
        },
        **{name: largest(table) for name, table in tables.items()},
        "tokens": {
            "counted": counted,
            "different": len(tokens),
            "bytes_each": token_bytes / counted if counted else 0.0,
            "entropy_bits": entropy_bits(list(tokens.values())),
        },
    }


def entropy_bits(counts: list[int]) -> float:
    """Of the distribution of single tokens. Added up in a fixed order, exactly rounded: the same on every machine."""
    total = sum(counts)
    return math.fsum(-n / total * math.log2(n / total) for n in sorted(counts)) if total else 0.0
