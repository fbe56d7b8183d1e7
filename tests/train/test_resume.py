"""A run that was stopped, killed or damaged ends bitwise where the run that never stopped ends."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forked import Forked
from lmworks import checkpoint
from lmworks.data import prepare
from lmworks.model import Sampling, generate
from lmworks.record import RunFolder
from lmworks.spec import CheckpointError, DataError, SpecError
from lmworks.train import Trainer
from lmworks.train.load_run import load_trained
from tiny import (
    Crash,
    before_step,
    crash,
    curve,
    differences,
    events,
    flip_a_bit,
    make_spec,
    resume,
    saved,
    shard,
    train,
    write_documents,
    write_spec,
)
from variations import with_slow


def crashed(spec: Any, run_dir: Path, at_step: int) -> None:
    """A new run (or, with spec None, the one that is there) dies before the named step."""
    trainer = Trainer(spec, run_dir, quiet=True) if spec else Trainer.resume(run_dir, quiet=True)
    before_step(trainer, at_step, crash)
    with pytest.raises(Crash):
        trainer.run()


def sample(run_dir: Path) -> list[int]:
    trained = load_trained(run_dir)
    prompt = torch.tensor([trained.tokenizer.encode("def x")])
    return generate(trained.model, prompt, 24, Sampling(temperature=1.0, seed=5))[0].tolist()


def assert_same_run(one: Path, other: Path) -> None:
    """Every recorded step, every weight, every optimizer tensor, every random generator, and what is generated."""
    assert curve(one) == curve(other)
    assert differences(saved(one), saved(other)) == []
    assert sample(one) == sample(other)


# --- in one process ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thirty(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 steps that nothing disturbed, with accumulation, documents, evaluations and a checkpoint every 5."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train(thirty_spec(dataset), run_dir)
    return run_dir


def thirty_spec(dataset: Path, *overrides: str) -> Any:
    more = ("optim.steps=30", "checkpoint.every=5", "log.eval_every=8", "data.document_mask=true")
    return make_spec(dataset, *more, *overrides)


@pytest.mark.parametrize(
    "deaths", with_slow([[16], [18], [3], [16, 23], [7, 7, 29]], [[16], [18], [3], [16, 23]]), ids=str
)
def test_resume_is_bitwise_equal(dataset: Path, tmp_path: Path, thirty: Path, deaths: list[int]) -> None:
    """Dying before step 16 leaves step 15 saved; before 18, two steps are replayed; before 3, all of them."""
    run_dir = tmp_path / "run"
    crashed(thirty_spec(dataset), run_dir, deaths[0])
    for step in deaths[1:]:
        crashed(None, run_dir, step)
    resume(run_dir)
    assert_same_run(run_dir, thirty)
    starts = [(e["kind"], e["attempt"], e["step"]) for e in RunFolder(run_dir).events() if "attempt" in e]
    expected = [("start", 0, 0)]
    expected += [("resume", number, (step - 1) // 5 * 5) for number, step in enumerate(deaths, 1)]
    assert starts == expected


def test_resume_restores_rng_state(dataset: Path, tmp_path: Path) -> None:
    """Nothing in a step draws from them today; dropout will."""

    def drawing(trainer: Trainer, drawn: dict[int, tuple[float, ...]]) -> Trainer:
        take = trainer.train_step

        def draw_too(batches: Any) -> dict[str, Any]:
            drawn[trainer.step] = (random.gauss(0, 1), float(np.random.randn()), float(torch.rand(())))
            return take(batches)

        trainer.train_step = draw_too  # type: ignore[method-assign]
        return trainer

    straight: dict[int, tuple[float, ...]] = {}
    resumed: dict[int, tuple[float, ...]] = {}
    spec = make_spec(dataset, "checkpoint.every=3")
    drawing(Trainer(spec, tmp_path / "straight", quiet=True), straight).run()
    trainer = drawing(Trainer(spec, tmp_path / "run", quiet=True), {})
    before_step(trainer, 6, crash)
    with pytest.raises(Crash):
        trainer.run()
    drawing(Trainer.resume(tmp_path / "run", quiet=True), resumed).run()
    assert resumed == {step: numbers for step, numbers in straight.items() if step >= 3}
    assert differences(saved(tmp_path / "run"), saved(tmp_path / "straight")) == []


def test_resume_with_data_workers(dataset: Path, tmp_path: Path, thirty: Path) -> None:
    crashed(thirty_spec(dataset, "data.workers=2"), tmp_path / "run", 18)
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", thirty)


def test_missing_checkpoints_are_an_error(dataset: Path, tmp_path: Path) -> None:
    """As where a disk is not mounted: training from step 0 over the old records would look like going on."""
    train(make_spec(dataset, "optim.steps=2", "checkpoint.every=1"), tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="has no checkpoint, though step 2 was saved there"):
        resume(tmp_path / "run")
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    assert resume(tmp_path / "run").step == 2


def test_finished_run_returns_result(dataset: Path, tmp_path: Path) -> None:
    first = train(make_spec(dataset), tmp_path / "run")
    metrics, state = curve(tmp_path / "run"), saved(tmp_path / "run")
    again = Trainer.resume(tmp_path / "run", quiet=True)
    assert again.run() == first.evaluate()
    assert again.step == 12
    assert curve(tmp_path / "run") == metrics
    assert differences(saved(tmp_path / "run"), state) == []


# --- damage --------------------------------------------------------------------------------------------


def test_damaged_newest_checkpoint_falls_back(
    dataset: Path, tmp_path: Path, thirty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    crashed(thirty_spec(dataset), run_dir, 23)
    flip_a_bit(shard(run_dir, 20))
    resume(run_dir)
    captured = capsys.readouterr()
    assert str(shard(run_dir, 20)) in captured.err and "refused" in captured.err
    assert captured.out == ""  # a program that reads the result from stdout is not disturbed
    (refused,) = events(run_dir, "refused")
    assert refused["step"] == 20 and refused["path"] == "step-000020" and "rank-00000.safetensors" in refused["reason"]
    assert events(run_dir, "resume")[0]["step"] == 15
    assert_same_run(run_dir, thirty)


def test_all_checkpoints_damaged_is_an_error(dataset: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(make_spec(dataset, "checkpoint.every=4"), run_dir)
    for step in (4, 8, 12):
        flip_a_bit(shard(run_dir, step))
    before = {path: path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="no usable checkpoint") as error:
        resume(run_dir)
    assert all(str(shard(run_dir, step)) in str(error.value) for step in (4, 8, 12))
    assert {path: path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()} == before


def test_changed_data_are_rejected(tmp_path: Path) -> None:
    prepare([str(write_documents(tmp_path / "a.jsonl"))], tmp_path / "data", workers=1)
    crashed(make_spec(tmp_path / "data", "checkpoint.every=4"), tmp_path / "run", 6)
    prepare([str(write_documents(tmp_path / "b.jsonl", seed=1))], tmp_path / "data", workers=1)
    with pytest.raises(DataError, match="holds other tokens than those this run was trained on"):
        resume(tmp_path / "run")


# --- two at once ---------------------------------------------------------------------------------------


def test_locked_run_is_rejected(dataset: Path, tmp_path: Path) -> None:
    crashed(make_spec(dataset, "checkpoint.every=4"), tmp_path / "run", 6)
    files = sorted((tmp_path / "run").rglob("*"))
    with RunFolder(tmp_path / "run").locked(), pytest.raises(SpecError, match="is in use"):
        resume(tmp_path / "run")
    assert sorted((tmp_path / "run").rglob("*")) == files
    resume(tmp_path / "run")


def test_existing_run_folder_is_rejected(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset), tmp_path / "run")
    state = saved(tmp_path / "run")
    with pytest.raises(SpecError, match=f"already holds a run; continue it with `lmworks resume {tmp_path / 'run'}`"):
        train(make_spec(dataset, "seed=1"), tmp_path / "run")
    assert differences(saved(tmp_path / "run"), state) == []


# --- processes that are killed, interrupted, or run out of disk ---------------------------------------

STEPS = 200
LONG = (f"optim.steps={STEPS}", "checkpoint.every=3", "log.eval_every=50")
BRIEF = ("optim.steps=20", "checkpoint.every=0", "log.eval_every=5")


@pytest.fixture(scope="module")
def brief(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train(make_spec(dataset, *BRIEF), run_dir)
    return run_dir


def waiting_in_step(number: int, go: Path) -> Callable[[], None]:
    """For a process that is forked: in this step it waits for a file, so that no signal comes too late."""
    take = Trainer.train_step

    def wait_and_take(trainer: Trainer, batches: Any) -> dict[str, Any]:
        while trainer.step + 1 == number and not go.exists():
            time.sleep(0.002)
        return take(trainer, batches)

    def replace() -> None:
        Trainer.train_step = wait_and_take  # type: ignore[method-assign]

    return replace


def wait_until(condition: Callable[[], bool], process: Forked, seconds: float = 120) -> None:
    """Poll; a process that ends first has its output shown."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended early with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def working(run_dir: Path, process: Forked, steps: int = 1) -> None:
    """Wait until this process has recorded `steps` steps of its own."""
    metrics = run_dir / "metrics.jsonl"
    before = lines(metrics)
    wait_until(lambda: lines(metrics) >= before + steps, process)


@pytest.mark.slow  # tests/prove/test_chaos.py kills ranks too, at every phase and at random moments
def test_ten_random_kills_are_bitwise_equal(dataset: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(make_spec(dataset, *LONG), tmp_path / "straight")
    spec = write_spec(make_spec(dataset, *LONG), tmp_path / "spec.toml")
    checkpoints = run_dir / "checkpoints"
    draw = random.Random(7)
    torn = 0
    for kill in range(10):
        process = Forked("resume", run_dir) if kill else Forked("train", spec, "--run-dir", run_dir)
        working(run_dir, process, steps=draw.randint(1, 8))
        if kill % 2:  # every second time a save is under way, or has ended just now
            unfinished = f".step-*.tmp-{process.pid}-*"
            wait_until(lambda: any(checkpoints.glob(unfinished)), process)  # noqa: B023
        time.sleep(draw.uniform(0, 0.04))  # a step takes about 10 ms, a save 50
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it finished before it could be killed: raise optim.steps"
        torn += any(checkpoints.glob(f".step-*.tmp-{process.pid}-*"))
    assert torn, "no kill came during a save"
    resume(run_dir)
    assert [line["attempt"] for line in events(run_dir, "resume")] == list(range(1, 11))
    assert [line[0] for line in curve(run_dir)] == list(range(1, STEPS + 1))
    attempts = [json.loads(line)["attempt"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert attempts == sorted(attempts) and set(attempts) == set(range(11))
    assert_same_run(run_dir, tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_saves_checkpoint_and_prints_resume_command(
    dataset: Path, tmp_path: Path, brief: Path, number: signal.Signals
) -> None:
    """The signal goes to the whole group, as from a terminal or a batch system: read-ahead workers get it too."""
    run_dir, go = tmp_path / "run", tmp_path / "go"
    spec = write_spec(make_spec(dataset, *BRIEF, "data.workers=2"), tmp_path / "spec.toml")
    process = Forked("train", spec, "--run-dir", run_dir, first=waiting_in_step(4, go))
    working(run_dir, process, steps=3)
    os.killpg(process.pid, number)
    go.touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 75}[number]
    assert err.splitlines() == [
        f"lmworks: stopped by {number.name} after step 4; continue with: lmworks resume {run_dir}"
    ]
    assert curve(run_dir)[-1][0] == 4
    assert [step for step in range(1, 21) if shard(run_dir, step).exists()] == [4]
    assert [event["step"] for event in events(run_dir, "interrupt")] == [4]
    resume(run_dir)
    assert curve(run_dir) == curve(brief)
    assert differences(saved(run_dir), saved(brief)) == []


def test_second_ctrl_c_ends_at_once(dataset: Path, tmp_path: Path, brief: Path) -> None:
    run_dir, go = tmp_path / "run", tmp_path / "go"
    spec = write_spec(make_spec(dataset, *BRIEF, "checkpoint.every=5"), tmp_path / "spec.toml")
    process = Forked("train", spec, "--run-dir", run_dir, first=waiting_in_step(9, go))
    working(run_dir, process, steps=8)
    process.send_signal(signal.SIGINT)
    go.touch()
    time.sleep(0.03)  # it is in the save that follows the step, or past it
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err
    resume(run_dir)
    assert_same_run(run_dir, brief)


def test_full_disk_during_save_is_one_line_error(dataset: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: weights fit at first, the optimizer's moments do not."""
    overrides = ("checkpoint.every=4", "checkpoint.keep=0", "model.hidden=64")
    straight = train(make_spec(dataset, *overrides), tmp_path / "straight")
    run_dir = tmp_path / "run"
    crashed(make_spec(dataset, *overrides), run_dir, 6)
    size = shard(run_dir, 4).stat().st_size

    def small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    process = Forked("resume", run_dir, first=small_disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith(f"lmworks: error: cannot save {run_dir / 'checkpoints' / 'step-000008'}: File too large")
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000004"]
    assert checkpoint.intact(run_dir / "checkpoints" / "step-000004")
    assert [event["step"] for event in events(run_dir, "fail")] == [5, 8]
    resume(run_dir)
    assert curve(run_dir) == curve(straight.folder.path)
    assert differences(saved(run_dir), saved(straight.folder.path)) == []
