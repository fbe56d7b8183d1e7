"""`--max-restarts`: what is started again, with which words, and what is not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from torch.distributed.elastic.multiprocessing.api import SignalException

from lmworks.cli import ranks, train
from lmworks.cli.error_file import write_error_file
from lmworks.cli.ranks import RanksExit, find_root_cause, local_ranks
from lmworks.record import RunFolder
from lmworks.spec import DataError, LMWorksError, RunSpec, SpecError, TrainingError, load_run
from tiny import events

DONE = RanksExit()
KILLED = RanksExit(-9, "rank 1 was ended by SIGKILL")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Agent:
    """Stands in for torchrun's: each start ends as the test says, and the first makes the folder."""

    def __init__(self, folder: RunFolder, *ends: RanksExit | Exception, make: bool = True) -> None:
        self.folder, self.ends, self.make = folder, list(ends), make
        self.starts: list[tuple[int, str, dict[str, str]]] = []
        self.launches: set[str] = set()

    def __call__(
        self, world: int, arguments: list[str], deadline_s: float, launch: str, told: dict[str, str]
    ) -> RanksExit:
        if self.make and not self.starts:
            RunFolder.create(self.folder.path, load_run("tiny"))
            self.folder.event("start", 0, attempt=0)
        self.starts.append((world, arguments[0], told))
        self.launches.add(launch)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


def run(agent: Agent, max_restarts: int, spec: RunSpec | None = None, wanted: int | None = None) -> int:
    with mock.patch.object(ranks, "run_ranks", agent):
        try:
            ranks.supervise(spec or load_run("tiny"), agent.folder, ["train"], ["resume"], max_restarts, wanted)
        except typer.Exit as ended:
            return ended.exit_code
    return 0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_ranks_that_were_killed_are_started_again_and_told_why(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(folder, KILLED, RanksExit(1, "step 7: loss nan"), DONE)
    assert run(agent, 3) == 0
    assert agent.starts == [
        (1, "train", {}),
        (1, "resume", {"LMWORKS_RESTARTS": "1", "LMWORKS_RESTART_CAUSE": "rank 1 was ended by SIGKILL"}),
        (1, "resume", {"LMWORKS_RESTARTS": "2", "LMWORKS_RESTART_CAUSE": "step 7: loss nan"}),
    ]
    assert len(agent.launches) == 1  # by which the ranks know that they belong together
    assert capsys.readouterr().err.splitlines() == [
        "lmworks: rank 1 was ended by SIGKILL; started again (1 of 3)",
        "lmworks: step 7: loss nan; started again (2 of 3)",
    ]


def test_without_a_folder_to_go_on_with_it_is_the_first_start_again(folder: RunFolder) -> None:
    agent = Agent(folder, KILLED, DONE, make=False)
    assert run(agent, 1) == 0
    assert [start[1] for start in agent.starts] == ["train", "train"]


def test_the_last_failure_is_how_it_ends(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(folder, KILLED, KILLED)
    assert run(agent, 1) == 137 and len(agent.starts) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "lmworks: error: rank 1 was ended by SIGKILL; the run can be resumed"
    assert [event["error"] for event in events(folder.path, "fail")] == ["rank 1 was ended by SIGKILL"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (RanksExit(2, "optim.lr = 20 is out of range", final=True), 2),
        (RanksExit(1, "tokens-00001 is damaged", final=True), 1),
        (RanksExit(75, "stopped by SIGTERM after step 3"), 75),
        (RanksExit(130, "stopped by SIGINT after step 3"), 130),
    ],
)
def test_what_a_restart_cannot_mend_and_what_was_meant_is_left(folder: RunFolder, end: RanksExit, code: int) -> None:
    agent = Agent(folder, end)
    assert run(agent, 3) == code and len(agent.starts) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_ends_it_and_is_recorded_if_the_ranks_could_not(
    folder: RunFolder, number: signal.Signals, code: int
) -> None:
    agent = Agent(folder, SignalException("", number))
    assert run(agent, 3) == code and len(agent.starts) == 1
    assert [event["error"] for event in events(folder.path, "interrupt")] == [f"stopped by {number.name}"]


def test_a_signal_between_two_starts_ends_it_too(folder: RunFolder) -> None:
    def killed(*_: Any) -> RanksExit:
        signal.raise_signal(signal.SIGTERM)
        return KILLED

    with mock.patch.object(ranks, "run_ranks", killed), pytest.raises(typer.Exit) as ended:
        ranks.supervise(load_run("tiny"), folder, ["train"], ["resume"], 3)
    assert ended.value.exit_code == 75


# --- how ranks ended -----------------------------------------------------------------------------------


def failure(logs: Path, rank: int, code: int, error: LMWorksError | None = None, reported: bool = True) -> Any:
    path = logs / f"attempt_0/{rank}/error.json"
    path.parent.mkdir(parents=True)
    if error is not None:
        with mock.patch.dict("os.environ", {"TORCHELASTIC_ERROR_FILE": str(path)}):
            write_error_file(error, reported)
    return SimpleNamespace(exitcode=code, timestamp=100 - rank, error_file=str(path))


def test_the_cause_is_the_kill_or_else_who_failed_not_who_was_told_to_stop(tmp_path: Path) -> None:
    gone = TrainingError("another rank ended without an error message")
    ends = {
        0: failure(tmp_path, 0, 1, gone),
        1: failure(tmp_path, 1, -9),
        2: failure(tmp_path, 2, -15),
        3: failure(tmp_path, 3, 75),
    }
    assert find_root_cause(ends, tmp_path) == RanksExit(-9, "rank 1 was ended by SIGKILL")
    del ends[1]
    assert find_root_cause(ends, tmp_path) == RanksExit(1, "another rank ended without an error message")


def test_one_rank_that_says_it_is_no_use_is_enough(tmp_path: Path) -> None:
    """The others only heard of it; whichever ends first is the one that the agent shows."""
    failure(tmp_path, 1, 1, DataError("tokens-00001 is damaged"))
    heard = failure(tmp_path, 0, 1, TrainingError("rank 1: tokens-00001 is damaged"))
    assert find_root_cause({0: heard}, tmp_path) == RanksExit(1, "rank 1: tokens-00001 is damaged", final=True)


def test_what_the_first_rank_was_stopped_before_it_could_say_is_said(
    tmp_path: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks raise it and rank 0 is to say it; where another ends first, the agent stops rank 0."""
    told = failure(tmp_path, 1, 1, TrainingError("step 81: loss nan"), reported=False)
    ended = find_root_cause({0: failure(tmp_path, 0, -15), 1: told}, tmp_path)
    assert ended == RanksExit(1, "step 81: loss nan", reported=False)
    for end in (ended, RanksExit(1, "step 81: loss nan")):
        with pytest.raises(typer.Exit):
            ranks.exit_as_ranks_did(end, folder)
    assert capsys.readouterr().err == "lmworks: error: step 81: loss nan\n"  # once: the other was said


def test_a_rank_without_a_word_leaves_it_to_the_records(tmp_path: Path, folder: RunFolder) -> None:
    assert find_root_cause({0: failure(tmp_path, 0, 1)}, tmp_path) == RanksExit(1, "")
    RunFolder.create(folder.path, load_run("tiny"))
    folder.event("start", 0, attempt=0)
    folder.event("fail", 3, error="a collective took more than 5 s: rank 1 never came")
    assert ranks.recorded_cause(folder) == "a collective took more than 5 s: rank 1 never came"


# --- how many ranks ------------------------------------------------------------------------------------

DP4 = ["parallel.dp=4", "data.micro_batch=2", "data.global_batch=16"]


def test_the_gpus_that_are_left_are_used_if_the_spec_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert local_ranks(load_run("tiny", [*DP4, "fault.elastic=true"])) == 2
    with pytest.raises(SpecError, match="the layout needs 4 GPUs and this machine has 3"):
        local_ranks(load_run("tiny", DP4))
    with pytest.raises(SpecError, match="needs 4 GPUs and this machine has 3"):
        local_ranks(load_run("tiny", [*DP4, "fault.elastic=true"]), 4)


def test_as_many_as_were_asked_for_are_started(folder: RunFolder) -> None:
    agent = Agent(folder, KILLED, DONE)
    assert run(agent, 1, load_run("tiny", [*DP4, "fault.elastic=true", "cluster.device=cpu"]), wanted=2) == 0
    assert [start[0] for start in agent.starts] == [2, 2]


def test_the_number_on_the_command_line_goes_before_the_spec() -> None:
    spec = load_run("tiny", ["fault.max_restarts=2"])
    assert [train.restart_limit(spec, given) for given in (None, 0, 5)] == [2, 0, 5]
    with mock.patch.dict("os.environ"):
        ranks.os.environ.pop("RANK", None)
        assert train.needs_supervisor(spec, None) and not train.needs_supervisor(spec, 0)
        ranks.os.environ["RANK"] = "0"
        assert not train.needs_supervisor(spec, None)  # its agent does that


def test_torchrun_must_say_where_ranks_that_it_starts_again_find_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert train.default_run_folder(load_run("tiny")).parts[0] == "runs"
    with pytest.raises(SpecError, match="--run-dir"):
        train.default_run_folder(load_run("tiny", ["fault.elastic=true"]))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(SpecError, match="--run-dir"):
        train.default_run_folder(load_run("tiny"))
