"""The faults themselves, as they are done inside a rank (or by it to another process of its job)."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...record import phase
from ...train import Trainer
from .acts import Act

WRITER = "lmworks-writer"  # what the process that writes an asynchronous save calls itself
FILLER = "filler"  # takes what room is left on a disk
SMALL_FILE = 65_536  # bytes: room for a line of events, not for a shard
SLOW_S = 0.08  # many times what a phase of the tiny job takes


@dataclass
class Place:
    """What a fault may need to know: where the job's files are, and the trainer it is in."""

    folder: Path
    rank: int
    trainer: Trainer | None = None  # from the time it is built

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

    @property
    def built(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("a fault in the numbers strikes before there are any")
        return self.trainer


def strike(place: Place, act: Act, mark: Path) -> None:
    """Do it. What is done stands in `mark` before: some of these do not come back."""
    FAULTS[act.fault](place, act, lambda words: mark.write_text(words, encoding="utf-8"))


Say = Callable[[str], Any]


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
    agent = os.getppid()
    after(act, lambda: os.kill(agent, signal.SIGKILL))


def kill_writer(place: Place, act: Act, say: Say) -> None:
    pids = [pid for pid in children_of(place.pid(act.rank)) if name_of(pid) == WRITER]
    say(f"SIGKILL to the writer of rank {act.rank}" if pids else f"rank {act.rank} has no writer")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


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


def slow(place: Place, act: Act, say: Say) -> None:
    """From now on this rank needs longer for this phase."""
    say(f"rank {act.rank} is slow")

    def sleeping(name: str, _step: int) -> None:
        if name == act.phase:
            time.sleep(SLOW_S)

    phase.listeners.append(sleeping)


def mismatch(place: Place, act: Act, say: Say) -> None:
    """One rank calls a collective that the others do not."""
    say(f"rank {act.rank} calls an all_gather of its own")
    dist.all_gather([torch.zeros(7) for _ in range(dist.get_world_size())], torch.zeros(7))


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # a process belongs to the thread that started it
    return [int(child) for task in tasks for child in task.read_text().split()]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


# --- disks ----------------------------------------------------------------------------------------------


def enospc(place: Place, act: Act, say: Say) -> None:
    """Fill the small disk that the harness has put under the run folder; or, without one, allow no larger file."""
    if os.path.ismount(place.folder / "run"):
        say("tmpfs: the disk of the run is full")
        fill(place.folder / "run" / FILLER)
        return
    say(f"RLIMIT_FSIZE: rank {act.rank} may write no file beyond {SMALL_FILE} bytes")
    for pid in (os.getpid(), *children_of(os.getpid())):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE, hard))


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
        newest = max(step_folders(place.checkpoints), key=lambda path: path.name.lstrip("."))
        path = draw.choice(sorted(file for file in newest.iterdir() if file.stat().st_size > 1000))
        say(f"{word} {newest.name}/{path.name}")
        change(path, draw)
        if not act.phase.startswith("load"):
            os.kill(os.getpid(), signal.SIGKILL)

    return act_on


def step_folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.lstrip(".").startswith("step-") and path.is_dir()]


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
            os.kill(os.getpid(), signal.SIGKILL)

    return act_on


# --- numbers --------------------------------------------------------------------------------------------


def nan_loss(place: Place, act: Act, say: Say) -> None:
    """What a block gives is not a number, for the rest of this step: a rerun of it finds the same."""
    say(f"NaN in the forward pass of rank {act.rank}")
    blocks = [block for part in place.built.laid.parts.values() for block in part.blocks.values()]
    now = phase.step

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * torch.nan if phase.step == now and isinstance(output, torch.Tensor) else output

    random.Random(act.draw).choice(blocks).register_forward_hook(spoil)


def nan_gradient(place: Place, act: Act, say: Say) -> None:
    """One number of one gradient, when all of them are whole."""
    say(f"NaN in a gradient of rank {act.rank}")
    laid, finish = place.built.laid, place.built.laid.finish
    draw, now = random.Random(act.draw), phase.step

    def spoiled() -> None:
        finish()
        if phase.step == now:
            gradient = draw.choice([s.leaf.grad for s in laid.shards if s.leaf.grad is not None and s.leaf.numel()])
            numbers(gradient)[draw.randrange(numbers(gradient).numel())] = torch.nan

    laid.finish = spoiled  # type: ignore[method-assign]


def flip_parameter(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of a parameter of rank {act.rank}")
    flip_number([shard.leaf for shard in place.built.laid.shards], act)


def flip_gradient(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of a gradient of rank {act.rank}")
    flip_number([shard.leaf.grad for shard in place.built.laid.shards if shard.leaf.grad is not None], act)


def flip_optimizer(place: Place, act: Act, say: Say) -> None:
    say(f"a bit of the optimizer's state of rank {act.rank}")
    states = place.built.optimizer.state.values()
    flip_number([value for state in states for key, value in state.items() if key.startswith("exp_avg")], act)


def flip_number(tensors: list[torch.Tensor], act: Act) -> None:
    """The highest bit of a mantissa: the number is another one, and still a number."""
    draw = random.Random(act.draw)
    with torch.no_grad():
        bits = numbers(draw.choice(tensors)).view(torch.int32)
        bits[draw.randrange(bits.numel())] ^= 1 << 22


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor (of this rank's part of it) in one row."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


FAULTS: dict[str, Callable[[Place, Act, Say], None]] = {
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
    "nan-loss": nan_loss,
    "nan-gradient": nan_gradient,
    "flip-parameter": flip_parameter,
    "flip-gradient": flip_gradient,
    "flip-optimizer": flip_optimizer,
    "slow": slow,
    "mismatch": mismatch,
    "data-missing": damage_data(remove, "removed"),
    "data-corrupt": damage_data(flip_bit, "flipped a bit of"),
}
