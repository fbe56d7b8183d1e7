"""A spec.toml that was edited between two attempts: what may change does, the rest is refused before a step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forked import Forked
from lmworks.record import RunFolder
from lmworks.spec import dump_toml
from lmworks.spec.load import apply_overrides
from tiny import events, make_spec, resume, train


@pytest.fixture(scope="module")
def two(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    train(make_spec(dataset, "optim.steps=2", "checkpoint.every=2"), run)
    return run


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    shutil.copytree(two, tmp_path / "run")
    return tmp_path / "run"


def edit(run: Path, *overrides: str) -> None:
    spec = RunFolder(run).spec()
    RunFolder(run).spec_path.write_text(dump_toml(apply_overrides(spec.to_dict(), overrides)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("seed=7",), "spec.toml has seed = 7, was 0 in step 2: a resumed run cannot change that; restore it"),
        (("data.global_batch=8",), "data.global_batch = 8, was 4 in step 2"),
        (("data.seq=16", "data.shuffle=false"), "data.seq = 16, was 32; data.shuffle = false, was true in step 2"),
        (("model.layers=2",), "model.layers = 2, was 1 in step 2"),
    ],
)
def test_changed_data_or_model_keys_are_rejected(run: Path, overrides: tuple[str, ...], said: str) -> None:
    edit(run, "optim.steps=4", *overrides)
    process = Forked("resume", run)
    _, err = process.communicate(120)
    assert process.returncode == 2 and said in err and f"checkpoint.init = '{run}'" in err
    assert len(err.splitlines()) == 1
    assert events(run, "resume") == [] and not (run / "checkpoints" / "step-000004").exists()


def test_moved_data_must_have_same_tokens(run: Path, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "moved")
    edit(run, "optim.steps=4", f"data.path={tmp_path / 'moved'}", "optim.lr=1e-3", "data.micro_batch=1")
    assert resume(run).step == 4
    assert [event["step"] for event in events(run, "resume")] == [2]


def test_next_resume_compares_with_changed_spec(run: Path) -> None:
    """Each checkpoint holds the spec that it was saved with: a sanctioned change stays one."""
    edit(run, "optim.steps=4", "optim.lr=1e-3")
    resume(run)
    edit(run, "optim.steps=6", "optim.clip=0.5")
    assert resume(run).step == 6
