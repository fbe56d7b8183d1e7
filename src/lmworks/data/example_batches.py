"""Batches of post-training examples: packed conversations, pairs, labelled answers; and prompts for rollouts.

Rows of a split are packed once; row number cursor · global_batch + r of a run is row (number mod rows) of an order that
is drawn anew in every epoch, so a batch is a function of (seed, cursor) at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..spec.align import CONVERSATIONS, PROMPTS, UNPAIRED
from ..spec.errors import SpecError
from ..spec.run import DataSpec
from .example_split import ExampleSplit, ExamplesReport, open_split
from .examples import Text
from .loader import IGNORED, Batch, BatchSource, Origin
from .order import key_of, permute
from .packing import pack
from .progress import Progress, silent
from .tokenizer import Tokenizer

PAD_TO = 64  # rows of pairs and labelled answers are padded to a multiple of it

Marked = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids, and which are trained


class ExampleRows(BatchSource):
    """Rows of a split: one example each, or several where they are packed."""

    def __init__(
        self,
        data: DataSpec,
        init: str = "",
        *,
        seed: int,
        split: str = "train",
        rank: int = 0,
        world: int = 1,
        shuffle: bool | None = None,
        progress: Progress = silent,
    ) -> None:
        """`init`: checkpoint.init of the run, whose tokenizer is used where data.tokenizer names none."""
        self.set_sizes(data, seed, rank, world, shuffle)
        self.kind = data.kind
        self.check()
        self.split: ExampleSplit = open_split(data, init, split, progress)
        self.packed = data.kind == CONVERSATIONS and data.packing
        if self.packed:
            self.rows = [np.sort(row) for row in pack(self.split.lengths()[:, 0].tolist(), self.seq)]
        else:
            self.rows = list(np.arange(len(self.split))[:, None])

    def check(self) -> None:
        """Raise where the spec does not fit."""

    def locate(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The examples of each row."""
        epochs, rows = np.divmod(samples, len(self.rows))
        if self.shuffle:
            rows = permute(rows, len(self.rows), key_of(self.seed, 0, epochs))
        return [self.rows[row] for row in rows.tolist()]

    def origins(self, samples: NDArray[np.int64]) -> list[Origin]:
        found = []
        for row in self.locate(samples):
            tokens = [self.split.sequence(one, which)[0] for one in row for which in range(self.split.examples.width)]
            places = tuple(self.split.place(one) for one in row)
            numbers = (int(row.min()), int(row.max()))
            file = places[0].rsplit(" ", 2)[0]
            found.append(Origin(file, int(row[0]), numbers, np.concatenate(tokens).astype(np.int64), places))
        return found

    @property
    def windows(self) -> int:
        """Rows of the split."""
        return len(self.rows)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        return self.split.chat.tokenizer

    @property
    def bytes_per_token(self) -> float:
        examples = self.split.examples
        return examples.trained_bytes / max(1, int(examples.trained.sum()))

    @property
    def digest(self) -> str:
        return self.split.examples.digest

    @property
    def report(self) -> ExamplesReport:
        positions = len(self.rows) * self.split.examples.width * self.seq
        return replace(
            self.split.report, rows=len(self.rows), fill=round(float(self.split.lengths().sum()) / positions, 4)
        )


class ExampleBatches(ExampleRows):
    """Conversations, pairs or labelled answers as micro-batches.

    conversations   rows of seq tokens: packed examples with document ids, or one example each
    preferences     the chosen answers of micro_batch pairs, then the rejected ones; extras: margin, where all have one
    unpaired        micro_batch answers, then each prompt with the completion of the next example of the global batch,
                    for KTO's estimate of the KL divergence; extras: label, of the first half
    """

    def check(self) -> None:
        if self.kind == PROMPTS:
            raise SpecError("data.kind = 'prompts': prompts have no answers to train on (PromptBatches reads them)")

    def at(self, cursor: int) -> list[Batch]:
        samples, first = self.samples_at(cursor), cursor * self.global_batch
        return [
            self.make(samples[i : i + self.micro_batch], first, self.global_batch)
            for i in range(0, len(samples), self.micro_batch)
        ]

    def held_out_batch(self, index: int) -> Batch:
        first = index * self.micro_batch
        return self.make(np.arange(first, min(first + self.micro_batch, self.windows)), 0, self.windows)

    def make(self, samples: NDArray[np.int64], first: int, count: int) -> Batch:
        """A micro-batch of the `count` rows of a global batch, or of a held-out split, from number `first` on."""
        rows = self.locate(samples)
        if self.kind == UNPAIRED:
            return self.labelled(rows, self.locate(first + (samples - first + 1) % count))
        return self.conversations(rows) if self.kind == CONVERSATIONS else self.pairs(rows)

    def conversations(self, rows: Sequence[NDArray[np.int64]]) -> Batch:
        batch = self.pad([[self.split.sequence(one) for one in row] for row in rows], self.seq)
        return batch if self.packed else Batch(batch.tokens, batch.targets, None, batch.counted)

    def pairs(self, rows: Sequence[NDArray[np.int64]]) -> Batch:
        examples = [int(row[0]) for row in rows]
        batch = self.one_a_row([self.split.sequence(one, which) for which in (0, 1) for one in examples])
        margins = self.split.examples.margins
        if not np.isnan(margins).any():
            batch.extras["margin"] = torch.tensor(margins[self.split.numbers[examples]], dtype=torch.float32)
        return batch

    def labelled(self, rows: Sequence[NDArray[np.int64]], next_rows: Sequence[NDArray[np.int64]]) -> Batch:
        examples, following = ([int(row[0]) for row in some] for some in (rows, next_rows))
        own, next_ones = ([self.split.sequence(one) for one in some] for some in (examples, following))
        others = [swapped(one, other, self.seq) for one, other in zip(own, next_ones, strict=True)]
        batch = self.one_a_row([*own, *others])
        batch.extras["label"] = torch.tensor(self.split.examples.labels[self.split.numbers[examples]])
        return batch

    def one_a_row(self, sequences: Sequence[Marked]) -> Batch:
        longest = max(len(ids) for ids, _ in sequences)
        batch = self.pad([[one] for one in sequences], min(self.seq, -(-longest // PAD_TO) * PAD_TO))
        return Batch(batch.tokens, batch.targets, None, batch.counted)

    def pad(self, rows: Sequence[Sequence[Marked]], size: int) -> Batch:
        """Rows of `size` tokens, padded on the right; what follows the last example is a document of its own."""
        tokens = np.full((len(rows), size), self.tokenizer.eot, np.int64)
        targets = np.full((len(rows), size), IGNORED, np.int64)
        documents = np.zeros((len(rows), size), np.int64)
        for row, sequences in enumerate(rows):
            place = 0
            for number, (ids, trained) in enumerate(sequences):
                end = place + len(ids)
                tokens[row, place:end] = ids
                targets[row, place : end - 1] = np.where(trained[1:], ids[1:], IGNORED)
                documents[row, place:] = number
                place = end
            documents[row, place:] = len(sequences)
        counted = int((targets != IGNORED).sum())
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(documents), counted)


def swapped(one: Marked, other: Marked, seq: int) -> Marked:
    """The prompt of one with the completion of the other, cut to `seq` tokens."""
    prompt, completion = int(one[1].argmax()), int(other[1].argmax())
    ids, trained = (np.concatenate([a[:prompt], b[completion:]])[:seq] for a, b in zip(one, other, strict=True))
    return ids, trained


# --- prompts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptExample:
    """A prompt for rollouts."""

    ids: list[int]
    prompt: Text  # as the file has it: a text, or messages
    columns: dict[str, Any]  # all others, for the rewards
    place: str  # file and line


class PromptBatches(ExampleRows):
    """Prompts, global_batch of them in a draw; a round trains on the answers to those of one draw or several."""

    steps_per_round = draws_per_round = 1
    in_flight = 0  # further prompts whose answers are sampled in a round, with partial rollouts

    def at(self, cursor: int) -> list[Batch]:
        raise SpecError("prompts have no answers yet: `examples` gives those of a draw")

    def batch_number(self, cursor: int) -> int:
        """The round."""
        return cursor // self.steps_per_round

    def samples_of(self, number: int) -> NDArray[np.int64]:
        """All prompts that a round may draw; an answer that takes several rounds may be to an earlier one."""
        count = self.draws_per_round * self.global_batch
        return np.arange(number * count, (number + 1) * count + self.in_flight, dtype=np.int64)

    def examples(self, draw: int) -> list[PromptExample]:
        """This rank's prompts of a draw."""
        return self.numbered(self.samples_at(draw))

    def numbered(self, samples: NDArray[np.int64]) -> list[PromptExample]:
        """By their numbers in the order of a run, in which a draw begins with draw · global_batch."""
        return [self.example(int(row[0])) for row in self.locate(samples)]

    def example(self, index: int) -> PromptExample:
        record = dict(self.split.examples.records[int(self.split.numbers[index])])
        ids = self.split.sequence(index)[0].tolist()
        return PromptExample(ids, record.pop("prompt"), record, self.split.place(index))
