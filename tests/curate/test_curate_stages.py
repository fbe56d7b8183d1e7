"""The registry of stages: names and keys of a pipeline."""

from __future__ import annotations

import pytest

from lmworks.curate.documents import Document
from lmworks.curate.stages import make_stage
from lmworks.spec.errors import SpecError


def test_notes_of_a_document_add_up() -> None:
    document = Document("a", "text")
    document.note("email", 2)
    document.note("email")
    assert document.notes == {"email": 3}


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(SpecError, match="unknown stage 'no_such_stage'"):
        make_stage("no_such_stage")


def test_a_stage_without_a_name_is_refused() -> None:
    with pytest.raises(SpecError, match="a stage needs its name"):
        make_stage({"min_words": 3})
