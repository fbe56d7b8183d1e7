from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import SMALL_PARTS, make_corpus

from lmworks.data import prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as bytes, in several shards, so that windows cross from one to the next."""
    out = tmp_path_factory.mktemp("prepared") / "tokens"
    prepare([str(corpus)], out, "bytes", val_fraction=0.2, workers=1, reading=SMALL_PARTS, shard_tokens=2000)
    return out


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy to damage."""

    def copy() -> Path:
        return Path(shutil.copytree(prepared, tmp_path / "copy"))

    return copy
