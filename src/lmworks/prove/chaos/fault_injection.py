"""Fault injection: what a job is to suffer (a file that every rank reads: fault, phase, step, rank), the trigger that
injects a fault at its phase and step, and the injectors of process and disk faults.

All of it runs inside a rank, or inside its checkpoint writer, which has no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...record import phase

FILE = "injections.json"
FILLER = "filler"  # a file that takes all free space of a disk
SMALL_FILE = 65_536  # bytes: enough for a line of events.jsonl, not for a shard


@dataclass(frozen=True)
class Injection:
    """One fault to inject. Injections of a job are ordered: the second waits for the first, across attempts."""

    fault: str
    phase: str
    step: int = 0  # 0: the first occurrence of the phase
    rank: int = 0  # the target
    delay_ms: float = 0.0  # after the entry of the phase, for external faults
    seed: int = 0  # of random choices at injection time: a file, a byte, a weight
    process: str = "rank"  # that runs the phase: the rank itself, or "writer", its asynchronous checkpoint writer

    @property
    def trigger_rank(self) -> int:
        """The rank whose process runs the phase: of the writers, only rank 0's seals and commits."""
        return 0 if self.process == "writer" and self.phase != "save.write" else self.rank


def write_injections(folder: Path, injections: Sequence[Injection]) -> None:
    (folder / FILE).write_text(json.dumps([asdict(injection) for injection in injections], indent=1), encoding="utf-8")


def read_injections(folder: Path) -> list[Injection]:
    return [Injection(**injection) for injection in json.loads((folder / FILE).read_text(encoding="utf-8"))]


def done_marker(folder: Path, index: int) -> Path:
    """A file that exists once injection number `index` was made; it holds a description."""
    return folder / f"injection-{index}.done"


def injections_done(folder: Path) -> list[str]:
    """Descriptions of the injections made so far, in order."""
    markers = [done_marker(folder, index) for index in range(len(read_injections(folder)))]
    return [marker.read_text(encoding="utf-8") for marker in markers if marker.exists()]


# --- trigger ---------------------------------------------------------------------------------------------


@dataclass
class ProcessContext:
    """The folder of the job, and which process of it this is."""

    folder: Path
    rank: int
    process: str = "rank"  # or "writer": its asynchronous checkpoint writer
    trainer: Any = None  # set once a rank has built it

    def pid_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pid"

    def pid(self, rank: int) -> int:
        return int(self.pid_file(rank).read_text())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    @property
    def data(self) -> Path:
        return self.folder / "data"


Announce = Callable[[str], None]
Injector = Callable[[ProcessContext, Injection, Announce], None]


class FaultTrigger:
    """A listener of `record.phase` that makes each injection once."""

    def __init__(self, context: ProcessContext, injectors: Mapping[str, Injector]) -> None:
        self.context, self.injectors = context, injectors
        self.injections = list(enumerate(read_injections(context.folder)))

    def __call__(self, name: str, step: int) -> None:
        while self.injections and done_marker(self.context.folder, self.injections[0][0]).exists():
            self.injections.pop(0)
        if not self.injections:
            return
        index, injection = self.injections[0]
        here = (injection.process, injection.trigger_rank) == (self.context.process, self.context.rank)
        if not here or injection.phase != name or injection.step not in (0, step):
            return
        self.injections.pop(0)
        marker = done_marker(self.context.folder, index)
        # Injectors announce before they act: some faults do not return.
        self.injectors[injection.fault](self.context, injection, lambda text: write_atomically(marker, text))


def write_atomically(marker: Path, text: str) -> None:
    """Readers of the marker see all of it or nothing."""
    partial = marker.with_suffix(f".{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(marker)


# --- injectors: processes ---------------------------------------------------------------------------------


def after_delay(injection: Injection, do: Callable[[], None]) -> None:
    """Run `do` at once, or `delay_ms` later from a thread, in the middle of the phase."""
    if not injection.delay_ms:
        do()
        return
    threading.Timer(injection.delay_ms / 1000, do).start()


def kill_rank(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"SIGKILL to rank {injection.rank}")
    after_delay(injection, lambda: os.kill(context.pid(injection.rank), signal.SIGKILL))


def kill_agent(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce("SIGKILL to the agent")
    status = Path(f"/proc/{context.pid(context.rank)}/status").read_text()
    agent = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    after_delay(injection, lambda: os.kill(agent, signal.SIGKILL))


def kill_writer(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"SIGKILL to the writer of rank {context.rank}")
    after_delay(injection, lambda: os.kill(os.getpid(), signal.SIGKILL))


def kill_self(context: ProcessContext) -> None:
    """Kill the rank, and this process if it is the rank's writer."""
    os.kill(context.pid(context.rank), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def sigstop(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    announce(f"SIGSTOP to rank {injection.rank}")
    os.kill(context.pid(injection.rank), signal.SIGSTOP)


def sigterm(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """As a batch system sends it: to every rank."""
    announce("SIGTERM to all ranks")
    others = [int(path.read_text()) for path in context.folder.glob("rank-*.pid")]
    for pid in [*(pid for pid in others if pid != os.getpid()), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def sigterm_late(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """The step does not end within the deadline."""
    sigterm(context, injection, announce)
    time.sleep(60)


# --- injectors: disks -------------------------------------------------------------------------------------


def enospc(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """Fill the small tmpfs that the harness mounted at the run folder; without one, limit the size of files."""
    if os.path.ismount(context.folder / "run"):
        announce("tmpfs: the disk of the run is full")
        fill_disk(context.folder / "run" / FILLER)
        return
    announce(f"RLIMIT_FSIZE: rank {injection.rank} may write no file beyond {SMALL_FILE} bytes")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill_disk(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def eio(context: ProcessContext, injection: Injection, announce: Announce) -> None:
    """Writes succeed and fsync fails: programs learn of most bad sectors at fsync."""
    announce(f"injected OSError: the next fsync of rank {injection.rank} fails with EIO")
    fsync = os.fsync

    def fail_once(descriptor: Any) -> None:
        os.fsync = fsync
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.fsync = fail_once  # type: ignore[assignment]


def damage(
    change: Callable[[Path, random.Random], None], word: str
) -> Callable[[ProcessContext, Injection, Announce], None]:
    """Damage one file of the newest checkpoint. A running job is then killed, because a resume must detect it."""

    def inject(context: ProcessContext, injection: Injection, announce: Announce) -> None:
        draw = random.Random(injection.seed)
        newest = max(step_folders(context.checkpoints, injection), key=lambda path: path.name.lstrip("."))
        path = draw.choice(sorted(file for file in newest.iterdir() if file.stat().st_size > 1000))
        announce(f"{word} {newest.name}/{path.name}")
        change(path, draw)
        if not injection.phase.startswith("load"):
            kill_self(context)

    return inject


def step_folders(root: Path, injection: Injection) -> list[Path]:
    """A checkpoint has a hidden name until its commit."""
    mark = ".step-" if injection.phase == "save.commit" else "step-"
    return [path for path in root.iterdir() if path.name.startswith(mark)]


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flip_bit(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        offset = draw.randrange(path.stat().st_size)
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def remove(path: Path, _draw: random.Random) -> None:
    path.unlink()


def damage_data(
    change: Callable[[Path, random.Random], None], word: str
) -> Callable[[ProcessContext, Injection, Announce], None]:
    """Damage a shard of tokens. A running job has it mapped, so it is killed, and its resume must detect the damage."""

    def inject(context: ProcessContext, injection: Injection, announce: Announce) -> None:
        draw = random.Random(injection.seed)
        path = draw.choice(sorted(context.data.glob("*.bin")))
        announce(f"{word} {path.name}")
        change(path, draw)
        if injection.phase != "start":
            kill_self(context)

    return inject


INJECTORS: dict[str, Injector] = {
    "kill-rank": kill_rank,
    "kill-agent": kill_agent,
    "kill-writer": kill_writer,
    "shrink": kill_rank,
    "sigstop": sigstop,
    "sigterm": sigterm,
    "sigterm-late": sigterm_late,
    "enospc": enospc,
    "eio": eio,
    "truncate": damage(truncate, "truncated"),
    "flip": damage(flip_bit, "flipped a bit of"),
    "missing": damage(remove, "removed"),
    "data-missing": damage_data(remove, "removed"),
    "data-corrupt": damage_data(flip_bit, "flipped a bit of"),
}


def install_in_writer(folder: Path, rank: int) -> None:
    """For `writer_client.startup`: called in every writer process before its first job."""
    phase.listeners.append(FaultTrigger(ProcessContext(folder, rank, "writer"), INJECTORS))
