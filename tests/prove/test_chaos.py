"""Every kind of fault is injected once into a job of real ranks, which recovers; defective resumes are detected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.prove.chaos import harness
from lmworks.prove.chaos.compare_runs import exit_save_problem
from lmworks.prove.chaos.faults import BY_NAME, FAULTS, ROUND, STEP, Trial, sample_trial
from lmworks.prove.chaos.harness import Harness, Outcome, open_harness, run_trials
from lmworks.record import RunFolder
from lmworks.train import Trainer
from lmworks.train.rng import seed_everything
from typed import lmworks

# fault, phase, layout, saves: every fault once, over different layouts
QUICK = [
    ("kill-rank", "save.commit", "fsdp2", "sync"),
    ("eio", "save.write", "zero2", "sync"),
]
PROCESSES = [
    ("kill-writer", "save.write", "ddp2", "async"),
    ("shrink", "forward", "fsdp2", "sync"),
    ("sigterm", "backward", "ddp2", "async"),
]
NUMBERS = [
    ("flip", "load.read", "tp2", "sync"),
    ("nan-loss", "forward", "pp2", "sync"),
    ("nan-gradient", "reduce", "tp2", "sync"),
    ("flip-parameter", "data", "ddp2", "sync"),
    ("flip-gradient", "optimizer", "ddp2", "sync"),
    ("flip-optimizer", "data", "ddp2", "sync"),
]
# Faults that other tests cover too: signals, hangs, slow ranks, damaged checkpoints, full disks, data.
ALSO = [
    ("sigterm-late", "forward", "one", "sync"),
    ("sigstop", "reduce", "fsdp2", "sync"),
    ("data-corrupt", "data", "ddp2", "sync"),
    ("kill-rank", "load.read", "pp2", "sync"),
    ("mismatch", "optimizer", "ddp2", "sync"),
    ("slow", "forward", "ddp2", "sync"),
    ("enospc", "save.write", "one", "sync"),
    ("enospc", "save.write", "ddp2", "async"),
    ("truncate", "load.find", "one", "sync"),
    ("missing", "save.prune", "one", "async"),
    ("data-missing", "start", "one", "sync"),
]
COMMANDS = [
    ("kill-rank", "backward", "ddp2", "async"),
    ("kill-agent", "save.commit", "ddp2", "sync"),
    ("kill-agent", "save.write", "ddp2", "async"),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with open_harness(tmp_path_factory.mktemp("chaos")) as made:
        yield made


def chosen(case: tuple[str, str, str, str], number: int = 0, **changes: Any) -> Trial:
    fault, phase, layout, saves = case
    rank = 0 if layout == "one" else 1
    drawn = sample_trial(7, number, fault, phase)
    return dataclasses.replace(drawn, layout=layout, saves=saves, rank=rank, job="forked", **changes)


def inject(jobs: Harness, some: list[Trial]) -> list[Outcome]:
    return run_trials(jobs, some, 2, lambda outcome: None)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="a rank and a disk"),
        pytest.param(PROCESSES, id="processes", marks=pytest.mark.slow),
        pytest.param(NUMBERS, id="numbers", marks=pytest.mark.slow),
        pytest.param(ALSO, id="also", marks=pytest.mark.slow),
    ],
)
def test_jobs_recover_from_injected_faults(jobs: Harness, cases: list[tuple[str, str, str, str]]) -> None:
    found = inject(jobs, [chosen(case, number) for number, case in enumerate(cases)])
    assert [(o.fault, o.phase, o.verdict, o.problem) for o in found if not o.ok] == []
    assert len(found) == len(cases)


@pytest.mark.slow  # a minute of starting ranks; what a restart records and loses: tests/train/test_restart.py
def test_the_command_restarts_ranks_and_survives_the_loss_of_its_agent(jobs: Harness) -> None:
    found = inject(jobs, [dataclasses.replace(chosen(case, n), job="command") for n, case in enumerate(COMMANDS)])
    assert [(o.fault, o.verdict, o.problem) for o in found if not o.ok] == []
    assert [o.attempts for o in found] == [1, 2, 2]  # the agent restarts a rank; nothing restarts the agent


def test_a_full_disk_is_injected_without_permission_to_mount(jobs: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "mount", lambda path: False)
    (outcome,) = inject(jobs, [chosen(("enospc", "save.write", "one", "sync"))])
    assert (outcome.verdict, outcome.problem) == ("stopped", "") and outcome.injected.startswith("RLIMIT_FSIZE")
    assert "File too large" in outcome.cause


def kills(method: str, phases: Sequence[str]) -> list[Trial]:
    return [sample_trial(5, number, "kill-rank", phase, method) for number, phase in enumerate(phases)]


def test_a_killed_round_of_grpo_is_repeated_bitwise(jobs: Harness) -> None:
    (trial,) = kills("grpo", ["generate"])
    (outcome,) = inject(jobs, [dataclasses.replace(trial, layout="one", rank=0, job="forked")])
    assert (outcome.verdict, outcome.problem) == ("same", "")
    assert outcome.repeat.endswith("--phase generate --method grpo")


@pytest.mark.slow  # 20 kills of online methods, 6 of the others
@pytest.mark.parametrize(
    ("method", "phases"),
    [
        ("grpo", (*ROUND, *STEP, "save.commit")),
        ("ppo", (*ROUND, *STEP, "save.write")),
        ("dpo", ("forward", "save.commit")),
        ("sft", ("backward", "load.read")),
        ("kto", ("reduce", "save.write")),
        ("distill", ("forward", "save.commit")),
    ],
)
def test_killed_post_training_ends_bitwise_equal(jobs: Harness, method: str, phases: tuple[str, ...]) -> None:
    found = inject(jobs, kills(method, phases))
    assert [(o.phase, o.layout, o.verdict, o.problem) for o in found if not o.ok] == []
    assert len(found) == len(phases)


def test_every_fault_is_covered() -> None:
    assert {case[0] for case in [*QUICK, *PROCESSES, *NUMBERS, *ALSO, *COMMANDS]} == {fault.name for fault in FAULTS}


# --- defects are detected -------------------------------------------------------------------------------


def after_load(change: Callable[[Trainer], None]) -> Callable[..., None]:
    load = Trainer.load

    def loading(self: Trainer, step: int | None = None) -> None:
        load(self, step)
        if self.step:
            change(self)

    return loading


def reset_cursor(trainer: Trainer) -> None:
    trainer.cursor = 0


def reset_generators(trainer: Trainer) -> None:
    seed_everything(trainer.spec.seed)


def reset_moments(trainer: Trainer) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"].zero_()


def flip_weight_bit(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.parallel_model.shards[0].leaf.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (reset_cursor, "step"),
        (reset_generators, "rng"),
        pytest.param(reset_moments, "step", marks=pytest.mark.slow),
        (flip_weight_bit, "model."),
    ],
)
def test_an_incomplete_resume_is_detected(
    jobs: Harness, monkeypatch: pytest.MonkeyPatch, bug: Callable[[Trainer], None], message: str
) -> None:
    trial = chosen(("kill-rank", "forward", "one", "sync"), step=5)
    jobs.run_reference(trial)
    monkeypatch.setattr(Trainer, "load", after_load(bug))
    (outcome,) = inject(jobs, [trial])
    assert not outcome.ok and outcome.verdict == "lost" and message in outcome.problem
    assert outcome.repeat == "lmworks prove chaos --seed 7 --trial 0 --fault kill-rank --phase forward"
    assert (Path(outcome.folder) / "run" / "metrics.jsonl").exists()  # the folder of a failed trial stays


@pytest.mark.slow
def test_a_save_recorded_before_its_commit_is_detected(jobs: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Trainer.save

    def record_then_save(self: Trainer, wait: bool = True) -> float:
        self.event("save", path="soon", seconds=0.0)
        return save(self, wait)

    monkeypatch.setattr(Trainer, "save", record_then_save)
    (outcome,) = inject(jobs, [chosen(("kill-rank", "save.commit", "one", "sync"), step=6, delay_ms=0.0)])
    assert (outcome.verdict, outcome.problem) == ("lost", "step 6 was saved, but a resume continued from step 4")


# --- the command ---------------------------------------------------------------------------------------


def test_a_trial_is_repeated_by_number_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--fault", "kill-rank", "--phase", "forward", "--seed", "7", "--trial", "0", "--out", str(tmp_path))
    drawn = sample_trial(7, 0, "kill-rank", "forward")
    code, out, err = lmworks(capsys, "chaos", *words, "--json")
    (record,) = json.loads(out)
    assert code == 0 and record["ok"] and record["verdict"] == "same" and "seed 7" in err
    assert (record["trial"], record["layout"], record["rank"], record["step"]) == (
        0,
        drawn.layout,
        drawn.rank,
        drawn.step,
    )
    assert json.loads((tmp_path / "chaos.json").read_text()) == [record]
    assert "# 1 trials, 0 lost" in (tmp_path / "chaos.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fault", "kil-rank"], "there is no fault 'kil-rank'; did you mean 'kill-rank'?"),
        (["--phase", "save.comit"], "there is no phase 'save.comit'; did you mean 'save.commit'?"),
        (
            ["--fault", "slow", "--phase", "load.read"],
            "'slow' cannot be injected in the phase 'load.read', only in: data",
        ),
        (["--method", "pppo"], "--method pppo: there is no such method; did you mean 'ppo'?"),
        (["--method", "sft", "--phase", "generate"], "there is no phase 'generate'"),
        (["--method", "sft", "--fault", "data-missing"], "'data-missing' is a fault of pretraining"),
    ],
)
def test_unknown_faults_and_phases_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = lmworks(capsys, "chaos", *words)
    assert code == 2 and message in err


def test_the_list_has_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "chaos", "--list", "--json")
    assert code == 0 and [row["fault"] for row in json.loads(out)] == [fault.name for fault in FAULTS]


# --- sampling of trials ---------------------------------------------------------------------------------


def test_first_trials_cover_every_legal_pair_and_are_deterministic() -> None:
    pairs = {(fault.name, phase) for fault in FAULTS for phase in fault.phases}
    drawn = [sample_trial(3, number) for number in range(len(pairs) + 20)]
    assert {(trial.fault, trial.phase) for trial in drawn[: len(pairs)]} == pairs
    assert drawn == [sample_trial(3, number) for number in range(len(pairs) + 20)]
    assert drawn != [sample_trial(4, number) for number in range(len(pairs) + 20)]
    assert all(trial.layout in BY_NAME[trial.fault].layouts for trial in drawn)


@pytest.mark.parametrize(
    ("events", "output", "problem"),
    [
        ([("save", 4), ("interrupt", 4), ("resume", 4)], "lmworks: error: the agent was killed", ""),
        ([("save", 2), ("interrupt", 4), ("resume", 2)], "", "step 4 was taken and not saved"),
        ([("save", 2), ("fail", 4), ("resume", 2)], "", "the job ended with 'fail' instead of a save: why"),
        (
            [("save", 4), ("interrupt", 4)],
            "a\nframe #3: c10d::TCPStore\n",
            "it printed a stack: frame #3: c10d::TCPStore",
        ),
        ([("save", 6), ("finish", 6)], "", ""),
    ],
)
def test_ranks_must_save_when_their_agent_is_killed(
    tmp_path: Path, events: list[tuple[str, int]], output: str, problem: str
) -> None:
    """A bitwise equal result after a resume does not prove that the save was made."""
    (tmp_path / "run").mkdir()
    run = RunFolder(tmp_path / "run")
    for kind, step in [("start", 0), *events]:
        run.event(kind, step, error="why")
    assert exit_save_problem(tmp_path, output) == problem
