"""Made-up documents, short enough that most training sequences hold the end of one: document masks have work to do."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ..data import prepare

WORDS = ("def", "return", "for", "in", "x", "y", "if", "not", "self", "import")


def write_corpus(root: Path, documents: int = 1000) -> Path:
    """A folder of tokens (bytes), the same each time."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(documents))
    source = root / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return prepare([str(source)], root / "tokens", workers=1).folder
