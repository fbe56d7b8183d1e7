"""Sums with a worked answer, the likelihood of documents, and a run's own held-out loss."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.sources import Reading, documents_of, parts_of
from ..problem import Problem
from .format import HELD_OUT, SCORE, Format, filled

if TYPE_CHECKING:
    from ..suite import Suite


def gsm8k(row: dict[str, Any], place: str, suite: Suite) -> Problem:
    return Problem(
        id=str(row.get("id") or place.rpartition(" ")[2]),
        prompt=filled(suite.prompt, f"Question: {row['question']}\nAnswer:", row),
        answer=str(row["answer"]),
    )


def documents(suite: Suite, limit: int) -> list[Problem]:
    """Any source that `lmworks data prepare` reads."""
    reading = Reading(text_field=suite.fields.get("text", "text"))
    parts = parts_of(suite.data, reading, Path("."))
    texts = (document.text for part in parts for document in documents_of(part, reading) if document.text)
    return [Problem(id=str(number), prompt=text) for number, text in enumerate(islice(texts, limit or None))]


GSM8K = Format(
    "question, answer with the number after ####",
    ("numeric",),
    ("question", "answer"),
    gsm8k,
    stop=("\nQuestion:",),
    gold=lambda row: f" {row['answer']}",
)
PERPLEXITY = Format("likelihood of documents (text)", ("bits_per_byte", "nll"), build=documents, task=SCORE)
LOSS = Format("a run's loss on its held-out data, as `lmworks eval` has it", ("nll",), task=HELD_OUT)
