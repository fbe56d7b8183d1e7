"""Comparison of data-parallel strategies: speed, memory, collectives, and a real `lmworks train` job of each: start-up
time, checkpoint size, and what happens when a rank is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..checkpoint import committed, step_of
from ..data import open_batches
from ..parallel.deepspeed import load_deepspeed
from ..parallel.local_ranks import RankFailed, on_ranks
from ..parallel.preflight import check_fits_memory
from ..plan.exact.collectives import collectives
from ..plan.exact.exchanges import by_kind
from ..plan.memory.peak_memory import Row
from ..plan.memory.rank_weights import Resident, resident
from ..plan.memory.sheet import MemorySheet, memory
from ..record import RunFolder, read_metrics
from ..record.parent_death import until_this_process_ends
from ..spec import Cluster, RunSpec, SpecError, TrainingError, dump_toml
from ..train import Trainer
from ..train.rank_memory import RankMemory, measure_rank_memory, train_one_step
from .train import time_interleaved_steps

# Display name → changes to `parallel`.
STRATEGIES: dict[str, dict[str, Any]] = {
    "DDP": {"strategy": "ddp"},
    "FSDP1 full": {"strategy": "fsdp1", "reshard": True},
    "FSDP1 grad-op": {"strategy": "fsdp1", "reshard": False},
    "FSDP2 reshard": {"strategy": "fsdp2", "reshard": True},
    "FSDP2 keep": {"strategy": "fsdp2", "reshard": False},
    "ZeRO-1": {"strategy": "zero", "zero": 1},
    "ZeRO-2": {"strategy": "zero", "zero": 2},
    "ZeRO-3": {"strategy": "zero", "zero": 3, "reshard": True},
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    f"DeepSpeed ZeRO-{stage}": {"strategy": "zero", "zero": stage, "engine": "deepspeed"} for stage in (1, 2, 3)
}
BASE = "DDP"  # the baseline of speeds


@dataclass(frozen=True)
class Outcome:
    """Results of one strategy; lists have one entry per rank."""

    name: str
    seconds: list[float]  # of a step, by round
    tokens_per_s: float
    ratio: float  # of tokens/s to DDP's: the median over rounds
    held: list[Resident]
    worked_out: list[Resident]  # by formula; empty: there is none (DeepSpeed in another precision than fp32)
    dtypes: dict[str, str]
    gradients_after: int  # bytes of gradients on rank 0 between two steps
    peak: list[int]
    peak_by: dict[str, int]  # of rank 0, by category
    peak_worked_out: list[MemorySheet]
    counted: dict[str, tuple[int, int]]  # kind → (count, bytes) of a step
    formula: dict[str, tuple[int, int]]  # empty: unknown (DeepSpeed)
    job: Job | None

    @property
    def exact(self) -> bool | None:
        """Whether live tensors and collectives equal the formula; None: there is no formula."""
        if not self.worked_out:
            return None
        return self.held == self.worked_out and self.formula in ({}, self.counted)


@dataclass(frozen=True)
class Study:
    spec: RunSpec
    ranks: int
    rounds: int
    machine: str
    outcomes: list[Outcome]
    missing: dict[str, str]  # strategy → why it was left out

    def to_dict(self) -> dict[str, Any]:
        found = [
            {**asdict(outcome), "exact": outcome.exact, "layout": strategy_keys(outcome.name)}
            for outcome in self.outcomes
        ]
        facts = {"ranks": self.ranks, "rounds": self.rounds, "machine": self.machine, "missing": self.missing}
        return {**facts, "spec": self.spec.to_dict(), "params": self.spec.model.params, "strategies": found}


def strategy_keys(name: str) -> dict[str, Any]:
    return {**STRATEGIES, **DEEPSPEED}[name]


def study(
    spec: RunSpec,
    ranks: int,
    rounds: int,
    names: Iterable[str] = (),
    jobs: bool = True,
    report_progress: Callable[[str], None] = lambda _: None,
    force: bool = False,
) -> Study:
    """Compare `names` (none: all). `jobs`: also start, kill and resume a real job of each. `force`: skip the check of
    memory.
    """
    chosen, missing = select_strategies(list(names))
    specs = {name: with_strategy(spec, ranks, strategy_keys(name)) for name in chosen}
    if not force:
        check_memory(specs, ranks)
    # Once, before ranks are forked, which may not start the processes that encode it.
    open_batches(spec.data, spec.checkpoint.init, seed=spec.seed)
    if any(name in DEEPSPEED for name in chosen):
        load_deepspeed("cpu")  # once, before ranks are forked: the import takes seconds
    with tempfile.TemporaryDirectory(prefix="lmworks-study-") as scratch:
        work = Path(scratch)
        held = {}
        for name, one in specs.items():
            report_progress(f"{name}: bytes and collectives of a step")
            held[name] = on_ranks(ranks, measure_rank_memory, one, work / "observed" / slug(name), timeout=600)
        report_progress(f"{rounds} steps of each, interleaved")
        seconds = on_ranks(ranks, time_interleaved_steps, specs, work / "turns", rounds, timeout=3600)[0]
        found = []
        for name, one in specs.items():
            job = None
            if jobs:
                report_progress(f"{name}: a job, and SIGKILL to its last rank")
                job = run_job(one, work / "jobs" / slug(name))
            found.append(make_outcome(name, one, held[name], seconds[name], seconds[BASE], job))
    return Study(spec, ranks, rounds, machine(), found, missing)


def check_memory(specs: dict[str, RunSpec], ranks: int) -> None:
    """Interleaved steps need the memory of all strategies at once."""

    def others(changed: RunSpec, rank: int) -> list[Row]:
        other_specs = [with_strategy(changed, ranks, strategy_keys(name)) for name in specs if name != BASE]
        return [Row("other strategies", memory(one, rank=rank).total, "in the same processes") for one in other_specs]

    check_fits_memory(specs[BASE], torch.device("cpu"), beside=others, own_layout=False)


def slug(name: str) -> str:
    """The name on the command line, e.g. fsdp2-reshard."""
    return name.lower().replace(" ", "-")


def select_strategies(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Strategies to compare, always with DDP, and why others are left out."""
    everything = {slug(name): name for name in (*STRATEGIES, *DEEPSPEED)}
    for name in names:
        if slug(name) not in everything:
            raise SpecError(f"{name!r} is not a strategy of this study; it has {', '.join(everything)}")
    requested = {slug(name) for name in names}
    wanted = [name for key, name in everything.items() if not requested or key in requested or name == BASE]
    if importlib.util.find_spec("deepspeed"):
        return wanted, {}
    return [name for name in wanted if name not in DEEPSPEED], {
        name: "not installed" for name in wanted if name in DEEPSPEED
    }


def with_strategy(spec: RunSpec, ranks: int, layout: dict[str, Any]) -> RunSpec:
    """The spec with `ranks` data-parallel ranks on this machine's CPU, without other parallelism."""
    given = spec.parallel
    others = {axis: getattr(given, axis) for axis in ("tp", "pp", "cp", "ep") if getattr(given, axis) > 1}
    if others or given.offload != "none" or given.compile:
        named = ", ".join(f"parallel.{axis} = {size}" for axis, size in others.items()) or "offload and compile"
        raise SpecError(f"this study compares data parallelism alone, without {named}")
    if ranks < 2:
        raise SpecError(f"--ranks {ranks}: data parallelism needs at least 2")
    parallel = given.replace(dp=ranks, dp_replicate=1, dp_shard=1, **layout)
    return spec.replace(parallel=parallel, cluster=Cluster(device="cpu"))  # over gloo


def make_outcome(
    name: str, spec: RunSpec, held: list[RankMemory], seconds: list[float], base: list[float], job: Job | None
) -> Outcome:
    native = spec.parallel.engine == "native"
    everyone = range(len(held))
    return Outcome(
        name=name,
        seconds=seconds,
        tokens_per_s=spec.tokens_per_step / median(seconds),
        ratio=median(other / own for own, other in zip(seconds, base, strict=True)),
        held=[one.resident for one in held],
        worked_out=[resident(spec, rank) for rank in everyone] if native or spec.precision.dtype == "fp32" else [],
        dtypes=held[0].dtypes,
        gradients_after=held[0].gradients_after,
        peak=[sum(one.peak.values()) for one in held],
        peak_by=held[0].peak,
        peak_worked_out=[memory(spec, rank=rank) for rank in everyone] if native else [],
        counted=by_kind(held[0].collectives),
        formula=by_kind(collectives(spec)) if native else {},
        job=job,
    )


def machine() -> str:
    return f"{platform.machine()} CPU, {os.cpu_count()} cores (gloo), PyTorch {torch.__version__}"


# --- train job -------------------------------------------------------------------------------------------


SAVE_EVERY = 4  # steps
TIMEOUT_S = 300  # for each stage of a job, and for its exit after a rank is killed


@dataclass(frozen=True)
class Job:
    start_s: float  # from the command to the beginning of its first step
    checkpoint_bytes: int  # on disk
    checkpoint_files: int
    killed: int  # the rank that got SIGKILL
    exit_code: int | None  # of the command; None: it did not end within the timeout
    ended_s: float  # from the kill to the end of the command
    said: str  # its last line on stderr
    reached: int  # steps it had taken
    committed: int  # the newest checkpoint's step
    resumed: str  # "yes", or why the run could not be resumed


def run_job(spec: RunSpec, folder: Path) -> Job:
    """Start the job, wait for a checkpoint, kill its last rank, wait for its end, and resume it."""
    folder.mkdir(parents=True, exist_ok=True)
    run, file = RunFolder(folder / "run"), folder / "spec.toml"
    # Far more steps than needed: the job must not end by itself.
    long = spec.replace(
        optim=spec.optim.replace(steps=1_000_000),
        checkpoint=spec.checkpoint.replace(every=SAVE_EVERY, keep=2),
        log=spec.log.replace(eval_every=0, eval_batches=1),
    )
    file.write_text(dump_toml(long.to_dict()))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= until_this_process_ends()
    command = [sys.executable, "-m", "lmworks", "train", str(file), "--run-dir", str(run.path), "--force"]
    with open(folder / "errors.txt", "w+", encoding="utf-8") as errors:
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            wait_for(lambda: steps_taken(run) > 0, process, "its first step")
            start = time.monotonic() - began - read_metrics(run.metrics_path)[0]["step_s"]
            wait_for(lambda: bool(committed(run.checkpoints)), process, "a checkpoint")
            saved = steps_taken(run)
            wait_for(lambda: steps_taken(run) > saved, process, "another step")
            dead = spec.parallel.world - 1
            os.kill(rank_pid(run.path, dead), signal.SIGKILL)
            killed = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
            ended, code = time.monotonic() - killed, process.returncode
        finally:
            kill_job(process)
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
    newest = committed(run.checkpoints)[0]
    files = [path for path in newest.rglob("*") if path.is_file()]
    return Job(
        start_s=start,
        checkpoint_bytes=sum(path.stat().st_size for path in files),
        checkpoint_files=len(files),
        killed=dead,
        exit_code=code,
        ended_s=ended,
        said=said[-1] if said else "",
        reached=steps_taken(run),
        committed=step_of(newest),
        resumed=try_resume(spec.parallel.world, run.path, step_of(newest)),
    )


def steps_taken(run: RunFolder) -> int:
    return max((line["step"] for line in read_metrics(run.metrics_path)), default=0) if run.metrics_path.exists() else 0


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        if process.poll() is not None:
            raise TrainingError(f"a job of the study ended with exit code {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise TrainingError(f"a job of the study did not reach {what} within {TIMEOUT_S} s")
        time.sleep(0.02)


def rank_pid(run: Path, rank: int) -> int:
    """The pid of a rank of the job that trains `run`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = os.fsencode(run) in (entry / "cmdline").read_bytes().split(b"\0")
            if ours and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise TrainingError(f"rank {rank} of the job was not found in /proc: killing a rank works on Linux only")


def kill_job(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of the job."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def try_resume(ranks: int, run: Path, step: int) -> str:
    try:
        found = on_ranks(ranks, resume_one_step, run, timeout=600)
    except RankFailed as error:
        return str(error)
    at, loss = found[0]
    return "yes" if at == step + 1 and math.isfinite(loss) else f"it resumed from step {at - 1} with a loss of {loss}"


def resume_one_step(rank: int, run: Path) -> tuple[int, float]:
    """For `on_ranks`: resume as `lmworks resume` does, for one step."""
    trainer = Trainer.resume(run, quiet=True, force=True)
    trainer.build()
    trainer.load()
    values = train_one_step(trainer)
    return trainer.step, values["loss"]
