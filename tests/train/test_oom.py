"""An OOM that happens all the same is named as one: by rank, with what was predicted and measured."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import typer

from forked import Forked
from lmworks.cli import ranks
from lmworks.parallel.local_ranks import RankFailed, on_ranks
from lmworks.parallel.world import root_cause, run_on_all_ranks
from lmworks.plan.memory import host
from lmworks.plan.memory.fit import peak_rows, total
from lmworks.record import RunFolder
from lmworks.record.oom import OutOfMemory
from lmworks.spec import LMWorksError, RunSpec
from lmworks.train import Trainer
from tiny import before_step, built, events, make_spec, write_spec

GIB, MIB = 2**30, 2**20
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"  # noqa: E501


def limit_address_space(room: int) -> None:
    """To what this process has, and `room` bytes more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))


@pytest.mark.parametrize("force", [False, True], ids=["refused", "forced"])
def test_oom_of_one_rank_is_one_line_error(force: bool, dataset: Path, tmp_path: Path) -> None:
    """A real process, whose allocations really fail."""
    spec = make_spec(dataset, "data.micro_batch=65536", "data.global_batch=65536", "cluster.device=cpu")
    peak = total(peak_rows(spec, 0, "cpu"))
    assert peak > 4 * GIB
    run = tmp_path / "run"
    words = ["train", str(write_spec(spec, tmp_path / "spec.toml")), "--run-dir", str(run), *["--force"] * force]
    process = Forked(*words, first=lambda: limit_address_space(600 * MIB))
    _, said = process.communicate()
    assert said.count("\n") == 1 and said.startswith("lmworks: error: "), said
    if not force:
        assert process.returncode == 2 and "; data.micro_batch=" in said and not run.exists()
        return
    assert process.returncode == 1
    assert re.search(
        rf"out of memory in \w+ of step 1: \S+ GiB more could not be allocated; predicted {peak / GIB:.3g} GiB at its "
        r"peak, measured [01]\.\d+ GiB \(cpu\)",
        said,
    )
    (fail,) = events(run, "fail")
    assert (fail["cause"], fail["predicted_bytes"]) == ("oom", peak)
    assert 0 < fail["measured_bytes"] < peak / 4


def run_short_of_memory(rank: int, spec: RunSpec, folder: Path) -> None:
    trainer = Trainer(spec, folder, quiet=True, force=True)
    if rank == 1:
        before_step(trainer, 1, lambda: limit_address_space(100 * MIB))
    trainer.run()


@pytest.mark.parametrize(
    "experts",
    [(), pytest.param(("model.experts=4", "model.expert_ffn=64"), marks=pytest.mark.slow)],
    ids=["dense", "experts"],
)
def test_oom_names_rank(experts: tuple[str, ...], dataset: Path, tmp_path: Path) -> None:
    words = ("parallel.dp=2", "data.micro_batch=32768", "data.global_batch=65536", "cluster.device=cpu", *experts)
    spec = make_spec(dataset, *words)
    peak = total(peak_rows(spec, 1, "cpu"))
    with pytest.raises(RankFailed) as error:
        on_ranks(2, run_short_of_memory, spec, tmp_path / "run", timeout=100)
    said = rf"rank 1: out of memory in \w+ of step 1.*; predicted {peak / GIB:.3g} GiB at its peak, measured \S+ GiB"
    assert re.match(said, str(error.value)), error.value


def told_by_rank_1(rank: int) -> list[Any]:
    """The facts of its error, as every rank gets them: between steps, and where a collective breaks."""
    ours = OutOfMemory("out of memory", 5, 4)

    def work() -> None:
        if rank == 1:
            raise ours

    with pytest.raises(LMWorksError) as met:
        run_on_all_ranks(work)
    if rank == 1:
        root_cause(OutOfMemory("out of memory", 7, 6))
    dist.barrier()
    broken = root_cause(RuntimeError("Connection closed by peer")) if rank == 0 else ours
    assert isinstance(broken, LMWorksError)
    return [met.value.facts, broken.facts]


def test_oom_facts_reach_all_ranks() -> None:
    between, broken = on_ranks(2, told_by_rank_1, timeout=100)[0]
    assert between == {"cause": "oom", "predicted_bytes": 5, "measured_bytes": 4}
    assert broken == {"cause": "oom", "predicted_bytes": 7, "measured_bytes": 6}


def test_oom_after_a_step_is_not_final(dataset: Path, tmp_path: Path) -> None:
    trainer = built(make_spec(dataset), tmp_path / "run")
    for began, step, final in ((None, 0, True), (4, 4, True), (4, 5, False)):
        trainer.start_step, trainer.step = began, step
        error = trainer.describe_oom(RuntimeError(CPU))
        assert isinstance(error, OutOfMemory) and error.final is final
        assert "4 GiB more could not be allocated" in str(error)


# --- the kernel's OOM killer ------------------------------------------------------------------------------

# Stands in for a rank: takes 80 MiB, has the counter of the kernel raised, and is killed as that would.
KILLED = """
import os, signal, sys, time
from pathlib import Path
if os.environ["RANK"] != "1":
    time.sleep(60)
held = bytearray(os.urandom(1)) * (80 * 2**20)
time.sleep(1.5)
if sys.argv[1] == "oom":
    Path(sys.argv[2]).write_text("low 0\\noom_kill 4\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """memory.events of the control group of this process, in which three were killed before."""
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    for name, text in {"proc/self/cgroup": "0::/\n", "cgroup/memory.events": "low 0\noom_kill 3\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ranks, "PROGRAM", ("-c", KILLED))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "cgroup/memory.events"


def supervised(spec: RunSpec, folder: RunFolder, words: list[str], restarts: int) -> int:
    with pytest.raises(typer.Exit) as ended:
        ranks.supervise(spec, folder, words, words, restarts)
    return ended.value.exit_code


def test_oom_killer_is_recognised(
    counter: Path, dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real processes and a real SIGKILL; the counter is a file of ours. It is not started again: it took no step."""
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu")
    folder = RunFolder.create(tmp_path / "run", spec)
    folder.event("start", 0, attempt=0)
    assert supervised(spec, folder, ["oom", str(counter)], 3) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    peak = total(peak_rows(spec, 1, "cpu"))
    found = re.fullmatch(
        r"lmworks: error: rank 1 ran out of memory: the kernel's OOM killer ended it \(SIGKILL\); predicted "
        rf"{peak / GIB:.3g} GiB a rank beside its runtime, 2 ranks on this machine; "
        r"last seen with (\S+) GiB resident\n",
        said,
    )
    assert found and 80 * MIB < float(found[1]) * GIB < 200 * MIB, said
    (fail,) = events(folder.path, "fail")
    assert fail["cause"] == "oom" and 80 * MIB < fail["measured_bytes"] < 200 * MIB


def test_other_sigkill_is_not_oom(counter: Path, dataset: Path, tmp_path: Path, capfd: Any) -> None:
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu")
    assert supervised(spec, RunFolder(tmp_path / "run"), ["kill"], 0) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "lmworks: error: rank 1 was ended by SIGKILL; the run can be resumed\n"


def test_sigkill_of_oversized_ranks_is_probably_oom(dataset: Path, capfd: Any, tmp_path: Path) -> None:
    """As with `--force`, where the counter of the OOM killer cannot be read."""
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu")
    killed = ranks.RanksExit(-9, "rank 1 was ended by SIGKILL", rank=1)
    with (
        mock.patch.object(ranks, "run_ranks", return_value=killed),
        mock.patch("lmworks.parallel.preflight.available_bytes", return_value=100 * MIB),
        pytest.raises(typer.Exit),
    ):
        ranks.supervise(spec, RunFolder(tmp_path / "run"), ["x"], ["x"], 0, force=True)
    said = capfd.readouterr().err
    assert re.fullmatch(
        r"lmworks: error: rank 1 was ended by SIGKILL; it probably ran out of memory: .* needs \S+ GiB of memory "
        r"for the 2 ranks on this machine, .*0\.0977 GiB.*; the run can be resumed\n",
        said,
    ), said


def test_oom_after_steps_restarts_ranks(dataset: Path, tmp_path: Path) -> None:
    """As often as allowed: another process may have taken the memory."""
    spec = make_spec(dataset, "parallel.dp=2", "cluster.device=cpu")
    folder = RunFolder.create(tmp_path / "run", spec)
    folder.event("start", 0, attempt=0)
    folder.metrics_path.write_text('{"step": 1, "attempt": 0, "loss": 1.0}\n')
    killed = ranks.RanksExit(-9, "rank 1 was ended by SIGKILL", rank=1, oom=True)
    with mock.patch.object(ranks, "run_ranks", return_value=killed) as start:
        supervised(spec, folder, ["x"], 2)
    assert start.call_count == 3
