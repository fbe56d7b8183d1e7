"""The study plan, the checklist and the milestones tick by what is there: real runs, not made-up ones."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.data import prepare
from lmworks.learn import evidence
from lmworks.learn.answers import load
from lmworks.learn.cheat_sheet import cheat_sheet
from lmworks.learn.course_files import COURSE
from lmworks.learn.evidence import EVIDENCE, Workplace
from lmworks.learn.exercise import exercises
from lmworks.learn.goals import LISTS, readings, sections, ticks
from lmworks.learn.progress import Progress, Record
from lmworks.learn.runs import find_runs
from lmworks.learn.tracks import lesson, lesson_names
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import SpecError


def found(workspace: Path, name: str) -> tuple[bool, str]:
    seen = EVIDENCE[name](Workplace(workspace))
    return seen.done, seen.what


def train(folder: Path, **arguments: Any) -> None:
    """A real run of the course's trainer, of one process."""
    ddp = load(COURSE, "src/training/ddp_trainer.py")
    torch.set_num_threads(1)
    settings = {"model_size": "tiny", "batch_size": 4, "seq_len": 16, "max_steps": 12, "warmup_steps": 2,
                "learning_rate": 1e-2, "min_lr": 1e-3, "output_dir": str(folder), "log_every": 100}  # fmt: skip
    ddp.DistributedTrainer(ddp.TrainingArguments(**{**settings, **arguments})).train()


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder)
    return folder


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(Workspace.create(tmp_path / "course").folder)
    return tmp_path / "course"


def copy_run(run: Path, workspace: Path, name: str, **about: Any) -> Path:
    """As a run with these settings would have left it: its throughput is that of all ranks."""
    copy = workspace / "runs" / name
    shutil.copytree(run, copy)
    table = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**table, **about}))
    factor = about.get("world_size", 1)
    edit_lines(copy, lambda line: {**line, "tokens_per_s": factor * line["tokens_per_s"]})
    return copy


def edit_lines(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = run / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def learn(*words: str) -> str:
    result = CliRunner().invoke(app, ["learn", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_nothing_is_ticked_in_a_new_workspace(workspace: Path) -> None:
    every = [one for kind in LISTS for one in ticks(kind, workspace, Progress(Path()))]
    assert len(every) == 28 and not any(one.done for one in every)
    assert all(one.how for one in every)


def test_what_the_lists_name_is_there() -> None:
    for section in sections():
        assert section.list in LISTS
        for item in section.items:
            assert bool(item.reading) + bool(item.exercises) + bool(item.evidence) == 1, item
            assert item.how or not item.evidence
    items = [item for section in sections() for item in section.items]
    assert {item.evidence for item in items} - {""} == set(EVIDENCE)
    asked = {item.reading for item in items} - {""} | {one.reading.id for one in cheat_sheet().essential}
    asked |= {name for one in map(lesson, lesson_names()) for name in one.readings}
    assert asked == set(readings())
    assert not set(readings()) & set(exercises())
    planned = [name for item in items for name in item.exercises]
    assert planned == [one.id for one in exercises().values() if one.number <= 15]
    for reading in readings().values():
        assert all(0 <= one.answer < len(one.choices) and one.why for one in reading.quiz), reading.id


def test_empty_and_made_up_folders_do_not_tick(workspace: Path) -> None:
    run = workspace / "runs" / "ddp-small-2"
    run.mkdir(parents=True)
    assert found(workspace, "ddp") == (False, "")
    (run / "run.json").write_text("")
    (run / "metrics.jsonl").touch()
    assert found(workspace, "ddp") == (False, "")
    (run / "run.json").write_text('{"trainer": "ddp", "world_size": 2, "model_size": "small"}')
    assert found(workspace, "ddp") == (
        False, "runs/ddp-small-2: run.json or metrics.jsonl is not as the course's trainers write it",
    )  # fmt: skip
    assert not any(found(workspace, name)[0] for name in EVIDENCE)


@pytest.mark.parametrize(
    ("about", "metrics"),
    [("[]", ""), ("{}", "7"), ('{"trainer": "fsdp", "world_size": null, "resumed_from": "3"}', "[]"), ("{", "{}"),
     ('{"trainer": "ddp", "world_size": 2, "max_steps": 10, "parameters": 1}', '{"step": 1}')],
)  # fmt: skip
def test_files_that_somebody_wrote_do_no_harm(workspace: Path, about: str, metrics: str) -> None:
    run = workspace / "runs" / "mine"
    (run / "latest").mkdir(parents=True)
    (run / "run.json").write_text(about)
    (run / "metrics.jsonl").write_text(metrics)
    assert not any(found(workspace, name)[0] for name in EVIDENCE)


def test_a_real_run_ticks(workspace: Path, real_run: Path) -> None:
    copy_run(real_run, workspace, "mine")
    done, what = found(workspace, "one_device")
    assert done and what.startswith("runs/mine: 12 steps on 1 × cpu, loss 5.")
    assert found(workspace, "logging") == (True, "runs/mine/metrics.jsonl")
    ticked = {name for name in EVIDENCE if found(workspace, name)[0]}
    assert ticked == {"one_device", "logging"}
    copy_run(real_run, workspace, "two", world_size=2)
    assert found(workspace, "ddp")[0] and not found(workspace, "fsdp")[0]
    copy_run(real_run, workspace, "small", model_size="small")
    assert found(workspace, "gpt2_small")[0]
    copy_run(real_run, workspace, "sharded", world_size=2, trainer="fsdp")
    assert found(workspace, "fsdp")[0]
    assert not found(workspace, "activation_checkpointing")[0] and not found(workspace, "fsdp_resumed")[0]
    copy_run(real_run, workspace, "lean", world_size=2, trainer="fsdp", gradient_checkpointing=True, resumed_from=6)
    assert found(workspace, "activation_checkpointing")[0] and found(workspace, "fsdp_resumed")[0]


def cut(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7]))


def fill(run: Path) -> None:
    (run / "checkpoint.pt").write_bytes(bytes(1 << 20))


def zip_little(run: Path) -> None:
    with zipfile.ZipFile(run / "checkpoint.pt", "w") as archive:
        archive.writestr("archive/data.pkl", "weights")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "stopped": (cut, "7 of 12 steps are logged"),
    "no checkpoint": (lambda run: (run / "checkpoint.pt").unlink(), "no checkpoint.pt"),
    "zeros": (fill, "checkpoint.pt is none of PyTorch's"),
    "a small archive": (zip_little, "checkpoint.pt is smaller than the weights and Adam's moments"),
    "one loss": (
        lambda run: edit_lines(run, lambda line: {**line, "loss": 3.0}), "the loss is the same at every step",
    ),
    "NaN": (lambda run: edit_lines(run, lambda line: {**line, "loss": float("nan")}), "a loss is not finite"),
    "a throughput": (
        lambda run: edit_lines(run, lambda line: {**line, "tokens_per_s": 1e6}),
        "tokens/s and seconds do not give the 64 tokens of a step",
    ),
    "a rising loss": (
        lambda run: edit_lines(run, lambda line: {**line, "loss": 3.0 + line["step"]}), "the loss has not fallen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_a_run_that_is_not_whole_does_not_tick(workspace: Path, real_run: Path, how: str) -> None:
    spoil, says = SPOILT[how]
    spoil(copy_run(real_run, workspace, "mine"))
    assert found(workspace, "one_device") == (False, f"runs/mine: {says}")


def test_the_table_ticks_with_the_figures_of_the_runs(workspace: Path, real_run: Path) -> None:
    copy_run(real_run, workspace, "ddp", world_size=2)
    copy_run(real_run, workspace, "fsdp", world_size=2, trainer="fsdp")
    copy_run(real_run, workspace, "halves", world_size=2, trainer="fsdp", mixed_precision="bf16")
    cut(copy_run(real_run, workspace, "stopped"))
    assert not found(workspace, "memory_table")[0] and not found(workspace, "throughput")[0]
    file = workspace / "benchmarks.md"
    file.write_text("My notes.\n")
    table = json.loads(learn("benchmarks", "--json"))
    assert [row["run"] for row in table["runs"]] == ["runs/ddp", "runs/fsdp", "runs/halves"]
    assert table["left_out"] == {"runs/stopped": "7 of 12 steps are logged"}
    assert found(workspace, "memory_table") == (True, "benchmarks.md: runs/ddp beside runs/fsdp")
    assert found(workspace, "precisions") == (True, "benchmarks.md: runs/fsdp beside runs/halves")
    assert found(workspace, "throughput")[0]
    assert found(workspace, "documented") == (
        False, "benchmarks.md: 2 words of your own; 15 or more say something",
    )  # fmt: skip
    whole = file.read_bytes()
    file.write_bytes(b"\xff" + whole)
    with pytest.raises(SpecError, match=r"benchmarks\.md is not UTF-8 \(invalid start byte at byte 0\)"):
        learn("benchmarks")
    file.write_bytes(whole)
    file.write_text(file.read_text() + "FSDP holds half of the states on each rank, " * 3)
    assert found(workspace, "documented")[0]
    edit_lines(workspace / "runs" / "fsdp", lambda line: {**line, "memory": 5 << 30})
    assert found(workspace, "memory_table") == (
        False, "benchmarks.md has other figures than runs/fsdp: lmworks learn benchmarks",
    )  # fmt: skip
    learn("benchmarks")
    assert found(workspace, "memory_table")[0] and "FSDP holds half" in file.read_text()
    assert "| 5.000 |" in file.read_text()


def test_runs_that_differ_in_more_are_no_comparison(workspace: Path, real_run: Path) -> None:
    copy_run(real_run, workspace, "ddp", world_size=2)
    copy_run(real_run, workspace, "fsdp", world_size=2, trainer="fsdp", model_size="medium")
    learn("benchmarks")
    assert found(workspace, "memory_table") == (False, "no two runs of the table differ in that alone")


def test_readings_tick_by_their_quiz_and_exercises_by_their_checks(workspace: Path) -> None:
    assert readings()["ddp_tutorial"].quiz[0].question in learn("quiz", "ddp_tutorial")
    with pytest.raises(SpecError, match=r"no exercise 'ddp_tutorail'; did you mean 'ddp_tutorial'\?"):
        learn("quiz", "ddp_tutorail")
    learn("quiz", "ddp_tutorial", "--answer", "1", "--answer", "1")
    rows = {row["item"]: row for row in json.loads(learn("plan", "--json"))}
    row = rows["Read PyTorch's DDP tutorial"]
    assert (row["done"], row["found"]) == (False, "1 of 2 answered right") and row["link"].startswith("https://pytorch")
    learn("quiz", "ddp_tutorial", "--answer", "1", "--answer", "2")
    said = learn("plan")
    assert "✓ Read PyTorch's DDP tutorial\n      2 of 2 answered right" in said and said.endswith("1 of 9 done.\n")
    names = ["optimizer", "lr_schedule", "train_step", "ddp_checkpoint"]
    progress = Progress(Path(), {name: Record(passed="2026-01-01") for name in names[:3]})
    (row,) = [one for one in ticks("plan", workspace, progress) if "8 to 11" in one.item]
    assert (row.done, row.found, row.how) == (False, "3 of 4 pass", "lmworks learn check ddp_checkpoint")
    progress.of(names[3]).passed = "2026-01-02"
    (row,) = [one for one in ticks("plan", workspace, progress) if "8 to 11" in one.item]
    assert (row.done, row.found) == (True, "4 of 4 pass")


def test_a_dataset_ticks_if_its_shards_are_whole(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LEAST_TOKENS", 1000)
    empty = workspace / "data" / "empty"
    empty.mkdir(parents=True)
    (empty / "index.json").write_text("{}")
    assert not found(workspace, "dataset")[0]
    for name, count in (("short", 10), ("long", 100)):
        documents = workspace / f"{name}.jsonl"
        documents.write_text("".join(f'{{"text": "document {number:03} of a text"}}\n' for number in range(count)))
        prepare([str(documents)], workspace / "data" / name, val_fraction=0.1, workers=1)
        assert found(workspace, "dataset")[0] == (name == "long")
    assert found(workspace, "dataset")[1].startswith("data/long: 2,0")  # nine tenths of 100 documents of 23 tokens
    shard = workspace / "data" / "long" / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert not found(workspace, "dataset")[0]


def test_deepspeed_ticks_by_its_checkpoint(workspace: Path) -> None:
    """The folder as DeepSpeed 0.19.8 leaves it, by its names."""
    step = workspace / "runs" / "deepspeed" / "global_step50"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text("global_step50")
    assert found(workspace, "deepspeed")[1].endswith("has no model and optimizer states of DeepSpeed's ZeRO")
    weights, states = step / "mp_rank_00_model_states.pt", step / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    weights.touch()
    states.touch()
    assert found(workspace, "deepspeed") == (
        False, f"runs/deepspeed/global_step50: {states.name} is none of PyTorch's",
    )  # fmt: skip
    torch.save({"module": {"w": torch.zeros(5000)}}, weights)
    torch.save({"optimizer_state_dict": {"fp32": torch.zeros(5000), "exp_avg": torch.zeros(5000)}}, states)
    assert found(workspace, "deepspeed") == (True, "runs/deepspeed/global_step50: 1 shards")


def test_wandb_ticks_by_its_own_record_of_a_run(workspace: Path, real_run: Path) -> None:
    copy_run(real_run, workspace, "logged", wandb=True)
    record = workspace / "runs" / "logged" / "wandb" / "offline-run-20260101_000000-abc" / "run-abc.wandb"
    record.parent.mkdir(parents=True)
    record.touch()
    assert not found(workspace, "wandb")[0]
    record.write_bytes(b":W&B\xe1\xbe\x00....tokens_per_s")
    assert found(workspace, "wandb") == (True, "runs/logged/wandb/offline-run-20260101_000000-abc")


def test_a_resumed_run_logs_each_step_once(tmp_path: Path) -> None:
    train(tmp_path / "run", save_every=5, max_steps=7)
    (tmp_path / "run" / "checkpoint.pt").unlink()
    train(tmp_path / "run", save_every=5, max_steps=5)
    edit_lines(tmp_path / "run", lambda line: line)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # two more steps, then killed
        file.write('{"step": 6}\n{"step": 7}\n')
    train(tmp_path / "run", max_steps=12, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13)) and all("loss" in line for line in lines)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resumed_from"] == 5


@pytest.mark.slow
def test_real_runs_on_two_processes_tick(workspace: Path) -> None:
    """All that a CPU can do of the checklist and the milestones, as the lists say it, with the smallest model."""
    common = ["--model_size", "tiny", "--max_steps", "20", "--seq_len", "32", "--batch_size", "4"]

    def run(trainer: str, *options: str) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"src/training/{trainer}.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        done = subprocess.run(
            [*words, *common, *options], cwd=workspace, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]

    run("ddp_trainer")
    run("fsdp_trainer")
    run("fsdp_trainer", "--gradient_checkpointing", "--output_dir", "runs/recompute")
    run("ddp_trainer", "--mixed_precision", "bf16", "--output_dir", "runs/bf16")
    run("fsdp_trainer", "--mixed_precision", "fp16", "--output_dir", "runs/fp16")
    last, half = (find_runs(workspace)[number].lines for number in (3, 2))
    assert all(math.isfinite(line["grad_norm"]) for line in half)
    assert half[-1]["loss"] == pytest.approx(last[-1]["loss"], abs=1e-2)
    learn("benchmarks")
    expected = {"ddp", "fsdp", "activation_checkpointing", "memory_table", "precisions", "throughput", "logging"}
    assert {name for name in EVIDENCE if found(workspace, name)[0]} == expected
    run("fsdp_trainer", "--max_steps", "30", "--resume")
    assert [run.problem for run in find_runs(workspace)] == [""] * 5
    assert found(workspace, "fsdp_resumed")[0]
    pytest.importorskip("wandb")
    run("ddp_trainer", "--wandb", "--output_dir", "runs/wandb")
    assert found(workspace, "wandb")[0]
