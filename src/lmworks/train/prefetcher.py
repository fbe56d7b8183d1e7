"""The batches of a run one after another, from wherever its cursor stands, and on the device when they are needed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..data import Batch, Batches


class Prefetcher:
    """Reads ahead as long as the cursor moves by one; where it jumps, the stream is opened anew.

    On a GPU a batch goes through pinned memory on a stream of its own: `prefetch` the next one while the device
    computes, and neither the host nor the device waits for it in `take`.
    """

    def __init__(self, batches: Batches, workers: int, device: torch.device) -> None:
        self.batches, self.workers, self.device = batches, workers, device
        self.stream: Iterator[list[Batch]] = iter(())
        self.next = self.stop = 0  # the cursor that the stream gives next, and the one it ends before
        self.ready: dict[int, list[Batch] | Exception] = {}  # read ahead: by cursor, what came of it
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, cursor: int, ahead: int) -> list[Batch]:
        """The batch of `cursor`. `ahead`: how many the caller expects to take from there on."""
        if cursor not in self.ready:
            self.ready[cursor] = self.read(cursor, ahead)
        batches = self.ready[cursor]
        self.ready = {later: found for later, found in self.ready.items() if later > cursor}
        if isinstance(batches, Exception):
            raise batches
        return self.sync_stream(batches)

    def peek(self, cursor: int) -> list[Batch] | None:
        """The same batch that `take` will give; None where the stream does not go on to it, or it cannot be read."""
        self.prefetch(cursor)
        batches = self.ready.get(cursor)
        return None if batches is None or isinstance(batches, Exception) else self.sync_stream(batches)

    def sync_stream(self, batches: list[Batch]) -> list[Batch]:
        """Whatever is launched from here on finds them on the device."""
        if self.copy_stream is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(self.copy_stream)
            for batch in batches:
                batch.each(lambda tensor: record(tensor, here))
        return batches

    def prefetch(self, cursor: int) -> None:
        """Read the batch of `cursor` before it is asked for, where the stream goes on to it.

        What cannot be read is told by `take`: the step under way is none the worse for it.
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
        """End the processes that read ahead: they hold what this one held when they began, the run's lock too."""
        self.stream, self.ready = iter(()), {}


def record(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Its memory was allocated for the side stream, and must not be given away while this one reads it."""
    tensor.record_stream(stream)
    return tensor
