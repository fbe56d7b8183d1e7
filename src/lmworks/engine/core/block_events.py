"""What happens to blocks of the prefix cache, for those who keep track of it: other tiers of the cache, a router.

A listener is called in the engine's thread while a step is scheduled, so it must only note what it is told. A stored
block has its content once the step that is being scheduled has run; the content of an evicted one stays intact until
the next step is launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .request import Sequence


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive full blocks of a sequence that are cached from now on, and were not before."""

    sequence: Sequence
    first: int  # index of the first of them in the sequence
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    block_size: int

    @property
    def parent_hash(self) -> bytes | None:
        """Hash of the block before them."""
        return self.sequence.hashes[self.first - 1] if self.first else None

    @property
    def token_ids(self) -> list[int]:
        begin = self.first * self.block_size
        return self.sequence.tokens[begin : begin + len(self.blocks) * self.block_size]


class BlockListener(Protocol):
    def stored(self, event: StoredBlocks) -> None: ...

    def evicted(self, block: int, digest: bytes) -> None:
        """Its memory is reused for other tokens."""
        ...

    def corrupted(self, digest: bytes) -> None:
        """It is cached no more, and its content must not be used anywhere."""
        ...

    def cleared(self) -> None:
        """No block is cached any more."""
        ...
