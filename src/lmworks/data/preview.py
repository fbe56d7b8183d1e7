"""Examples as a model would be trained on them: rendered, with the trained tokens apart from the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec.align import CONVERSATIONS, PREFERENCES, PROMPTS, UNPAIRED
from ..spec.errors import DataError
from ..spec.run import DataSpec
from .chat_tokenizer import BYTES, ChatTokenizer
from .encode_examples import chunks_of, example_files, records_of
from .example_split import ExampleSplit, ExamplesReport, open_split
from .progress import Progress, silent
from .tokenizer import END_OF_TEXT, ByteTokenizer

ANY_LENGTH = 2**40


@dataclass(frozen=True)
class Part:
    """Consecutive tokens, all trained or none."""

    text: str
    tokens: int
    trained: bool


@dataclass(frozen=True)
class PreviewedExample:
    place: str
    sequences: tuple[tuple[Part, ...], ...]  # one; of a pair the chosen and the rejected


@dataclass(frozen=True)
class Preview:
    kind: str
    examples: tuple[PreviewedExample, ...]
    report: ExamplesReport


def preview(
    path: str,
    model: str,
    *,
    kind: str = "",
    chat_template: str = "",
    seq: int = 0,
    count: int = 3,
    line: int = 0,
    progress: Progress = silent,
) -> Preview:
    """The first `count` examples of a file, or those of one line. `model`: a Hugging Face or run folder, or 'bytes'."""
    data = DataSpec(
        kind=kind or detect_kind(path),
        path=path,
        tokenizer=BYTES if model == BYTES else "",
        chat_template=chat_template,
        seq=seq or ANY_LENGTH,
        val_fraction=0.0,
        bad_examples="skip",
        overlong="skip",
    )
    split = open_split(data, "" if model == BYTES else model, progress=progress)
    lines = split.examples.places[split.numbers, 1]
    chosen = np.flatnonzero(lines == line) if line else np.arange(min(count, len(split)))
    if not len(chosen):
        raise DataError(f"{path}: no usable example on line {line}")
    return Preview(data.kind, tuple(previewed(split, int(index)) for index in chosen), split.report)


def previewed(split: ExampleSplit, index: int) -> PreviewedExample:
    sequences = (split.sequence(index, which) for which in range(split.examples.width))
    return PreviewedExample(split.place(index), tuple(parts_of(split.chat, *one) for one in sequences))


def parts_of(chat: ChatTokenizer, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> tuple[Part, ...]:
    parts = []
    for is_trained, group in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        run = [token for token, _ in group]
        parts.append(Part(text_of(chat, run), len(run), is_trained))
    return tuple(parts)


def text_of(chat: ChatTokenizer, ids: list[int]) -> str:
    """With special tokens by name."""
    if chat.inner is not None:
        text: str = chat.inner.decode(ids, skip_special_tokens=False)
        return text
    names = (END_OF_TEXT.encode() if token == ByteTokenizer.eot else bytes([token]) for token in ids)
    return b"".join(names).decode("utf-8", errors="replace")


def detect_kind(path: str) -> str:
    """From the columns of the first record."""
    for number, file in enumerate(example_files(path)):
        for chunk in chunks_of(number, file):
            for _, record in records_of(chunk):
                if isinstance(record, dict):
                    return kind_of(record)
    raise DataError(f"{path}: no record with columns")


def kind_of(record: dict[str, Any]) -> str:
    if "chosen" in record or "rejected" in record:
        return PREFERENCES
    if "label" in record and "completion" in record:
        return UNPAIRED
    return PROMPTS if "prompt" in record and "completion" not in record else CONVERSATIONS
