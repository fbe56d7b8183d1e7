"""The run folder: the only place that a run writes to, and that every tool reads.

Kinds of events, so that writers and readers agree:

    start, resume     a process began an attempt (fields: attempt, launch, ranks)
    restart           an agent starts ranks again after a failure (fields: attempt, launch, restarts, cause, lost)
    finish            the last step is done and saved
    interrupt         somebody asked it to stop; it can be resumed
    fork              the run began from a checkpoint of another (parent)
    pause             it has come as far as it was asked to (`--until`), and saved; it can be resumed
    fail              it stopped by itself (fields: error)
    save              a checkpoint was committed (seconds that training stood still, write_s in the background, bytes)
    save_failed       one could not be written; those before it are as they were (error)
    copy, copy_failed a checkpoint was copied to checkpoint.remote, or could not be (remote, seconds; error)
    refused           one was found damaged, and is not loaded (path, reason)
    set_aside         checkpoints after the step that a resume was started from (attempt, steps, path)
    eval              held-out loss (val_loss) or reward was measured (tokens, unit, seconds)
    early_stop        a run of an online method ends before its last step (reason: kl or held_out, and the figures)
    fault, spike      a step with a NaN or Inf, or far above those before it (reason, action, cursor, data; module)
    rerun             a bad step, or a stretch of them, was computed again (reason, transient)
    skip              windows of data that are not trained on (from_cursor, to_cursor: the first one after, reason)
    rewind            back to an earlier checkpoint (from_step, to_step, reason)
    lower_lr          the learning rate is lower from here on (factor, until: a step, or 0 for good)
    overflow          fp16: a step was left out because of its loss scale (loss_scale, next_scale)
    corrupt           copies of the same weights differ (rank, ranks, copies, parameters, action)
    hang              ranks waited for one another too long (ranks: the cause, cause: its kind, reports: a folder)
    profile           steps are recorded by the profiler because somebody asked for it (id, first, last, ranks)
    straggler         a rank is busy while others wait for it, or keeps up again (rank, host, ratio, recovered)
    …                 other events
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from ..spec import RunSpec, SpecError, dump_toml, load_run
from ..spec.files import write_whole
from . import hang
from .heartbeat import Heartbeat, own_heartbeat, process_state
from .jsonl import LineWriter, read_lines


@dataclass(frozen=True)
class RunFolder:
    """Paths and events of one run. `create` makes a new folder, `open` an existing one."""

    path: Path

    @classmethod
    def create(cls, path: str | Path, spec: RunSpec) -> Self:
        """A new folder with the resolved spec. An existing run is refused and left unchanged."""
        folder = cls(Path(path))
        try:
            folder.check_unused()
            folder.path.mkdir(parents=True, exist_ok=True)
            write_whole(folder.spec_path, dump_toml(spec.to_dict()))
        except FileExistsError:
            raise SpecError(f"cannot create the run folder {folder.path}: a file of that name exists") from None
        except OSError as error:
            raise SpecError(f"cannot create the run folder {folder.path}: {error.strerror}") from None
        return folder

    def check_unused(self) -> None:
        if any(found.exists() for found in (self.spec_path, self.metrics_path, self.checkpoints)):
            raise SpecError(
                f"{self.path} already holds a run; continue it with `lmworks resume {self.path}`, "
                "or choose another --run-dir"
            )

    @classmethod
    def open(cls, path: str | Path) -> Self:
        folder = cls(Path(path))
        try:
            if not folder.path.is_dir():
                why = "it is a file" if folder.path.exists() else "it does not exist"
                raise SpecError(f"{folder.path} is not a run folder: {why}")
            if not folder.spec_path.is_file():
                raise SpecError(f"{folder.path} is not a run folder: it has no {folder.spec_path.name}")
        except OSError as error:
            raise SpecError(f"cannot read the run folder {folder.path}: {error.strerror}") from None
        return folder

    @property
    def spec_path(self) -> Path:
        return self.path / "spec.toml"

    @property
    def prediction_path(self) -> Path:
        return self.path / "prediction.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def stats_path(self) -> Path:
        return self.path / "stats.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def spec(self) -> RunSpec:
        return load_run(self.path)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        with LineWriter(self.events_path) as lines:
            lines.append({"time": now(), "kind": kind, "step": step, **fields})

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.events_path)

    def next_attempt(self) -> int:
        """One more than the highest recorded attempt; 0 for a new run.

        An attempt that hung before its first event has left reports, which the next must not mistake for its own.
        """
        records = [*read_lines(self.metrics_path), *self.events()]
        known = [record["attempt"] for record in records if isinstance(record.get("attempt"), int)]
        return 1 + max([*known, *hang.attempts(self.path)], default=-1)

    @contextmanager
    def locked(self, timeout_s: float = 0.0) -> Iterator[None]:
        """Lock the run for this process: two trainers in one folder would overwrite each other.

        A kernel lock, which ends with the process; nothing is left to clean up. It is on events.jsonl, which always
        exists and is never replaced. `timeout_s`: wait for an owner that is known to be ending.
        """
        try:
            descriptor = os.open(self.events_path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SpecError(f"cannot write {self.events_path}: {error.strerror}") from None
        has_lock_file = False
        try:
            deadline = time.monotonic() + timeout_s
            while not (taken := try_lock(descriptor, fcntl.LOCK_EX)):
                if taken is None and (has_lock_file := self.create_lock_file()):
                    break
                if time.monotonic() > deadline:
                    raise SpecError(f"{self.path} is in use: {self.lock_owner()}")
                time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)
            if has_lock_file:
                self.lock_file.unlink(missing_ok=True)

    # --- file systems without locks ---------------------------------------------------------------------

    @property
    def lock_file(self) -> Path:
        return self.path / "held.json"

    def create_lock_file(self) -> bool:
        """Exclusively create a file that names the owner. The file of a process that has ended is replaced."""
        heartbeat = own_heartbeat(0)
        for _ in range(2):
            try:
                with open(self.lock_file, "xb") as file:
                    file.write(heartbeat.first())
                return True
            except FileExistsError:
                found = self.read_lock_owner()
                if found is None or process_state(found) != "gone":
                    return False
                self.lock_file.unlink(missing_ok=True)
            except OSError as error:
                raise SpecError(f"cannot write {self.lock_file}: {error.strerror}") from None
        return False

    def read_lock_owner(self) -> Heartbeat | None:
        try:
            return Heartbeat.read(self.lock_file.read_bytes() + Heartbeat.second(0.0, "init", 0))
        except (OSError, ValueError, TypeError):
            return None

    def lock_owner(self) -> str:
        found = self.read_lock_owner()
        if found is None:
            return "another process is training this run"
        who = f"process {found.pid} on {found.host} is training this run"
        return f"{who}; this file system has no locks, so if that is not so, remove {self.lock_file}"

    def is_locked(self) -> bool:
        """Whether a process (this one too) is training the run now."""
        try:
            descriptor = os.open(self.events_path, os.O_RDONLY)
        except OSError:
            return False
        try:
            free = try_lock(descriptor, fcntl.LOCK_SH)
            if free is not None:
                return not free
            owner = self.read_lock_owner()
            return owner is not None and process_state(owner) != "gone"
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool | None:
    """False if another open file has the lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- attempts --------------------------------------------------------------------------------------------

# After an automatic restart the run needs two facts: how many steps were lost, and whether the last two attempts failed
# in the same step. Both are read from events.jsonl and metrics.jsonl, so they are known after any crash.

BEGIN = ("start", "restart", "resume")
DONE = ("finish", "interrupt", "pause")  # intended ends
RESTARTS = "LMWORKS_RESTARTS"  # environment: number of restarts by the agent
CAUSE = "LMWORKS_RESTART_CAUSE"  # environment: cause of the last one
NO_ERROR_MESSAGE = "a rank ended without an error message"


@dataclass(frozen=True)
class Attempt:
    number: int
    step: int  # the last one taken, or the first
    launch: str = ""  # id of the agent that started it
    done: bool = False
    cause: str = NO_ERROR_MESSAGE  # of an unintended end
    moved: bool = field(default=False, compare=False)  # whether it took a step

    @property
    def failed_in(self) -> int:
        """The step that failed; 0 after an intended end."""
        return 0 if self.done else self.step + 1


def attempts(folder: RunFolder) -> list[Attempt]:
    """In order. One that died before its first event is unknown."""
    found: dict[int, Attempt] = {}
    number = None
    for event in folder.events():
        kind = event["kind"]
        if kind in BEGIN and isinstance(event.get("attempt"), int):
            number = event["attempt"]
            found[number] = Attempt(number, event["step"], event.get("launch", ""))
        elif number is not None and kind in DONE:
            found[number] = replace(found[number], done=True)
        elif number is not None and kind == "fail":
            found[number] = replace(found[number], cause=event["error"] or NO_ERROR_MESSAGE)
    for line in read_lines(folder.metrics_path):  # the last line of an attempt counts: it may have rewound
        if line.get("attempt") in found:
            found[line["attempt"]] = replace(found[line["attempt"]], step=line["step"], moved=True)
    return list(found.values())


def crashed_twice(past: Sequence[Attempt]) -> int:
    """The step in which both of the last two attempts failed; 0 otherwise."""
    if len(past) < 2 or past[-1].failed_in != past[-2].failed_in:
        return 0
    return past[-1].failed_in
