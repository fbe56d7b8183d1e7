"""Stages: sequences grow and rotary embedding changes in the middle of a run, which a kill anywhere does not change."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from layouts import with_meshes
from lmworks import checkpoint
from lmworks.data import prepare
from lmworks.parallel.local_ranks import RankFailed, on_ranks
from lmworks.record import RunFolder
from lmworks.spec import RunSpec, SpecError
from lmworks.spec.load import dump_toml, load_run
from lmworks.train import Trainer
from lmworks.train.load_run import load_trained
from tiny import (
    Crash,
    before_step,
    crash,
    curve,
    differences,
    flip_a_bit,
    make_spec,
    resume,
    saved,
    shard,
    train,
)
from variations import with_slow


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other documents, in the same tokenizer."""
    root = tmp_path_factory.mktemp("other")
    (root / "long.txt").write_text("\n\n".join(f"line {n} of a longer text " * 20 for n in range(40)))
    from lmworks.data.sources import Reading

    return prepare([str(root / "long.txt")], root / "tokens", reading=Reading(separator="\n\n"), workers=1).folder


@pytest.fixture(scope="module")
def staged(dataset: Path, other: Path) -> RunSpec:
    """16, 32 and 64 tokens: 4 steps, 5, and 3 with another mixture; the base of rotary embedding grows."""
    spec = make_spec(
        dataset, "checkpoint.every=2", "checkpoint.keep=0", "model.context=64", "data.seq=64", "model.rope_theta=9000.0"
    )
    return spec.replace(
        optim=spec.optim.replace(steps=1000),
        stages=[
            {"steps": 4, "data": {"seq": 16, "micro_batch": 4}, "model": {"rope_theta": 100.0}},
            {"steps": 5, "data": {"seq": 32, "fim": {"rate": 0.5}}, "model": {"rope_theta": 1000.0}},
            {"steps": 3, "data": {"mix": {str(dataset): 1.0, str(other): 3.0}}},
        ],
    )


@pytest.fixture(scope="module")
def straight(staged: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    trainer = train(staged, run)
    assert trainer.step == 12 and trainer.is_finished
    return run


def test_each_stage_trains_its_own_tokens(straight: Path) -> None:
    tokens = [line[4] for line in curve(straight)]  # of every step
    assert tokens[:4] == [4 * 16] * 4  # sequences × length
    assert all(0 < one <= 4 * 32 for one in tokens[4:9]) and tokens[9:] == [4 * 64] * 3
    assert [line[0] for line in curve(straight)] == list(range(1, 13))


def test_a_written_spec_has_the_same_stages(dataset: Path) -> None:
    """A run folder's spec.toml: what follows from the keys of a stage is not that of the last one."""
    spec = make_spec(dataset, "model.context=64", "data.seq=64", "data.global_batch=0", "data.micro_batch=1").replace(
        stages=[
            {"steps": 4, "data": {"seq": 16, "micro_batch": 4}, "model": {"context": 16}},
            {"steps": 8, "model": {"rope_scaling": {"type": "yarn", "factor": 4.0}}},
        ]
    )
    read = RunSpec.from_dict(spec.to_dict())
    assert [read.stage(n) for n in range(2)] == [spec.stage(n) for n in range(2)]
    assert [read.stage(n).data.global_batch for n in range(2)] == [4, 1]


@pytest.mark.parametrize("at", with_slow([3, 5, 8, 10, 12], [3, 8, 12]))
def test_a_kill_in_any_stage_changes_nothing(staged: RunSpec, straight: Path, tmp_path: Path, at: int) -> None:
    trainer = Trainer(staged, tmp_path / "run", quiet=True)
    before_step(trainer, at, crash)
    with pytest.raises(Crash):
        trainer.run()
    resume(tmp_path / "run")
    assert curve(tmp_path / "run") == curve(straight)
    assert differences(saved(tmp_path / "run"), saved(straight)) == []


def test_a_stage_is_a_resumed_run(staged: RunSpec, straight: Path, tmp_path: Path) -> None:
    """By hand: train the first stage alone, write the spec of the second, resume: the same weights."""
    first = staged.stage(0)
    trainer = Trainer(first, tmp_path / "run", quiet=True)
    trainer.until = 4
    trainer.run()
    assert differences(saved(tmp_path / "run"), saved(straight, 4)) == []
    second = staged.stage(1)
    again = Trainer(second, tmp_path / "second", quiet=True)
    again.build()
    state: dict[str, Any] = again.train_state.state_dict()
    checkpoint.load(RunFolder(tmp_path / "run").checkpoints, state, refused=lambda folder, reason: None)
    again.train_state.load_state_dict(state)
    again.step = again.cursor = 4
    loss = again.train_step(again.batches.at(4))["loss"]
    assert loss == curve(straight)[4][1]


KILLED_AT = (5, 6)  # the first step of the second stage, and within it


@with_meshes
def run_or_resume(rank: int, spec: RunSpec | None, run: Path, killed_at: int = 0) -> None:
    trainer = Trainer(spec, run, quiet=True) if spec else Trainer.resume(run, quiet=True)
    if rank == 1 and killed_at:
        before_step(trainer, killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.run()


@pytest.mark.slow
def test_two_ranks_go_through_stages_as_one_does(dataset: Path, staged: RunSpec, tmp_path: Path) -> None:
    """The same losses, and after kill -9 of a rank at the border of two stages the same bits as without it."""
    stages = [{**staged.stages[0], "data": {"seq": 16}}, staged.stages[1], staged.stages[2]]
    data = staged.data.replace(micro_batch=2, global_batch=4)
    one = staged.replace(data=data, stages=stages)
    two = one.replace(parallel=one.parallel.replace(dp=2, strategy="fsdp2"))
    train(one, tmp_path / "one")
    on_ranks(2, run_or_resume, two, tmp_path / "two")
    for alone, many in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert (many[0], many[4]) == (alone[0], alone[4])  # step, tokens
        assert many[1] == pytest.approx(alone[1], rel=1e-5)
    for killed_at in KILLED_AT:
        run = tmp_path / f"killed-{killed_at}"
        with pytest.raises(RankFailed):
            on_ranks(2, run_or_resume, two, run, killed_at)
        on_ranks(2, run_or_resume, None, run)
        assert curve(run) == curve(tmp_path / "two")
        assert differences(saved(run), saved(tmp_path / "two")) == []


def test_until_pauses_within_a_stage_and_at_its_end(staged: RunSpec, straight: Path, tmp_path: Path) -> None:
    trainer = Trainer(staged, tmp_path / "run", quiet=True)
    for until in (2, 4, 6, None):
        trainer.until = until
        trainer.run()
        assert trainer.step == until or until is None
        trainer = Trainer.resume(tmp_path / "run", quiet=True)
    assert differences(saved(tmp_path / "run"), saved(straight)) == []


def test_a_damaged_checkpoint_leads_back_into_the_stage_before(staged: RunSpec, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = Trainer(staged, run, quiet=True)
    trainer.until = 4
    trainer.run()
    flip_a_bit(shard(run, 4))
    resume(run)
    assert curve(run) == curve(straight)
    assert differences(saved(run), saved(straight)) == []


def test_a_checkpoint_has_the_rotary_base_of_its_stage(straight: Path, staged: RunSpec) -> None:
    bases = {step: load_trained(straight, step).model.spec.rope_theta for step in saved_steps(straight)}
    assert bases[max(bases)] == 9000.0 and staged.model.rope_theta == 9000.0
    assert all(base == (100.0 if step <= 4 else 1000.0 if step <= 9 else 9000.0) for step, base in bases.items())


def saved_steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.committed(RunFolder(run).checkpoints)]


def test_events_name_attempts(straight: Path) -> None:
    kinds = [event["kind"] for event in RunFolder(straight).events()]
    assert kinds.count("start") == 1 and kinds.count("resume") == 2 and kinds[-1] == "finish"


def test_data_of_a_stage_must_stay(staged: RunSpec, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = Trainer(staged, run, quiet=True)
    trainer.until = 6
    trainer.run()
    table = load_run(run).to_dict()
    table["stages"][1]["data"]["seq"] = 16
    RunFolder(run).spec_path.write_text(dump_toml(table))
    with pytest.raises(SpecError, match="stages = "):
        resume(run)


WRONG = [
    ([{"data": {"seq": 16}}], r"stages\[0\].steps = None"),
    ([{"steps": 2, "model": {"layers": 2}}], r"stages\[0\].model.layers: a stage cannot change that"),
    ([{"steps": 2, "data": {"sq": 16}}], "unknown key 'data.sq'"),
    ([{"steps": 2}, {"steps": 2, "data": {"seq": 4096}}], r"stages\[1\]: data.seq = 4096 is longer than model.context"),
    ([{"steps": 2, "parallel": {"dp": 2}}], r"stages\[0\]: its layout has 2 ranks"),
]


@pytest.mark.parametrize(("stages", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec.from_dict({"stages": stages})


def test_a_spec_with_stages_is_written_and_read(staged: RunSpec, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(dump_toml(staged.to_dict()))
    assert load_run(tmp_path / "spec.toml") == staged
    assert staged.optim.steps == 12 and staged.stage_ends() == [4, 9, 12]
    assert [staged.after(step).data.seq for step in (0, 3, 4, 8, 9, 12)] == [16, 16, 32, 32, 64, 64]
    assert staged.stage(0).optim.steps == 12  # the schedule is that of the whole run
    with pytest.raises(SpecError, match=r"leave optim.steps out"):
        staged.replace(optim=staged.optim.replace(steps=99))


def test_rotary_base_matters() -> None:
    """That the stages of this file differ at all: another base gives other logits."""
    from lmworks.model import GPT

    spec = RunSpec().model
    tokens = torch.arange(20).unsqueeze(0)
    one = GPT(spec)
    one.init_weights(0)
    before = one(tokens)
    one.spec = spec.replace(rope_theta=100.0)
    assert not torch.equal(before, one(tokens))
