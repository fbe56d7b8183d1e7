"""Against datatrove itself, on real files of this machine (make test-datatrove)."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from datatrove_decisions import FILE, STAGES, decisions, oracle
from spacy_rules import FILE as RULES
from spacy_rules import rules

from lmworks.curate.documents import Document, DocumentStage
from lmworks.curate.stages import make_stage
from lmworks.curate.words import split_words

pytest.importorskip("datatrove", reason="make test-datatrove installs it")
pytestmark = pytest.mark.datatrove


def real_texts(most: int = 600) -> list[str]:
    """Sources of the standard library, and whatever documentation the system has."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    pages = [path for path in sorted(Path("/usr/share/doc").glob("*/*")) if path.suffix in ("", ".txt", ".md")]
    texts = []
    for path in [*library[:: max(1, len(library) // most)], *pages[:: max(1, len(pages) // most)]]:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if text.strip() and "\0" not in text and len(text) < 200_000:
            texts.append(text)
    return texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return real_texts()


@pytest.mark.parametrize("name", STAGES)
def test_decisions_about_real_files(texts: list[str], name: str) -> None:
    stage = make_stage(name)
    assert isinstance(stage, DocumentStage)
    ours, theirs = stage.open(), oracle()[name]
    reasons: Counter[str] = Counter()
    for text in texts:
        document = Document("a", text)
        reason = ours(document)
        reasons[reason] += 1
        assert (reason, "" if reason else document.text) == theirs(text)
    print(name, len(texts), dict(reasons))


def test_words_of_real_files(texts: list[str]) -> None:
    from datatrove.utils.text import split_into_words

    for text in texts:
        assert split_words(text) == split_into_words(text)


def test_rules_are_spacys() -> None:
    assert json.loads(RULES.read_text(encoding="utf-8")) == rules()


def test_recorded_decisions_are_datatroves() -> None:
    recorded = json.loads(gzip.decompress(FILE.read_bytes()))
    found = decisions(recorded["texts"])
    assert {name: [reason for reason, _ in made] for name, made in found.items()} == recorded["decisions"]
