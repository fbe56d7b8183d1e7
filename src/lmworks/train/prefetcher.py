"""Prefetches the batches of a run from its cursor on, and copies them to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ..data import Batch
from ..data.loader import BatchSource


class BatchStream(Protocol):
    """Batches by cursor, as the training loop takes them."""

    def take(self, cursor: int, ahead: int) -> list[Batch]:
        """The batch of `cursor`. `ahead`: how many the caller expects to take from there."""
        ...

    def peek(self, cursor: int) -> list[Batch] | None:
        """The batch that `take` will return, if it is known already."""
        ...

    def prefetch(self, cursor: int) -> None:
        """Read the batch of `cursor` early, if that is possible."""

    def close(self) -> None: ...


class Prefetcher:
    """Reads ahead while the cursor advances by one; after a jump the stream is reopened.

    On a GPU a batch goes through pinned memory on a stream of its own: `prefetch` the next one while the device
    computes, and neither the host nor the device waits for it in `take`.
    """

    def __init__(self, batches: BatchSource, workers: int, device: torch.device) -> None:
        self.batches, self.workers, self.device = batches, workers, device
        self.stream: Iterator[list[Batch]] = iter(())
        self.next = self.stop = 0  # next cursor of the stream, and its end (exclusive)
        self.ready: dict[int, list[Batch] | Exception] = {}  # prefetched, by cursor
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, cursor: int, ahead: int) -> list[Batch]:
        """The batch of `cursor`. `ahead`: how many the caller expects to take from there."""
        if cursor not in self.ready:
            self.ready[cursor] = self.read(cursor, ahead)
        batches = self.ready[cursor]
        self.ready = {later: found for later, found in self.ready.items() if later > cursor}
        if isinstance(batches, Exception):
            raise batches
        return self.sync_stream(batches)

    def peek(self, cursor: int) -> list[Batch] | None:
        """The batch that `take` will return; None if it is not next in the stream, or cannot be read."""
        self.prefetch(cursor)
        batches = self.ready.get(cursor)
        return None if batches is None or isinstance(batches, Exception) else self.sync_stream(batches)

    def sync_stream(self, batches: list[Batch]) -> list[Batch]:
        """Make the current stream wait for their copy to the device."""
        if self.copy_stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.copy_stream)
            for batch in batches:
                batch.map_tensors(lambda tensor: record(tensor, here))
        return batches

    def prefetch(self, cursor: int) -> None:
        """Read the batch of `cursor` early, if it is next in the stream.

        An error is raised by `take`, not in the current step.
        """
        if cursor == self.next < self.stop:
            try:
                self.ready[cursor] = self.read(cursor, 0)
            except Exception as error:
                self.ready[cursor] = error

    def read(self, cursor: int, ahead: int) -> list[Batch]:
        if cursor != self.next or cursor >= self.stop:
            self.close()
            self.stop = cursor + ahead
            self.stream = self.batches.stream(cursor, self.stop, self.workers)
        self.next = -1  # until it is read
        batches = next(self.stream)
        self.next = cursor + 1
        if self.copy_stream is None:
            return batches
        with torch.cuda.stream(self.copy_stream):
            return [batch.pin_memory().to(self.device) for batch in batches]  # of pinned memory a view

    def close(self) -> None:
        """End the worker processes: they have inherited open files, the lock of the run too."""
        self.stream, self.ready = iter(()), {}


def record(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Its memory was allocated on the copy stream, and must not be reused while this stream reads it."""
    tensor.record_stream(stream)
    return tensor
