"""Documents, and what datatrove decides about them: `python tests/curate/datatrove_decisions.py` writes both to
datatrove.json.gz, in an environment that has datatrove (make test-datatrove). The documents are pages and sources of
this repository, cut and spoilt so that every rule has some to drop.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

FILE = Path(__file__).parent / "datatrove.json.gz"
ROOT = Path(__file__).parents[2]
STAGES = ("gopher_quality", "gopher_repetition", "c4", "c4_paragraphs", "fineweb")


def oracle() -> dict[str, Callable[[str], tuple[str, str]]]:
    """Stage → text → (reason of the drop or "", text that is kept)."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4ParagraphFilter,
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = {
        "gopher_quality": GopherQualityFilter(),
        "gopher_repetition": GopherRepetitionFilter(),
        "c4": C4QualityFilter(),
        "c4_paragraphs": C4ParagraphFilter(),
        "fineweb": FineWebQualityFilter(),
    }

    def decide(name: str) -> Callable[[str], tuple[str, str]]:
        def call(text: str) -> tuple[str, str]:
            document = Document(text=text, id="0")
            result = filters[name].filter(document)
            return ("", document.text) if result is True else (result[1], "")

        return call

    return {name: decide(name) for name in filters}


def spoilt(text: str, rng: random.Random) -> list[str]:
    """The text, and what is wrong with it in ways that rules look for."""
    lines = text.split("\n")
    words = text.split()
    some = rng.sample(lines, min(3, len(lines)))
    return [
        text,
        " ".join(words[: rng.randint(20, 70)]),
        "\n".join(line + "..." if rng.random() < 0.4 else line for line in lines),
        "\n".join("- " + line if rng.random() < 0.95 else line for line in lines),
        "\n".join(lines + some * rng.randint(1, 6)),
        "\n\n".join([text] + some * rng.randint(1, 4)),
        " ".join(word + "#" if rng.random() < 0.12 else word for word in words),
        " ".join(words) + " " + " ".join(words[:12] * rng.randint(1, 8)),
        ".\n".join(" ".join(words[i : i + 4]) for i in range(0, len(words), 4)),
        ".\n\n\n\n\n".join(" ".join(words[i : i + 8]) for i in range(0, len(words), 8)),
        " ".join("x" * rng.randint(8, 14) if rng.random() < 0.6 else word for word in words) + " the and",
        " ".join(str(rng.randint(0, 999)) if rng.random() < 0.25 else word for word in words),
        ". ".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)) + ".",
        text.replace("{", "(").replace("\n", ".\n")
        + "\nLorem ipsum dolor sit amet, and all of that." * rng.randint(0, 1),
        " ".join(words) + " very well" * rng.randint(1, len(words) // 2 + 2),
        text.replace(" the ", " le ").replace(" and ", " et ").replace(" to ", " à ").replace(" of ", " de "),
    ]


def made_documents(count: int = 480) -> list[str]:
    rng = random.Random(23)
    pages, sources = sorted(ROOT.glob("docs/*.md")), sorted(ROOT.glob("src/lmworks/*/*.py"))
    texts = []
    for number in range(count // 16):
        text = rng.choice(sources if number % 4 == 0 else pages).read_text(encoding="utf-8")
        lines = text.split("\n") if number % 4 == 0 else prose(text)
        start = rng.randrange(max(1, len(lines) - 12))
        texts += spoilt("\n".join(lines[start : start + rng.randint(4, 24)]), rng)
    return texts


def prose(page: str) -> list[str]:
    """The paragraphs of a page that are no tables, headings, lists or commands, each in one line."""
    page = page.replace("`", "").replace("**", "")
    paragraphs = [" ".join(paragraph.split("\n")) for paragraph in page.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph[:1].isalpha()]


def decisions(texts: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    return {name: [decide(text) for text in texts] for name, decide in oracle().items()}


if __name__ == "__main__":
    texts = made_documents()
    found = {name: [reason for reason, _ in made] for name, made in decisions(texts).items()}
    raw = json.dumps({"datatrove": "0.10.1", "texts": texts, "decisions": found}, ensure_ascii=False).encode()
    FILE.write_bytes(gzip.compress(raw, 9, mtime=0))
