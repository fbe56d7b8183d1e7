"""One trial: a job is started, struck, taken up again until it is done, and judged."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...record import RunFolder
from ...spec import RunSpec, dump_toml
from .draw import Trial, spec_of
from .fault_injection import FILLER
from .injection_plan import done, write_acts
from .jobs import Ended, run_command, run_forked
from .judge import broken_promise, evidence, losses_of

ATTEMPTS = 4  # a job that was struck once or twice and is not done after so many never will be
SMALL_DISK = "16m"
RESTARTS = 3


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
    struck: str  # what was done, in words
    expected: str
    verdict: str  # same, close, stopped; or what went wrong: unfired, hung, unfinished, unnamed, lost
    ok: bool
    cause: str  # the line that names it
    attempts: int
    seconds: float
    problem: str = ""
    repeat: str = ""
    folder: str = ""  # of a trial that failed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Harness:
    """Trials in `root`. Uninterrupted runs lie beside the data: made once, used by all trials, and gone with it."""

    def __init__(self, root: Path, data: Path) -> None:
        self.root, self.data = root.absolute(), data.absolute()

    # --- the run that nothing happens to ----------------------------------------------------------------

    def straight_folder(self, trial: Trial) -> Path:
        keys = "".join(f"-{key.replace('=', '-')}" for key in trial.kind.keys)
        return self.data.parent / f"straight-{trial.layout}{keys}"

    def run_straight(self, trial: Trial) -> None:
        """With a synchronous save, whatever the trial's: they must not differ in what they save."""
        folder = self.straight_folder(trial)
        if folder.exists():
            return
        work = folder.with_name(f".{folder.name}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_acts(work, [])
        spec = spec_of(trial.layout, str(self.data), "sync", trial.kind.keys)
        world = spec.parallel.world
        ended = run_forked(work, world, begin(work, spec), work / "said-0.txt", launched=world > 1)
        if not ended.well:
            raise RuntimeError(f"the uninterrupted run of {folder.name} failed: {ended.said}")
        work.rename(folder)

    # --- the run that something happens to --------------------------------------------------------------

    def run(self, trial: Trial) -> Outcome:
        began = time.monotonic()
        folder = self.root / f"trial-{trial.number:04d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        disk = SmallDisk(folder / "run") if trial.fault == "enospc" else None
        try:
            shutil.copytree(self.data, folder / "data")
            write_acts(folder, trial.acts)
            ended = self.attempts(trial, folder, disk)
            verdict, cause, problem = self.judge(trial, folder, ended)
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
            struck="; ".join(done(folder)),
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

    def attempts(self, trial: Trial, folder: Path, disk: SmallDisk | None) -> list[Ended]:
        """Start it, and take it up as often as it ends early."""
        spec, ended = trial.spec(str(folder / "data")), list[Ended]()
        while len(ended) < ATTEMPTS and not (ended and (ended[-1].well or ended[-1].hung)):
            if ended:
                self.mend(trial, folder, disk)
            log = folder / f"said-{len(ended)}.txt"
            shrunk = trial.fault == "shrink" and len(done(folder)) == len(trial.acts)
            arguments = begin(folder, spec) if not (folder / "run" / "spec.toml").exists() else again(folder)
            if trial.job == "command":
                ended.append(run_command(folder, [*arguments, "--max-restarts", str(RESTARTS)], log))
            else:
                world = 1 if shrunk else spec.parallel.world
                ended.append(run_forked(folder, world, arguments, log, launched=spec.parallel.world > 1))
        return ended

    def mend(self, trial: Trial, folder: Path, disk: SmallDisk | None) -> None:
        """What whoever reads the error would do before `lmworks resume`."""
        if disk:
            disk.free()
        if trial.fault.startswith("data") and len(done(folder)) == len(trial.acts) and named(trial, folder):
            shutil.copytree(self.data, folder / "data", dirs_exist_ok=True)

    # --- the verdict ------------------------------------------------------------------------------------

    def judge(self, trial: Trial, folder: Path, ended: list[Ended]) -> tuple[str, str, str]:
        """(verdict, the line that names the cause, what is wrong)."""
        kind, struck = trial.kind, done(folder)
        if len(struck) < len(trial.acts):
            return "unfired", "", f"the job ended before it was struck: {last_line(ended)}"
        if ended[-1].hung:
            return "hung", "", "ranks did not end by themselves"
        if not ended[-1].well:
            return "unfinished", "", f"it could not be taken up again: {last_line(ended)}"
        cause = named(trial, folder)
        if kind.cause and not cause and trial.phase in (kind.named_in or kind.phases):
            return "unnamed", "", f"nothing it said or recorded matches {pattern(trial, struck)}"
        if trial.verdict == "stopped":
            early = [end for end in ended[:-1] if not end.well]
            if not early and not restarted(folder):
                return "unnamed", cause, "it did not stop"
            if kind.exit_code is not None and [set(end.codes) for end in early[-1:]] != [{kind.exit_code}]:
                return "unnamed", cause, f"exit codes {early[-1].codes if early else 0} instead of {kind.exit_code}"
        if kind.saves_last and trial.phase in kind.named_in:
            broken = broken_promise(folder, ended[0].said)
            if broken:
                return "lost", cause, broken
        lost = losses_of(folder, self.straight_folder(trial), exact=trial.verdict != "close")
        return ("lost" if lost else trial.verdict), cause, "; ".join(lost).replace(f"{folder}/", "")


def restarted(folder: Path) -> bool:
    """Whether an agent has started ranks again by itself, within one run of the command."""
    return any(event["kind"] == "restart" for event in RunFolder(folder / "run").events())


def named(trial: Trial, folder: Path) -> str:
    """The line in which the cause is named, if there is one."""
    if not trial.kind.cause:
        return ""
    said = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("said-*.txt")))
    sought = re.compile(pattern(trial, done(folder)))
    line = next((line for line in evidence(folder, said) if sought.search(line)), "")
    return line.replace(f"{folder}/", "")


def pattern(trial: Trial, struck: list[str]) -> str:
    file = struck[-1].split("/")[-1].split(" ")[-1] if struck else ""
    step = trial.step or r"\d+"
    places = {"{rank}": str(trial.rank), "{step}": str(step), "{file}": re.escape(file)}
    return re.sub("|".join(map(re.escape, places)), lambda match: places[match[0]], trial.kind.cause)


def last_line(ended: list[Ended]) -> str:
    lines = ended[-1].said.strip().splitlines() if ended else []
    return lines[-1] if lines else "it said nothing"


def begin(folder: Path, spec: RunSpec) -> list[str]:
    file = folder / "spec.toml"
    file.write_text(dump_toml(spec.to_dict()), encoding="utf-8")
    return ["train", str(file), "--run-dir", str(folder / "run")]


def again(folder: Path) -> list[str]:
    return ["resume", str(folder / "run")]


class SmallDisk:
    """A tmpfs that holds the run folder; nothing where this user may not mount one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.mounted = mount(path)
        if not self.mounted:
            path.rmdir()

    def free(self) -> None:
        (self.path / FILLER).unlink(missing_ok=True)

    def remove(self) -> None:
        """What it holds stays, on the disk beneath."""
        if self.mounted:
            kept = self.path.with_name("kept")
            shutil.copytree(self.path, kept, ignore=shutil.ignore_patterns(FILLER))
            subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
            self.path.rmdir()
            kept.rename(self.path)


def mount(path: Path) -> bool:
    """False where this user may not."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "lmworks-chaos", str(path)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
