"""The batches of a run one after another, from wherever its cursor stands."""

from __future__ import annotations

from collections.abc import Iterator

from ..data import Batch, Batches


class Feed:
    """Reads ahead as long as the cursor moves by one; where it jumps, the stream is opened anew."""

    def __init__(self, batches: Batches, workers: int) -> None:
        self.batches, self.workers = batches, workers
        self.stream: Iterator[list[Batch]] = iter(())
        self.next = self.stop = 0  # the cursor that the stream gives next, and the one it ends before

    def take(self, cursor: int, ahead: int) -> list[Batch]:
        """The batch of `cursor`. `ahead`: how many the caller expects to take from there on."""
        if cursor != self.next or cursor >= self.stop:
            self.close()
            self.stop = cursor + ahead
            self.stream = self.batches.stream(cursor, self.stop, self.workers)
        self.next = cursor + 1
        return next(self.stream)

    def close(self) -> None:
        """End the processes that read ahead: they hold what this one held when they began, the run's lock too."""
        self.stream = iter(())
