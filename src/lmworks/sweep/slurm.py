"""An sbatch script: an array of workers, each with the cores and GPUs of one trial."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..launch.job import trap_signal, wait_for_child
from ..launch.slurm import TIME, sbatch_option
from ..spec import LMWorksError, SpecError
from ..spec.errors import PREEMPTED
from ..spec.files import write_whole
from .folder import Sweep
from .pool import MOST_FAILURES, Process, Workers

LOOK_S = 5.0  # between two questions to Slurm
SET = ("array", "a", "cpus-per-task", "c")  # options of sbatch that the script sets itself, beside those of a run


@dataclass(frozen=True)
class Array:
    """What to ask Slurm for; an empty string leaves the choice to the cluster."""

    workers: int
    cores: int  # of a worker
    gpus: int = 0
    time: str = ""
    partition: str = ""
    grace: int = 120  # seconds before the limit at which trials are asked to save and stop
    lines: tuple[str, ...] = ()  # further #SBATCH options


def array_script(sweep: Sweep, ask: Array) -> str:
    """Before the time limit a worker stops its trial with a checkpoint, and is queued again."""
    if ask.time and not TIME.fullmatch(ask.time):
        raise SpecError(f"--time {ask.time!r} is not a Slurm time; write [days-]hours:minutes:seconds, e.g. 1-12:00:00")
    path = sweep.path.absolute()
    options = {
        "job-name": re.sub(r"[^A-Za-z0-9._-]+", "-", path.name),
        "array": f"0-{ask.workers - 1}",
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(ask.cores),
        "gpus-per-node": str(ask.gpus or ""),
        "time": ask.time,
        "partition": ask.partition,
        "output": f"{path}/slurm-%A_%a.log",
        "open-mode": "append",
        "signal": f"B:USR1@{ask.grace}",
    }
    worker = shlex.join([sys.executable, "-m", "lmworks", "sweep", "worker", str(path), "--allocated"])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {ask.workers} workers of the sweep {path.name}. Submit it with: sbatch THIS-FILE",
            *(f"#SBATCH --{name}={value}" for name, value in options.items() if value),
            "#SBATCH --requeue",
            *(f"#SBATCH {array_option(line)}" for line in ask.lines),
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(Path.cwd()))}",
            f"export OMP_NUM_THREADS={sweep.threads}",
            "",
            f"# {ask.grace} s before the limit Slurm sends USR1 to this script: the worker stops its trial.",
            *trap_signal("USR1", "worker"),
            f"{worker} &",
            *wait_for_child("worker"),
            f"if ((status == {PREEMPTED})); then",
            '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
            "fi",
            'exit "$status"',
            "",
        ]
    )


def array_option(line: str) -> str:
    option = sbatch_option(line)
    if (name := re.match(r"--?([A-Za-z-]+)", option)) and name[1] in SET:
        raise SpecError(f"--sbatch-line {line!r}: the script sets its own --{name[1]} (--workers, --threads)")
    return option


def submit_array(sweep: Sweep, ask: Array) -> tuple[Path, str]:
    """Write the script into the sweep's folder and hand it to sbatch; returns it and the number of the job."""
    script = sweep.path / "workers.sbatch"
    write_whole(script, array_script(sweep, ask))
    if shutil.which("sbatch") is None:
        raise SpecError(f"there is no sbatch on this machine; submit {script} where Slurm is")
    ended = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if ended.returncode:
        raise LMWorksError(f"sbatch refused {script}: {final_line(ended.stderr)}")
    return script, ended.stdout.strip().partition(";")[0]


def final_line(text: str) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class SlurmWorkers(Workers):
    """As `Workers`, an array that is submitted on entering and cancelled on leaving. Slurm starts killed ones again."""

    def __init__(self, sweep: Sweep, ask: Array) -> None:
        super().__init__(sweep, ask.workers)
        self.ask = ask

    def start_all(self) -> list[Process]:
        """One array, again where it ended too early; arrays that settle no trial are an error."""
        settled = sum(trial.settled for trial in self.sweep.trials())
        self.failures = self.failures + 1 if settled == self.settled else 0
        self.settled = settled
        if self.failures > MOST_FAILURES:
            raise LMWorksError(f"Slurm's jobs end and settle no trial; see {self.sweep.path}/slurm-*.log")
        return [SlurmJob(submit_array(self.sweep, self.ask)[1])]


class SlurmJob:
    """An array as a process: it ends when Slurm no longer has it in its queue."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.looked, self.ended = -math.inf, False

    def poll(self) -> int | None:
        if not self.ended and time.monotonic() - self.looked >= LOOK_S:
            found = subprocess.run(["squeue", "--noheader", "--jobs", self.job], capture_output=True, text=True)
            unknown = found.returncode != 0 and "Invalid job id" in found.stderr  # it ended a while ago
            self.ended = unknown or (found.returncode == 0 and not found.stdout.strip())
            self.looked = time.monotonic()
        return 0 if self.ended else None

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(LOOK_S / 10)
        return 0

    def send_signal(self, number: int) -> None:
        """Whatever the signal: workers get SIGTERM, and stop their trials with a checkpoint within Slurm's KillWait."""
        subprocess.run(["scancel", self.job], capture_output=True)

    def kill(self) -> None:
        self.send_signal(0)
