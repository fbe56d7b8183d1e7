"""What stages did, counted: kept and dropped by reason, what was changed, and samples of what was dropped.

Counts of parts add up to those of the corpus, and samples are chosen by the hash of their documents' names, so neither
depends on how the corpus was cut.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLE_CHARACTERS = 400


@dataclass
class Tally:
    """Of one stage. `bytes` are those of the text in UTF-8."""

    samples: int
    kept: int = 0
    kept_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)  # what was changed in documents
    noted_documents: int = 0
    shown: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)  # reason: (hash, id, beginning)

    def note(self, notes: Mapping[str, int]) -> None:
        self.noted.update(notes)
        self.noted_documents += 1

    def drop(self, name: str, reason: str, size: int, text: str) -> None:
        self.dropped[reason] += 1
        self.dropped_bytes[reason] += size
        shown = self.shown.setdefault(reason, [])
        rank = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()
        if len(shown) < self.samples or (shown and rank < shown[-1][0]):
            shown.append((rank, name, text[:SAMPLE_CHARACTERS]))
            shown.sort()
            del shown[self.samples :]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kept": {"documents": self.kept, "bytes": self.kept_bytes},
            "dropped": {
                reason: {"documents": count, "bytes": self.dropped_bytes[reason]}
                for reason, count in sorted(self.dropped.items())
            },
            "changed": {"documents": self.noted_documents, **dict(sorted(self.noted.items()))},
            "samples": {reason: [list(one) for one in shown] for reason, shown in sorted(self.shown.items())},
        }


def add_tallies(tallies: Iterable[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """The sum of `to_dict` of the same stage over parts."""
    total = Tally(samples)
    for tally in tallies:
        total.kept += tally["kept"]["documents"]
        total.kept_bytes += tally["kept"]["bytes"]
        for reason, count in tally["dropped"].items():
            total.dropped[reason] += count["documents"]
            total.dropped_bytes[reason] += count["bytes"]
        total.noted_documents += tally["changed"]["documents"]
        total.noted.update({what: n for what, n in tally["changed"].items() if what != "documents"})
        for reason, shown in tally["samples"].items():
            total.shown[reason] = sorted([*total.shown.get(reason, []), *map(tuple, shown)])[:samples]
    return total.to_dict()
