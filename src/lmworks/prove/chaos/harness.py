"""One trial: a job is started, a fault is injected, the job is resumed until it ends, and compared with a reference.

Many trials run several at a time, each in its own process group that can be killed as a whole.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from ...record import RunFolder
from ...spec import RunSpec, TrainingError, dump_toml
from ...spec.align import METHOD_DATA, ONLINE_METHODS
from ..parity import write_corpus
from .compare_runs import compare_runs, exit_save_problem, log_lines
from .examples import write_examples, write_teacher
from .fault_injection import FILLER, injections_done, write_injections
from .faults import Trial, trial_spec
from .jobs import JobResult, run_command, run_forked

MAX_ATTEMPTS = 4  # of a job with one or two injected faults
SMALL_DISK = "16m"
MAX_RESTARTS = 3


@dataclass(frozen=True)
class Outcome:
    trial: int
    seed: int
    fault: str
    phase: str
    layout: str
    saves: str
    job: str
    rank: int
    step: int
    delay_ms: float
    injected: str  # description of the injections
    expected: str
    verdict: str  # same, close, stopped; or a failure: unfired, hung, unfinished, unnamed, lost
    ok: bool
    cause: str  # the line that names it
    attempts: int
    seconds: float
    problem: str = ""
    repeat: str = ""
    folder: str = ""  # of a trial that failed

    def to_dict(self) -> dict[str, Any]:
        return {"struck" if key == "injected" else key: value for key, value in asdict(self).items()}


class Harness:
    """Runs trials in `root`. Reference runs are stored beside the data: made once, used by all trials."""

    def __init__(self, root: Path, data: Path) -> None:
        self.root, self.data = root.absolute(), data.absolute()

    def data_of(self, trial: Trial) -> Path:
        """Token shards; of a post-training method, its examples."""
        if not trial.method:
            return self.data
        distill = trial.method == "distill"
        folder = self.data.with_name(f"examples-{trial.method if distill else METHOD_DATA[trial.method]}")
        if not folder.exists():
            write_examples(folder, METHOD_DATA[trial.method])
            if distill:
                write_teacher(folder)
        return folder

    # --- reference run ----------------------------------------------------------------------------------

    def reference_folder(self, trial: Trial) -> Path:
        keys = "".join(f"-{key.replace('=', '-')}" for key in trial.kind.overrides)
        return self.data.parent / f"straight-{trial.layout}{keys}{trial.method and f'-{trial.method}'}"

    def run_reference(self, trial: Trial) -> None:
        """Always with synchronous saves: asynchronous saves must store the same."""
        folder = self.reference_folder(trial)
        if folder.exists():
            return
        work = folder.with_name(f".{folder.name}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_injections(work, [])
        spec = trial_spec(trial.layout, str(self.data_of(trial)), "sync", trial.kind.overrides, trial.method)
        world = spec.parallel.world
        ended = run_forked(work, world, train_arguments(work, spec), work / "output-0.txt", distributed=world > 1)
        if not ended.succeeded:
            raise RuntimeError(f"the uninterrupted run of {folder.name} failed: {ended.output}")
        work.rename(folder)

    # --- run with a fault -------------------------------------------------------------------------------

    def run(self, trial: Trial) -> Outcome:
        began = time.monotonic()
        folder = self.root / f"trial-{trial.number:04d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        disk = SmallDisk(folder / "run") if trial.fault == "enospc" else None
        try:
            shutil.copytree(self.data_of(trial), folder / "data")
            write_injections(folder, trial.injections)
            ended = self.attempts(trial, folder, disk)
            verdict, cause, problem = self.verdict_of(trial, folder, ended)
        finally:
            if disk:
                disk.remove()
        ok = verdict == trial.verdict
        outcome = Outcome(
            trial=trial.number,
            seed=trial.seed,
            fault=trial.fault,
            phase=trial.phase,
            layout=trial.layout,
            saves=trial.saves,
            job=trial.job,
            rank=trial.rank,
            step=trial.step,
            delay_ms=trial.delay_ms,
            injected="; ".join(injections_done(folder)),
            expected=trial.verdict,
            verdict=verdict,
            ok=ok,
            cause=cause,
            attempts=len(ended),
            seconds=round(time.monotonic() - began, 2),
            problem=problem,
            repeat=trial.repeat,
            folder="" if ok else str(folder),
        )
        if ok:
            shutil.rmtree(folder)
        return outcome

    def attempts(self, trial: Trial, folder: Path, disk: SmallDisk | None) -> list[JobResult]:
        """Start the job, and resume it until it succeeds, hangs or has used all attempts."""
        spec, ended = trial.spec(str(folder / "data")), list[JobResult]()
        while len(ended) < MAX_ATTEMPTS and not (ended and (ended[-1].succeeded or ended[-1].hung)):
            if ended:
                self.repair(trial, folder, disk)
            log = folder / f"output-{len(ended)}.txt"
            shrunk = trial.fault == "shrink" and len(injections_done(folder)) == len(trial.injections)
            arguments = (
                train_arguments(folder, spec)
                if not (folder / "run" / "spec.toml").exists()
                else ["resume", str(folder / "run")]
            )
            if trial.job == "command":
                ended.append(run_command(folder, [*arguments, "--max-restarts", str(MAX_RESTARTS)], log))
            else:
                world = 1 if shrunk else spec.parallel.world
                ended.append(run_forked(folder, world, arguments, log, distributed=spec.parallel.world > 1))
        return ended

    def repair(self, trial: Trial, folder: Path, disk: SmallDisk | None) -> None:
        """What a user who read the error does before `lmworks resume`."""
        if disk:
            disk.free()
        if (
            trial.fault.startswith("data")
            and len(injections_done(folder)) == len(trial.injections)
            and line_naming_cause(trial, folder)
        ):
            shutil.copytree(self.data, folder / "data", dirs_exist_ok=True)

    # --- the verdict ------------------------------------------------------------------------------------

    def verdict_of(self, trial: Trial, folder: Path, ended: list[JobResult]) -> tuple[str, str, str]:
        """(verdict, the line that names the cause, the problem)."""
        kind, injected = trial.kind, injections_done(folder)
        if len(injected) < len(trial.injections):
            return "unfired", "", f"the job ended before the fault was injected: {last_line(ended)}"
        if ended[-1].hung:
            return "hung", "", "ranks did not exit by themselves"
        if not ended[-1].succeeded:
            return "unfinished", "", f"it could not be resumed: {last_line(ended)}"
        cause = line_naming_cause(trial, folder)
        if kind.cause and not cause and trial.phase in (kind.reported_in or kind.phases):
            return "unnamed", "", f"no line of output or events matches {cause_pattern(trial, injected)}"
        if trial.verdict == "stopped":
            early = [end for end in ended[:-1] if not end.succeeded]
            if not early and not restarted(folder):
                return "unnamed", cause, "it did not stop"
            if kind.exit_code is not None and [set(end.codes) for end in early[-1:]] != [{kind.exit_code}]:
                return "unnamed", cause, f"exit codes {early[-1].codes if early else 0} instead of {kind.exit_code}"
        if kind.saves_on_exit and trial.phase in kind.reported_in:
            broken = exit_save_problem(folder, ended[0].output)
            if broken:
                return "lost", cause, broken
        lost = compare_runs(folder, self.reference_folder(trial), exact=trial.verdict != "close")
        return ("lost" if lost else trial.verdict), cause, "; ".join(lost).replace(f"{folder}/", "")


def restarted(folder: Path) -> bool:
    """Whether the agent restarted ranks within one run of the command."""
    return any(event["kind"] == "restart" for event in RunFolder(folder / "run").events())


def line_naming_cause(trial: Trial, folder: Path) -> str:
    """The line that names the cause; empty if there is none."""
    if not trial.kind.cause:
        return ""
    output = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("output-*.txt")))
    matching = re.compile(cause_pattern(trial, injections_done(folder)))
    line = next((line for line in log_lines(folder, output) if matching.search(line)), "")
    return line.replace(f"{folder}/", "")


def cause_pattern(trial: Trial, injected: list[str]) -> str:
    file = injected[-1].split("/")[-1].split(" ")[-1] if injected else ""
    step = trial.step or r"\d+"
    values = {"{rank}": str(trial.rank), "{step}": str(step), "{file}": re.escape(file)}
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], trial.kind.cause)


def last_line(ended: list[JobResult]) -> str:
    lines = ended[-1].output.strip().splitlines() if ended else []
    return lines[-1] if lines else "no output"


def train_arguments(folder: Path, spec: RunSpec) -> list[str]:
    file = folder / "spec.toml"
    file.write_text(dump_toml(spec.to_dict()), encoding="utf-8")
    return ["train", str(file), "--run-dir", str(folder / "run")]


class SmallDisk:
    """A tmpfs for the run folder; not mounted where this user has no right to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.mounted = mount(path)
        if not self.mounted:
            path.rmdir()

    def free(self) -> None:
        (self.path / FILLER).unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmount; the files are copied to the disk beneath."""
        if self.mounted:
            kept = self.path.with_name("kept")
            shutil.copytree(self.path, kept, ignore=shutil.ignore_patterns(FILLER))
            subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
            self.path.rmdir()
            kept.rename(self.path)


def mount(path: Path) -> bool:
    """False where this user has no right to."""

    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "lmworks-chaos", str(path)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


# --- many trials -----------------------------------------------------------------------------------------


TRIAL_TIMEOUT_S = 2000.0  # of one trial, above the sum of its own timeouts
PRELOADED_MODULES = (  # imported once here, inherited by every forked rank
    "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "lmworks.cli.main", "lmworks.cli.train", "lmworks.report.run_report", "lmworks.bench.calibrate", "lmworks.train",
)  # fmt: skip


@contextmanager
def open_harness(out: Path) -> Iterator[Harness]:
    """A harness in `out`; folders of failed trials stay there."""
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-data-", dir=out) as made:
        yield Harness(out / "trials", write_corpus(Path(made), documents=300))
    with contextlib.suppress(OSError):  # not empty after a failed trial
        (out / "trials").rmdir()


def run_trials(
    harness: Harness, trials: list[Trial], jobs: int, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Outcomes in the order of trial numbers; `on_outcome` is called as each trial ends."""
    if any(trial.method in ONLINE_METHODS for trial in trials):
        importlib.import_module("lmworks.align.online_trainer")
    for trial in trials:
        harness.data_of(trial)  # made once, before the processes of trials
    needed = {harness.reference_folder(trial): trial for trial in trials}
    for outcome in run_in_processes(harness.run_reference, list(needed.values()), jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"a reference run without faults failed: {outcome}")
    outcomes = []
    for outcome in run_in_processes(harness.run, trials, jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"the harness itself failed: {outcome}")
        outcomes.append(outcome)
        on_outcome(outcome)
    return sorted(outcomes, key=lambda outcome: outcome.trial)


def run_in_processes(work: Callable[[Trial], Any], trials: list[Trial], jobs: int) -> Iterator[Any]:
    """The result of `work` for each trial, or its traceback as text, in order of completion."""
    context = mp.get_context("fork")
    waiting, running = list(trials), dict[Connection, tuple[BaseProcess, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=trial_process, args=(theirs, work, waiting.pop(0)))
                process.start()
                theirs.close()
                running[ours] = process, time.monotonic() + TRIAL_TIMEOUT_S
            for end in wait(list(running), 1.0):
                assert isinstance(end, Connection)
                process, _ = running.pop(end)
                yield receive(end)
                process.join()
            for end, (process, limit) in list(running.items()):
                if time.monotonic() > limit:
                    del running[end]
                    kill_process_group(process)
                    yield f"a trial took longer than {TRIAL_TIMEOUT_S:g} s"
    finally:
        for process, _ in running.values():
            kill_process_group(process)


def trial_process(end: Connection, work: Callable[[Trial], Any], trial: Trial) -> None:
    os.setsid()
    try:
        end.send(work(trial))
    except BaseException:
        end.send(traceback.format_exc())


def receive(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return "a trial's own process died"


def kill_process_group(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
