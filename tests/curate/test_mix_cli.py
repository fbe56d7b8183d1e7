"""`lmworks data mix`: weights and the space of mixtures that a sweep reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmworks.cli.data import app
from lmworks.cli.data_mix import weights_of
from lmworks.data import prepare, read_index
from lmworks.spec.errors import SpecError


def test_weights_by_size_and_a_space_to_try(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder, size in zip(folders, (2000, 500), strict=True):
        (tmp_path / f"{size}.txt").write_text("x" * size)
        prepare([str(tmp_path / f"{size}.txt")], folder, "bytes", val_fraction=0, workers=1)
    tokens = [read_index(folder).tokens("train") for folder in folders]
    space = tmp_path / "space.toml"
    done = CliRunner().invoke(app, ["mix", *folders, "--samples", "5", "--out", str(space), "--json"])
    assert done.exit_code == 0, done.output
    weights = json.loads(done.stdout)["mix"]
    assert weights[folders[0]] == pytest.approx(tokens[0] / sum(tokens), abs=1e-4)
    values = tomllib.loads(space.read_text())["data"]["mix"]["values"]
    assert values[0] == weights
    assert len(values) == 5
    assert all(set(one) == set(folders) and abs(sum(one.values()) - 1) < 0.001 for one in values)


def test_targets_name_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert weights_of(["a=3"], names) == {names[0]: 3.0, names[1]: 0.0}
    with pytest.raises(SpecError, match=r"--target a: write FOLDER=WEIGHT"):
        weights_of(["a"], names)
    with pytest.raises(SpecError, match=r"--target c=1: a weight of at least 0 for one of"):
        weights_of(["c=1"], names)
