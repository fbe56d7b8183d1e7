"""What near-duplicates were found to be: clusters by size, and of the largest ones the kept document and some others.

Memory is that of one part: roots are looked up part by part, and clusters are counted by the part of their root.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .documents import Document
from .key_files import RECORDS, REPEAT, load_part, part_and_position, save_part

HEADS, REPORT = "heads.jsonl", "clusters.json"
HEAD_CHARACTERS = 300  # of each document, until the clusters are known
LARGEST, OTHERS = 10, 3  # clusters that are shown, and documents of each beside the kept one


class HeadWriter:
    """Name and beginning of each document of a part, a line each."""

    def __init__(self, into: Path) -> None:
        self.file: IO[bytes] = open(into / HEADS, "wb")  # noqa: SIM115

    def add(self, document: Document) -> None:
        self.file.write(msgspec.json.encode([document.id, document.text[:HEAD_CHARACTERS]]) + b"\n")

    def close(self) -> None:
        self.file.close()


def write_report(folder: Path, summaries: Sequence[Path]) -> None:
    """Of the repeats that `connected` left in `folder`."""
    parts = len(summaries)
    by_root(folder, parts)
    sizes: Counter[int] = Counter()
    largest: list[tuple[int, int]] = []  # (-size, root): of equal ones the first in the corpus
    for part in range(parts):
        roots, counts = cluster_sizes(bucket(folder, part))
        sizes.update((counts + 1).tolist())
        largest = sorted([*largest, *zip((-counts - 1).tolist(), roots.tolist(), strict=True)])[:LARGEST]
    shown = [shown_cluster(-size, root, folder, summaries) for size, root in largest]
    for part in range(parts):
        bucket(folder, part).unlink(missing_ok=True)
    report = {
        "clusters": sum(sizes.values()),
        "documents": sum(size * count for size, count in sizes.items()),
        "sizes": dict(by_power(sizes)),
        "largest": shown,
    }
    (folder / REPORT).write_text(json.dumps(report), encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any]:
    return {"clusters": json.loads((folder / REPORT).read_text(encoding="utf-8"))}


def by_power(sizes: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """2, 3–4, 5–8, 9–16, …"""
    table: Counter[int] = Counter()
    for size, count in sizes.items():
        table[(size - 1).bit_length()] += count
    for power, count in sorted(table.items()):
        low, high = 2 ** (power - 1) + 1, 2**power
        yield (f"{low}" if low == high else f"{low}-{high}"), count


def bucket(folder: Path, part: int) -> Path:
    return folder / f"members-{part:06d}.tmp"


def by_root(folder: Path, parts: int) -> None:
    """The first of each repeat becomes the first of its cluster; members are written down by the part of that one.

    `connected` names the first document that it knew of: one of the same group of parts is the cluster's first, one of
    a part before it may be a repeat itself, and was given its own first earlier in this loop.
    """
    for part in range(parts):
        pairs = load_part(folder, part)
        if not len(pairs):
            continue
        of, _ = part_and_position(pairs["first"])
        for other in np.unique(of[of < part]):
            known, here = load_part(folder, int(other)), np.flatnonzero(of == other)
            at = np.searchsorted(known["repeat"], pairs["first"][here])
            found = at < len(known)
            found[found] = known["repeat"][at[found]] == pairs["first"][here[found]]
            pairs["first"][here[found]] = known["first"][at[found]]
        save_part(folder, part, pairs)
        of, _ = part_and_position(pairs["first"])
        for root_part in np.unique(of):
            with open(bucket(folder, int(root_part)), "ab") as file:
                file.write(pairs[of == root_part].tobytes())


def chunks(path: Path) -> Iterator[NDArray]:
    size = path.stat().st_size if path.exists() else 0
    for at in range(0, size, RECORDS * REPEAT.itemsize):
        yield np.fromfile(path, REPEAT, RECORDS, offset=at)


def cluster_sizes(path: Path) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(roots, repeats of each)."""
    roots, counts = np.empty(0, np.uint64), np.empty(0, np.int64)
    for pairs in chunks(path):
        more, times = np.unique(pairs["first"], return_counts=True)
        roots, where = np.unique(np.concatenate([roots, more]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, times]), len(roots)).astype(np.int64)
    return roots, counts


def shown_cluster(size: int, root: int, folder: Path, summaries: Sequence[Path]) -> dict[str, Any]:
    members: list[int] = []
    for pairs in chunks(bucket(folder, root >> 32)):
        members += pairs["repeat"][pairs["first"] == root][: OTHERS - len(members)].tolist()
        if len(members) == OTHERS:
            break
    kept, *others = (head(address, summaries) for address in [root, *members])
    return {"size": size, "kept": kept, "others": others}


def head(address: int, summaries: Sequence[Path]) -> dict[str, str]:
    position = address & (2**32 - 1)
    with open(summaries[address >> 32] / HEADS, "rb") as lines:
        name, text = msgspec.json.decode(next(itertools.islice(lines, position, None)))
    return {"id": name, "text": text}
