"""The batch of a cursor.

A batch is a pure function of (seed, cursor), whatever the number of ranks and workers that read it, so the state
of the loader is one integer. Documents are concatenated in stored order; window w of a source is its tokens
[w·seq, w·seq + seq], one more than a sequence so that every token has a successor to predict. Sample number
cursor · global_batch + row belongs to one source of the mixture and is the k-th sample of it: position k mod windows
of that source's order in epoch k div windows (order.py). Every window comes once an epoch; a batch
may reach over the end of one. The last tokens of a source, fewer than a sequence, fill no window.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..spec.errors import DataError, SpecError
from ..spec.run import DataSpec
from .fim import FillInMiddle, Row
from .order import Mixture, key_of, permute
from .pipeline import resolve
from .progress import Progress, silent
from .store import PREPARE_AGAIN, TokenData
from .tokenizer import Tokenizer, load_tokenizer

PR_SET_PDEATHSIG = 1  # of Linux, <sys/prctl.h>
IGNORED = -100  # a target that is not counted; cross_entropy's own default


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # (micro_batch, seq) int64
    targets: Tensor  # (micro_batch, seq) int64: the next token, or -100
    documents: Tensor | None = None  # (micro_batch, seq) int64: 0, 1, … within a row; only with document_mask
    counted: int | None = None  # targets that are not -100, where they were counted when it was made
    extras: dict[str, Tensor] = field(default_factory=dict)  # other columns, of rows or tokens: label, margin …

    def count(self) -> int:
        """Targets that count; no device has to be asked where they were counted before."""
        return int((self.targets != IGNORED).sum()) if self.counted is None else self.counted

    def to(self, device: torch.device | str) -> Batch:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        documents = None if self.documents is None else change(self.documents)
        extras = {name: change(column) for name, column in self.extras.items()}
        return Batch(change(self.tokens), change(self.targets), documents, self.counted, extras)


@dataclass(frozen=True)
class Origin:
    """Where a row of a batch comes from."""

    source: str  # the prepared folder, or the file of examples
    window: int  # of that source
    documents: tuple[int, int]  # first and last of that split in it, counted from 0
    tokens: NDArray[np.int64]
    examples: tuple[str, ...] = ()  # file and line of each


class BatchSource(ABC):
    """The batches of one rank, each a function of (seed, cursor)."""

    seq: int
    micro_batch: int
    global_batch: int
    seed: int
    rank: int
    world: int
    shuffle: bool

    def set_sizes(self, data: DataSpec, seed: int, rank: int, world: int, shuffle: bool | None) -> None:
        self.seq, self.micro_batch = data.seq, data.micro_batch
        self.global_batch = data.global_batch or data.micro_batch * world
        self.seed, self.rank, self.world = seed, rank, world
        self.shuffle = data.shuffle if shuffle is None else shuffle
        if self.global_batch % (self.micro_batch * world):
            raise SpecError(
                f"data.global_batch = {self.global_batch} is not divisible by data.micro_batch × ranks = "
                f"{self.micro_batch} × {world}"
            )

    @abstractmethod
    def at(self, cursor: int) -> list[Batch]:
        """This rank's micro-batches for the optimizer step at `cursor`."""

    @abstractmethod
    def origins(self, samples: NDArray[np.int64]) -> list[Origin]:
        """Of rows by their number, counted over the whole run."""

    @property
    @abstractmethod
    def windows(self) -> int:
        """Rows of an epoch."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text behind a token that is trained: turns nats per token into bits per byte."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def digest(self) -> str:
        """Of the tokens themselves: a resumed run checks that its data are still the same."""

    def samples_at(self, cursor: int) -> NDArray[np.int64]:
        """Numbers of this rank's rows in the global batch at `cursor`."""
        mine = self.global_batch // self.world
        first = cursor * self.global_batch + self.rank * mine
        return np.arange(first, first + mine, dtype=np.int64)

    def batch_number(self, cursor: int) -> int:
        """Which global batch the step at `cursor` trains on."""
        return cursor

    def samples_of(self, number: int) -> NDArray[np.int64]:
        """Numbers of the rows of a global batch, whichever rank trains on them."""
        return np.arange(number * self.global_batch, (number + 1) * self.global_batch, dtype=np.int64)

    def held_out_batch(self, index: int) -> Batch:
        """Micro-batch number `index` of a split that is read once, in its order; the last one may be smaller."""
        (batch,) = self.at(index)
        batch.targets[max(0, self.windows - index * self.micro_batch) :] = IGNORED  # windows of the next epoch
        return replace(batch, counted=None)

    def stream(self, start: int, stop: int, workers: int = 0) -> Iterator[list[Batch]]:
        """`at(start)` … `at(stop - 1)`, read ahead by `workers` processes; their number changes nothing."""
        if not workers:
            for cursor in range(start, stop):
                yield self.at(cursor)
            return
        loader = torch.utils.data.DataLoader(
            Cursors(self),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            # Workers touch no device, so forking is safe, and importing torch again in each takes seconds.
            multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
            worker_init_fn=ignore_signals_in_worker,
            pin_memory=torch.cuda.is_available(),
            # Else the loader draws from the global generator, and dropout after a resume is not what it was.
            generator=torch.Generator(),
        )
        iterator = iter(loader)
        try:
            for batches in iterator:
                if isinstance(batches, DataError):
                    raise batches
                yield batches
        finally:
            end_workers(iterator)


class Batches(BatchSource):
    """Windows of prepared tokens."""

    def __init__(
        self,
        data: DataSpec,
        *,
        seed: int,
        split: str = "train",
        rank: int = 0,
        world: int = 1,
        shuffle: bool | None = None,
        progress: Progress = silent,
    ) -> None:
        self.set_sizes(data, seed, rank, world, shuffle)
        self.document_mask = data.document_mask
        self.mixture = Mixture.of(data.sources)
        self.sources = [TokenData.open(resolve(path, progress), split, verify=False) for path in data.sources]
        check_same_tokenizer(self.sources)
        for source in self.sources:
            source.verify_tokenizer()
        # Held-out loss is left to right, with and without infilling in training.
        train = data.fim.rate > 0 and split == "train"
        self.fim = FillInMiddle(data.fim, self.tokenizer, seed) if train else None
        self.source_windows = np.array([num_windows(source, self.seq) for source in self.sources])
        if data.verify:
            for source in self.sources:
                source.verify(rank, world)  # every shard is hashed by one rank, not by all

    def at(self, cursor: int) -> list[Batch]:
        samples = self.samples_at(cursor)
        return [self.batch_of(samples[i : i + self.micro_batch]) for i in range(0, len(samples), self.micro_batch)]

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, window of that source) of each sample."""
        sources, ordinals = self.mixture.locate(samples)
        counts = self.source_windows[sources]
        epochs, windows = np.divmod(ordinals, counts)
        if self.shuffle:
            for number in np.unique(sources):
                here = sources == number
                keys = key_of(self.seed, int(number), epochs[here])
                windows[here] = permute(windows[here], int(self.source_windows[number]), keys)
        return sources, windows

    def batch_of(self, samples: NDArray[np.int64]) -> Batch:
        rows = np.empty((len(samples), self.seq + 1), np.int64)
        begins = np.zeros(rows.shape, np.int64)  # 1 where a token is the first of a document, but for column 0
        padding = np.zeros(rows.shape, np.bool_)
        for at, (number, window, sample) in enumerate(zip(*self.locate(samples), samples, strict=True)):
            row = self.row_of(int(number), int(window), int(sample))
            rows[at] = row.tokens
            begins[at, row.starts] = 1
            padding[at, row.used :] = True
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if not self.document_mask and self.fim is None:
            return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
        targets[padding[:, 1:]] = IGNORED
        documents = None
        if self.document_mask:
            targets[begins[:, 1:] == 1] = IGNORED
            documents = torch.from_numpy(np.cumsum(begins[:, :-1], axis=1))
        counted = int((targets != IGNORED).sum())  # here, on the CPU: no synchronization
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), documents, counted)

    def row_of(self, number: int, window: int, sample: int) -> Row:
        """The row that is trained for a window of a source."""
        source, start = self.sources[number], window * self.seq
        tokens = np.asarray(source.read(start, start + self.seq + 1), np.int64)
        if tokens.max() >= source.index.vocab_size:
            check_token_ids(source, start, tokens)
        starts = np.empty(0, np.int64)
        if self.document_mask or self.fim is not None:
            starts = source.document_starts(start + 1, start + self.seq + 1) - start
        return self.fim.row(tokens, starts, sample) if self.fim else Row(tokens, starts, len(tokens))

    def origins(self, samples: NDArray[np.int64]) -> list[Origin]:
        found = []
        for number, window, sample in zip(*(one.tolist() for one in (*self.locate(samples), samples)), strict=True):
            source, start = self.sources[number], window * self.seq
            documents = (source.document_at(start), source.document_at(start + self.seq))
            found.append(Origin(str(source.folder), window, documents, self.row_of(number, window, sample).tokens))
        return found

    @property
    def windows(self) -> int:
        """Full windows of all sources."""
        return int(self.source_windows.sum())

    @property
    def vocab_size(self) -> int:
        sentinels = self.fim.sentinels.ids if self.fim else []
        return max(self.sources[0].index.vocab_size, *(token + 1 for token in sentinels), 0)

    @property
    def bytes_per_token(self) -> float:
        """End-of-text included."""
        shards = [shard for source in self.sources for shard in source.shards]
        return sum(shard.text_bytes for shard in shards) / sum(shard.tokens for shard in shards)

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.sources[0].folder)

    @property
    def digest(self) -> str:
        return "+".join(source.index.digest for source in self.sources)


class Cursors(torch.utils.data.Dataset[list[Batch] | DataError]):
    """The map-style dataset that DataLoader needs. A DataError is returned, not raised: DataLoader would put the
    worker's traceback into its text."""

    def __init__(self, batches: BatchSource) -> None:
        self.batches = batches

    def __getitem__(self, cursor: int) -> list[Batch] | DataError:
        try:
            return self.batches.at(cursor)
        except DataError as error:
            return error


def end_workers(iterator: Any) -> None:
    """The loader asks its workers to end; one that is stopped (SIGSTOP) must be killed."""
    if hasattr(iterator, "_workers"):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()


def check_token_ids(source: TokenData, start: int, tokens: NDArray[np.int64]) -> None:
    first = int((tokens >= source.index.vocab_size).argmax())
    raise DataError(
        f"{source.place(start + first)}: token id {int(tokens[first]):,} is not below the vocabulary's size of "
        f"{source.index.vocab_size:,}; {PREPARE_AGAIN}"
    )


def ignore_signals_in_worker(worker: int) -> None:
    """Ctrl-C, or a batch system's SIGTERM, reaches workers too, but the training process ends its step with them.

    A second SIGTERM takes effect.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def die_with_parent() -> None:
    """By the kernel (Linux), since a stopped worker cannot check whether its parent lives."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def num_windows(source: TokenData, seq: int) -> int:
    count = (len(source) - 1) // seq
    if count < 1:
        raise DataError(
            f"{source.folder}: the {source.split} split has {len(source)} tokens, fewer than one window of "
            f"data.seq + 1 = {seq + 1}; use data.seq of at most {max(1, len(source) - 1)} or more data"
        )
    return count


def check_same_tokenizer(sources: list[TokenData]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.index.tokenizer_sha256 != first.index.tokenizer_sha256:
            raise DataError(
                f"data.mix: {first.folder} has the tokenizer {first.index.tokenizer} and {other.folder} another one, "
                f"{other.index.tokenizer}; prepare both with --tokenizer {first.folder / 'tokenizer.json'}"
            )
