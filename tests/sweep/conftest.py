"""Fixtures of tests that run whole sweeps."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from sweeps import SPACE, TRIALS, figures, make_base

from lmworks.spec import dump_toml
from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Space


@pytest.fixture
def place(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with spec.toml and space.toml: three trials of half a second."""
    (tmp_path / "spec.toml").write_text(dump_toml(make_base(dataset)))
    (tmp_path / "space.toml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> list[Any]:
    """What each trial computes where nobody disturbs it."""
    from lmworks.train import Trainer

    sweep = Sweep.create(tmp_path_factory.mktemp("runs") / "sweep", make_base(dataset), Space.of(tomllib.loads(SPACE)))
    for number, point in enumerate(sweep.space.points()):
        Trainer(sweep.spec(point, number), sweep.folder(number).path, quiet=True).run()
    found = [figures(sweep, number) for number in range(TRIALS)]
    assert len({str(one) for one in found}) == TRIALS
    return found
