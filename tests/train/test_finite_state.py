"""No checkpoint holds a NaN: what an update has spoilt is neither saved nor gone on from, and an older step can be."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from crafted import replace_file
from forked import Forked
from layouts import layout, with_meshes
from lmworks import checkpoint
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder, read_metrics
from lmworks.record.event_text import findings
from lmworks.record.folder import RESTARTS
from lmworks.spec import LMWorksError, RunSpec, TrainingError, dump_toml
from lmworks.train import Trainer
from lmworks.train.health.nonfinite import first_nonfinite_tensor
from tiny import Crash, before_step, crash, curve, differences, events, make_spec, resume, saved, train

SIX = ("optim.steps=6", "checkpoint.every=2", "checkpoint.keep=0")


def spoil(trainer: Trainer, name: str, key: str = "exp_avg", value: float = math.nan) -> None:
    """One number of an optimizer's state, or with key "" of the weight itself, where this rank has any of it."""
    for shard in trainer.parallel_model.shards:
        if shard.name == name and shard.leaf.numel():
            tensor = trainer.optimizer.state[shard.leaf][key] if key else shard.leaf.detach()
            tensor.view(-1)[0] = value


def steps_saved(run: Path) -> list[int]:
    return sorted(checkpoint.step_of(folder) for folder in checkpoint.committed(run / "checkpoints"))


# --- what is looked at ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nonfinite_values_are_found(bad: float, dtype: torch.dtype) -> None:
    good = torch.randn(1000).to(dtype)
    for place in (0, 517, 999):
        spoilt = good.clone()
        spoilt[place] = bad
        assert first_nonfinite_tensor([("a", good), ("b", spoilt), ("c", spoilt)]) == ("b", 1)


def test_large_finite_values_are_accepted() -> None:
    large = {"f32": torch.full((100,), 3e38), "f16": torch.full((100,), 6e4).half(), "empty": torch.empty(0)}
    assert (
        first_nonfinite_tensor(
            [*large.items(), ("int", torch.ones(3, dtype=torch.int16)), ("scalar", torch.tensor(2.0))]
        )
        is None
    )


# --- before a save --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_nan_in_optimizer_state_prevents_save(dataset: Path, tmp_path: Path, asynchronous: str) -> None:
    """Loss and gradient of that step are fine; the run ends by name, and goes on bitwise from the step before."""
    spec = make_spec(dataset, *SIX, f"checkpoint.asynchronous={asynchronous}")
    trainer = Trainer(spec, tmp_path / "run", quiet=True)
    before_step(trainer, 4, lambda: spoil(trainer, "norm.weight"))
    with pytest.raises(TrainingError, match=r"^step 4: after the update norm.weight has 1 value ") as said:
        trainer.run()
    assert "nothing of it was saved" in str(said.value) and f"lmworks resume {tmp_path / 'run'}" in str(said.value)
    assert steps_saved(tmp_path / "run") == [2]
    assert math.isfinite(read_metrics(RunFolder(tmp_path / "run").metrics_path)[-1]["loss"])
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["step"], fault["parameter"], fault["values"], fault["action"]) == (4, "norm.weight", 1, "stop")
    (found,) = findings(RunFolder(tmp_path / "run").events())
    assert "norm.weight" in found.what and "before a save" in found.why
    resume(tmp_path / "run")
    train(spec, tmp_path / "whole")
    assert differences(saved(tmp_path / "run"), saved(tmp_path / "whole")) == []


def test_nonfinite_state_rewinds_if_configured(dataset: Path, tmp_path: Path) -> None:
    """To the checkpoint before, and past the batch of the step that was spoilt."""
    spec = make_spec(dataset, *SIX, "health.nonfinite=rewind", "health.rewind_steps=1")
    trainer = Trainer(spec, tmp_path / "run", quiet=True)
    before_step(trainer, 4, lambda: spoil(trainer, "embed.weight") if trainer.cursor == 3 else None)
    trainer.run()
    (back,) = events(tmp_path / "run", "rewind")
    assert (back["step"], back["from_step"], back["to_step"], back["reason"]) == (4, 4, 2, "nonfinite")
    (skip,) = events(tmp_path / "run", "skip")
    assert (skip["from_cursor"], skip["to_cursor"]) == (2, 4)
    assert steps_saved(tmp_path / "run") == [2, 4, 6] and trainer.cursor == 8
    assert first_nonfinite_tensor(saved(tmp_path / "run").items()) in (None, ("rng.python_gauss", 1))


@with_meshes
def spoil_rank_1(rank: int, cases: dict[Path, RunSpec]) -> list[str]:
    said = []
    for folder, spec in cases.items():
        trainer = Trainer(spec, folder, quiet=True)
        if rank == 1:
            before_step(trainer, 2, lambda t=trainer: [spoil(t, shard.name) for shard in t.parallel_model.shards])
        with pytest.raises(LMWorksError) as caught:
            trainer.run()
        said.append(str(caught.value))
    return said


def test_all_ranks_end_and_faulty_rank_is_named(dataset: Path, tmp_path: Path) -> None:
    layouts = {"ddp": "ddp", "fsdp1": "fsdp1", "fsdp2": "fsdp2"}
    specs = {tmp_path / k: layout(dataset, "parallel.dp=2", f"parallel.strategy={s}") for k, s in layouts.items()}
    first, second = on_ranks(2, spoil_rank_1, specs)
    for folder, one, other in zip(specs, first, second, strict=True):
        assert (
            one.startswith("step 2: after the update ") and " of NaN or Inf on rank 1; nothing of it was saved" in one
        )
        assert other == one and steps_saved(folder) == []
        assert [event["rank"] for event in events(folder, "fault")] == [1]


# --- an older step --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("six") / "run"
    train(make_spec(dataset, *SIX), run)
    return run


@pytest.fixture
def run(six: Path, tmp_path: Path) -> Path:
    shutil.copytree(six, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: str | Path) -> tuple[int | None, str, str]:
    process = Forked(*arguments)
    out, err = process.communicate(120)
    return process.returncode, out, err


def test_nonfinite_checkpoint_is_refused_on_resume(six: Path, run: Path) -> None:
    """It was committed before anything looked; a resume used to load it and fail in its first step, for ever."""
    folder = run / "checkpoints" / "step-000006"
    tensors = json.loads((folder / "index.json").read_text())["tensors"]
    (file, start, _, _) = tensors["optim.norm.weight.exp_avg"]["pieces"][0]
    content = bytearray((folder / file).read_bytes())
    content[start : start + 4] = b"\x00\x00\xc0\x7f"
    replace_file(folder, file, bytes(content))
    assert resume(run).step == 6
    (refused,) = events(run, "refused")
    assert refused["step"] == 6 and "optim.norm.weight.exp_avg has 1 values that are NaN or Inf" in refused["reason"]
    assert differences(saved(run), saved(six)) == []


def test_resume_from_chosen_step(six: Path, run: Path) -> None:
    """Later checkpoints are out of the way at once, whatever becomes of this attempt, and are not lost."""
    code, out, err = command("resume", run, "--step", "2")
    assert (code, err) == (0, "")
    aside = run / "checkpoints" / "set-aside-1"
    assert f"checkpoints after step 2 are in {aside} now: 4, 6" in out
    (event,) = events(run, "set_aside")
    assert (event["step"], event["steps"], event["path"]) == (2, [4, 6], "set-aside-1")
    assert [event["step"] for event in events(run, "resume")] == [2]
    assert steps_saved(run) == [2, 4, 6] and differences(saved(run), saved(six)) == []
    assert [folder.name for folder in checkpoint.committed(aside)] == ["step-000006", "step-000004"]
    assert curve(run) == curve(six)


def test_set_aside_checkpoints_are_not_loaded(dataset: Path, run: Path) -> None:
    """Told to begin at step 2 with another rate and stopped at step 3, the run stands there for every reader."""
    spec = RunFolder(run).spec()
    spec = spec.replace(optim=spec.optim.replace(lr=1e-3))
    RunFolder(run).spec_path.write_text(dump_toml(spec.to_dict()))
    trainer = Trainer.resume(run, step=2, quiet=True)
    before_step(trainer, 3, crash)
    with pytest.raises(Crash):  # before it has written a line
        trainer.run()
    assert steps_saved(run) == [2]
    again = Trainer.resume(run, quiet=True)
    before_step(again, 4, crash)
    with pytest.raises(Crash):
        again.run()
    lines = read_metrics(RunFolder(run).metrics_path)
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (3, 2)]
    assert lines[-1]["rewound"] is True and lines[-1]["lr"] == 1e-3
    resume(run)
    assert [line["attempt"] for line in read_metrics(RunFolder(run).metrics_path)] == [0, 0, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("step", "said"), [("3", "has no checkpoint of step 3; steps there: 6, 4, 2"), ("0", "--step")]
)
def test_missing_step_moves_nothing(run: Path, step: str, said: str) -> None:
    code, _, err = command("resume", run, "--step", step)
    assert code in (1, 2) and said in err and "Traceback" not in err
    assert steps_saved(run) == [2, 4, 6]


def test_damaged_step_moves_nothing(run: Path) -> None:
    path = run / "checkpoints" / "step-000002" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = command("resume", run, "--step", "2")
    assert code == 1 and "no usable checkpoint" in err and steps_saved(run) == [2, 4, 6]


def test_remote_copies_of_set_aside_steps_are_deleted_after_copy(dataset: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    train(make_spec(dataset, *SIX, f"checkpoint.remote=file://{there}"), tmp_path / "run")
    assert "step-000006" in {path.name for path in there.iterdir()}
    trainer = Trainer.resume(tmp_path / "run", step=2, quiet=True)
    before_step(
        trainer, 3, lambda: [trainer.checkpoints.record_copy(copied) for copied in trainer.checkpoints.copies.drain()]
    )  # type: ignore[union-attr]
    before_step(trainer, 4, crash)
    with pytest.raises(Crash):
        trainer.run()
    assert {path.name for path in there.iterdir()} == {"step-000002"}


def test_restarted_ranks_ignore_chosen_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent starts them with the same command: they go on from what they have saved since."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one-launch")
    first = Trainer.resume(run, step=2, quiet=True)
    before_step(first, 6, crash)
    with pytest.raises(Crash):
        first.run()
    monkeypatch.setenv(RESTARTS, "1")
    Trainer.resume(run, step=2, quiet=True).run()
    assert [event["step"] for event in events(run, "resume")] == [2, 4]
    assert [event["step"] for event in events(run, "set_aside")] == [2]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another-launch")
    monkeypatch.delenv(RESTARTS)
    assert Trainer.resume(run, step=4, quiet=True).resume_from == 4
