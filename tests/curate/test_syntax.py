"""The syntax check: real source passes, text that a grammar cannot follow does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lmworks.curate.documents import Document
from lmworks.curate.syntax import Syntax, grammar_of
from lmworks.spec.errors import SpecError

MODULE = Path(random.__file__).read_text()


def test_share_of_errors_decides() -> None:
    pytest.importorskip("tree_sitter_python")
    decide = Syntax().open()
    prose = "It was the best of times, it was the worst of times; it was, in short: the age of wisdom.\n" * 20
    conflict = "<<<<<<< HEAD\n" + "x = = 1 ) (\n" * 200 + ">>>>>>> other\n"
    small = MODULE + "\n\ndef f(:\n    pass\n"
    reasons = [decide(Document("a.py", text)) for text in (MODULE, prose, conflict, small, "")]
    assert reasons == ["", "syntax_errors", "syntax_errors", "", ""]
    assert Syntax(max_errors=0).open()(Document("a.py", small)) == "syntax_errors"


def test_other_languages_pass_unchecked_and_are_counted() -> None:
    pytest.importorskip("tree_sitter_python")
    document = Document("notes.txt", "no source at all (")
    assert Syntax().open()(document) == ""
    assert document.notes == {"not checked": 1}


def test_the_language_that_a_stage_found_comes_before_the_ending() -> None:
    assert grammar_of(Document("a.h", "", {"language": "C++"})) == "cpp"
    assert grammar_of(Document("a.h", "")) == "c"
    assert grammar_of(Document("data.jsonl line 3", "", {"path": "src/Main.java"})) == "java"
    assert grammar_of(Document("README", "")) == ""


def test_a_missing_grammar_is_named() -> None:
    with pytest.raises(SpecError, match=r"stages.syntax.languages: 'cobol42' needs .*pip install"):
        Syntax(languages=["cobol42"]).require()
