"""What happens to blocks of the prefix cache, for those who keep track of it: other tiers of the cache, a router.
And what the scheduler asks of the tiers.

A listener is called in the engine's thread while a step is scheduled, so it must only note what it is told. A stored
block has its content once the step that is being scheduled has run; the content of an evicted one stays intact until
the next step is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


class PrefixTiers(BlockListener, Protocol):
    """Blocks of the prefix cache outside the device (`engine.kv_tiers`), as the engine uses them."""

    fingerprint: bytes  # of what computes the blocks

    @property
    def address(self) -> str:
        """Where other servers read these blocks; empty: nowhere."""
        ...

    def begin_fetch(self, sequence: Sequence, digests: list[bytes], on_device: int) -> None:
        """Bring its blocks nearer, in the background. The device has the first of them."""
        ...

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether it is worth to wait with its admission."""
        ...

    def wait(self, seconds: float) -> None:
        """Until a fetch is over."""
        ...

    def load(self, sequence: Sequence, digests: list[bytes], blocks: list[int]) -> int:
        """Have these blocks filled before the next step, up to the first that is not at hand; returns how many."""
        ...

    def end_fetch(self, sequence: Sequence) -> None:
        """It needs nothing any more."""
        ...

    def add_adapter(self, name: str, digest: bytes) -> None:
        """From now on it is this one; `digest` is of its files."""
        ...

    def before_launch(self) -> None: ...
    def after_launch(self) -> None: ...
    def report(self) -> TierReport: ...

    def settle(self) -> None:
        """Wait for copies: the memory of the device's cache is released next."""
        ...

    def clear(self) -> None:
        """Forget all blocks but those that other servers use, too."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TierReport:
    """For the metrics. Blocks by tier; errors by what went wrong."""

    hits: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    bytes_used: dict[str, int] = field(default_factory=dict)
