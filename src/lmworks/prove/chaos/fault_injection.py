"""Faults of processes and disks, as they are done inside a rank or the writer of its saves, which has no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...record import phase
from .injection_plan import Act
from .trigger import Place, Say, Strike, Waiting

FILLER = "filler"  # takes what room is left on a disk
SMALL_FILE = 65_536  # bytes: room for a line of events, not for a shard


# --- processes ------------------------------------------------------------------------------------------


def after(act: Act, do: Callable[[], None]) -> None:
    """At once, or from a thread some milliseconds later: in the middle of whatever the phase does."""
    if not act.delay_ms:
        do()
        return
    threading.Timer(act.delay_ms / 1000, do).start()


def kill_rank(place: Place, act: Act, say: Say) -> None:
    say(f"SIGKILL to rank {act.rank}")
    after(act, lambda: os.kill(place.pid(act.rank), signal.SIGKILL))


def kill_agent(place: Place, act: Act, say: Say) -> None:
    say("SIGKILL to the agent")
    status = Path(f"/proc/{place.pid(place.rank)}/status").read_text()
    agent = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    after(act, lambda: os.kill(agent, signal.SIGKILL))


def kill_writer(place: Place, act: Act, say: Say) -> None:
    say(f"SIGKILL to the writer of rank {place.rank}")
    after(act, lambda: os.kill(os.getpid(), signal.SIGKILL))


def die(place: Place) -> None:
    """The rank, and this process of its, if it is another."""
    os.kill(place.pid(place.rank), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def sigstop(place: Place, act: Act, say: Say) -> None:
    say(f"SIGSTOP to rank {act.rank}")
    os.kill(place.pid(act.rank), signal.SIGSTOP)


def sigterm(place: Place, act: Act, say: Say) -> None:
    """As a batch system does it: to every rank."""
    say("SIGTERM to all ranks")
    others = [int(path.read_text()) for path in place.folder.glob("rank-*.pid")]
    for pid in [*(pid for pid in others if pid != os.getpid()), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def sigterm_late(place: Place, act: Act, say: Say) -> None:
    """And then the step does not come to its end."""
    sigterm(place, act, say)
    time.sleep(60)


# --- disks ----------------------------------------------------------------------------------------------


def enospc(place: Place, act: Act, say: Say) -> None:
    """Fill the small disk that the harness has put under the run folder; or, without one, allow no larger file."""
    if os.path.ismount(place.folder / "run"):
        say("tmpfs: the disk of the run is full")
        fill(place.folder / "run" / FILLER)
        return
    say(f"RLIMIT_FSIZE: rank {act.rank} may write no file beyond {SMALL_FILE} bytes")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def eio(place: Place, act: Act, say: Say) -> None:
    """The disk takes what is written and then cannot keep it, which is when a program learns of most bad sectors."""
    say(f"injected OSError: the next fsync of rank {act.rank} fails with EIO")
    fsync = os.fsync

    def failing(descriptor: Any) -> None:
        os.fsync = fsync
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.fsync = failing  # type: ignore[assignment]


def damage(change: Callable[[Path, random.Random], None], word: str) -> Callable[[Place, Act, Say], None]:
    """One file of the newest checkpoint. A running job then dies, since it is a resume that has to find it."""

    def act_on(place: Place, act: Act, say: Say) -> None:
        draw = random.Random(act.draw)
        newest = max(step_folders(place.checkpoints, act), key=lambda path: path.name.lstrip("."))
        path = draw.choice(sorted(file for file in newest.iterdir() if file.stat().st_size > 1000))
        say(f"{word} {newest.name}/{path.name}")
        change(path, draw)
        if not act.phase.startswith("load"):
            die(place)

    return act_on


def step_folders(root: Path, act: Act) -> list[Path]:
    """Until its commit a checkpoint has a hidden name."""
    mark = ".step-" if act.phase == "save.commit" else "step-"
    return [path for path in root.iterdir() if path.name.startswith(mark)]


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flip_bit(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        place = draw.randrange(path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def remove(path: Path, _draw: random.Random) -> None:
    path.unlink()


def damage_data(change: Callable[[Path, random.Random], None], word: str) -> Callable[[Place, Act, Say], None]:
    """A shard of tokens. Who has it open may read on (it is mapped), so a running job dies, and its resume must see."""

    def act_on(place: Place, act: Act, say: Say) -> None:
        draw = random.Random(act.draw)
        path = draw.choice(sorted(place.data.glob("*.bin")))
        say(f"{word} {path.name}")
        change(path, draw)
        if act.phase != "start":
            die(place)

    return act_on


FAULTS: dict[str, Strike] = {
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


def wait_in_writer(folder: Path, rank: int) -> None:
    """For `process.startup`: called in every writer before its first job."""
    phase.listeners.append(Waiting(Place(folder, rank, "writer"), FAULTS))
