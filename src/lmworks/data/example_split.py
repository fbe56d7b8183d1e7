"""The usable examples of a split: what is left out and why, what is too long, what is held out."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.align import PREFERENCES, PROMPTS
from ..spec.errors import DataError, SpecError
from ..spec.run import DataSpec
from .assemble import held_out
from .chat_tokenizer import ChatTokenizer
from .encode_examples import ExampleSet, load_examples, place_name
from .progress import Progress, silent

MAX_LISTED = 3  # bad examples that an error or event lists
OVERLONG = "over-long"


@dataclass(frozen=True)
class ExamplesReport:
    """What became of the records of a file: an event of the run."""

    path: str
    examples: int  # used, of both splits
    tokens: int
    trained_tokens: int
    truncated: int
    split_conversations: int  # that became several examples, since the template shows earlier turns in another way
    left_out: dict[str, int]  # by reason
    first_left_out: tuple[str, ...]
    rows: int = 0  # of the split that is trained on
    fill: float = 0.0  # share of their positions that hold a token of an example

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ExampleSplit:
    """Examples of one split, in the order of the files."""

    examples: ExampleSet
    numbers: NDArray[np.int64]  # of the examples that belong to the split
    chat: ChatTokenizer
    seq: int
    report: ExamplesReport

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> NDArray[np.int64]:
        """(examples, sequences of each) tokens, at most seq."""
        return np.minimum(self.examples.lengths[self.numbers], self.seq)

    def sequence(self, index: int, which: int = 0) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        ids, trained = self.examples.sequence(int(self.numbers[index]), which)
        return ids[: self.seq], trained[: self.seq]

    def place(self, index: int) -> str:
        return self.examples.place(int(self.numbers[index]))


def open_split(data: DataSpec, init: str, split: str = "train", progress: Progress = silent) -> ExampleSplit:
    chat = ChatTokenizer.open(data, init)
    if split == "val" and data.val_path:
        examples = load_examples(data.val_path, data, init, chat=chat, progress=progress)
        kept, report = usable(examples, data, data.val_path)
        return ExampleSplit(examples, kept, chat, data.seq, report)
    examples = load_examples(data.path, data, init, chat=chat, progress=progress)
    kept, report = usable(examples, data, data.path)
    out = np.zeros(len(kept), np.bool_)
    if not data.val_path:
        out = held_out(np.asarray(examples.digests)[kept], data.val_fraction)
    chosen = kept[out if split == "val" else ~out]
    if not len(chosen):
        raise DataError(
            f"{data.path}: {len(kept)} examples leave none to hold out (data.val_fraction = {data.val_fraction:g}); "
            "name held-out examples with data.val_path"
            if split == "val"
            else f"{data.path}: no example is left to train on"
        )
    return ExampleSplit(examples, chosen, chat, data.seq, report)


def usable(examples: ExampleSet, data: DataSpec, path: str) -> tuple[NDArray[np.int64], ExamplesReport]:
    """Numbers of the examples to use; DataError where others are refused."""
    bad = [(place_name(examples.files[one.file], one.line), one.reason, one.detail) for one in examples.bad]
    lengths = examples.lengths.max(axis=1, initial=0)
    limit = data.seq - 1 if data.kind == PROMPTS else data.seq  # an answer needs room
    long = np.flatnonzero(lengths > limit)
    keep = np.ones(len(examples), np.bool_)
    truncated = 0
    if len(long) and data.overlong == "truncate" and data.kind == PROMPTS:
        raise SpecError("data.overlong = 'truncate' would cut the end of prompts; use 'refuse' or 'skip'")
    for number in long.tolist():
        why = f"{lengths[number]:,} tokens, more than {limit:,}"
        if data.overlong == "truncate":
            why = cut_reason(examples, number, data.seq)
            truncated += not why
        if data.overlong != "truncate" or why:
            keep[number] = False
            bad.append((examples.place(number), OVERLONG, why))
    refuse_long, refuse_bad = data.overlong == "refuse", data.bad_examples == "refuse"
    if refused := [one for one in bad if (refuse_long if one[1] == OVERLONG else refuse_bad)]:
        raise DataError(refusal(refused, len(examples) + len(examples.bad), path))
    kept = np.flatnonzero(keep)
    if not len(kept):
        raise DataError(f"{path}: {f'no example can be used: {listed(bad)}' if bad else 'there are no examples in it'}")
    lengths_kept = np.minimum(examples.lengths[kept], data.seq)
    report = ExamplesReport(
        path=path,
        examples=len(kept),
        tokens=int(lengths_kept.sum()),
        trained_tokens=trained_tokens(examples, kept, data.seq),
        truncated=truncated,
        split_conversations=examples.split,
        left_out=dict(Counter(reason for _, reason, _ in bad)),
        first_left_out=tuple(f"{place}: {reason}: {detail}" for place, reason, detail in bad[:MAX_LISTED]),
    )
    return kept, report


def cut_reason(examples: ExampleSet, number: int, seq: int) -> str:
    """Why an example cannot be cut to `seq` tokens; empty where it can."""
    parts = [examples.sequence(number, which) for which in range(examples.width)]
    if not all(trained[:seq].any() for _, trained in parts):
        return f"its first {seq:,} tokens have none that is trained"
    if examples.kind == PREFERENCES and np.array_equal(parts[0][0][:seq], parts[1][0][:seq]):
        return f"the first {seq:,} tokens of the pair are equal"
    return ""


def trained_tokens(examples: ExampleSet, kept: NDArray[np.int64], seq: int) -> int:
    if len(kept) == len(examples) and examples.lengths.max(initial=0) <= seq:
        return int(examples.trained.sum())
    sequences = (examples.sequence(int(number), which) for number in kept for which in range(examples.width))
    return sum(int(trained[:seq].sum()) for _, trained in sequences)


def refusal(bad: list[tuple[str, str, str]], total: int, path: str) -> str:
    counts = Counter(reason for _, reason, _ in bad)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    keys = ["data.bad_examples = 'skip'"] if set(counts) - {OVERLONG} else []
    keys += ["a larger data.seq, or data.overlong = 'skip' or 'truncate',"] if OVERLONG in counts else []
    said = f"{path}: {len(bad):,} of {total:,} examples cannot be used ({reasons}): {listed(bad)}"
    if len(bad) == total and OVERLONG not in counts:  # to skip them would leave none
        return said
    return f"{said}; {' and '.join(keys)} would let the run start"


def listed(bad: list[tuple[str, str, str]]) -> str:
    """The first few, with one word for lines of which the same is wrong: 'a.jsonl line 1, line 2: no column …'."""
    said = []
    for detail, group in itertools.groupby(bad[:MAX_LISTED], key=lambda one: one[2]):
        first, *others = (place for place, _, _ in group)
        file = first.rsplit(" ", 2)[0]
        said.append(", ".join([first, *(place.removeprefix(f"{file} ") for place in others)]) + f": {detail}")
    more = f"; and {len(bad) - MAX_LISTED:,} more" if len(bad) > MAX_LISTED else ""
    return "; ".join(said) + more
