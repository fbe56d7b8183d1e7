"""Gopher's, C4's and FineWeb's rules: decisions that datatrove made about the same documents."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import Any

import pytest
from datatrove_decisions import FILE, STAGES

from lmworks.curate.documents import Document, DocumentStage
from lmworks.curate.stages import make_stage
from lmworks.curate.words import count_sentences, split_words
from lmworks.spec.errors import SpecError


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


def decide(name: str, text: str, **keys: Any) -> str:
    stage = make_stage({"stage": name, **keys})
    assert isinstance(stage, DocumentStage)
    return stage.open()(Document("a", text))


@pytest.mark.parametrize("name", STAGES)
def test_decisions_are_datatroves(recorded: dict[str, Any], name: str) -> None:
    ours = [decide(name, text) for text in recorded["texts"]]
    assert ours == recorded["decisions"][name]


def test_recorded_documents_reach_nearly_every_rule(recorded: dict[str, Any]) -> None:
    """Else equal decisions would say little."""
    seen = {name: Counter(reasons) for name, reasons in recorded["decisions"].items()}
    assert {"gopher_short_doc", "gopher_too_many_hashes", "gopher_too_many_bullets", ""} <= seen[
        "gopher_quality"
    ].keys()
    assert {"gopher_too_many_end_ellipsis", "gopher_below_alpha_threshold"} <= seen["gopher_quality"].keys()
    assert {"dup_line_frac", "dup_para_frac", "top_2_gram", "duplicated_5_n_grams", ""} <= (
        seen["gopher_repetition"].keys()
    )
    assert {"too_few_sentences", "curly_bracket", "lorem_ipsum", ""} <= seen["c4"].keys()
    assert {"line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio", ""} <= seen["fineweb"].keys()
    assert all(len(reasons) > 1 for reasons in seen.values())


def test_words_are_spacys() -> None:
    """As spaCy 3.8 cuts them."""
    text = "Don't e-mail U.S. prices ($3.50/kg)... to http://a.org/x?y=1, or foo.bar(); it's 10am :-)"
    assert split_words(text) == [
        *("Do", "n't", "e", "-", "mail", "U.S.", "prices", "(", "$", "3.50", "/", "kg", ")", "...", "to"),
        *("http://a.org/x?y=1", ",", "or", "foo.bar", "(", ")", ";", "it", "'s", "10", "am", ":-)"),
    ]


def test_sentences() -> None:
    assert count_sentences("One. Two! (Three?) e.g. four", 10) == 4
    assert count_sentences("One. Two! Three", 2) == 2
    assert count_sentences('He said "no." ...', 10) == 1


def test_thresholds_are_keys() -> None:
    text = "alpha beta gamma the and " * 4
    assert decide("gopher_quality", text) == "gopher_short_doc"
    assert decide("gopher_quality", text, min_words=10) == ""
    assert decide("gopher_repetition", text) == "top_2_gram"
    assert decide("gopher_repetition", text, top_ngrams={}, duplicate_ngrams={}) == ""
    with pytest.raises(SpecError, match=r"top_ngrams: 'two' is not a number of words"):
        decide("gopher_repetition", text, top_ngrams={"two": 0.1})


def test_c4_changes_the_text() -> None:
    stage = make_stage({"stage": "c4", "min_sentences": 1})
    assert isinstance(stage, DocumentStage)
    document = Document("a", "Menu\nThis is a sentence[1] of words.\nWe use cookies on this page.\n")
    assert stage.open()(document) == ""
    assert document.text == "This is a sentence of words."
    assert document.notes == {"lines_removed": 2}
