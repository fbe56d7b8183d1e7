"""A real `lmworks train` job: start-up time, checkpoint size, and its behaviour when a rank is killed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import committed, step_of
from ..parallel.local_ranks import RankFailed, on_ranks
from ..record import RunFolder, read_metrics
from ..spec import RunSpec, TrainingError, dump_toml
from ..train import Trainer
from ..train.rank_memory import train_one_step

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
