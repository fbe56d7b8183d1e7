"""Cores and GPUs of this machine, each given to one trial at a time.

A slot is a kernel lock on a file that stands for one core, or one share of a GPU. All sweeps of a user on this machine
use the same files, so drivers that know nothing of each other do not overcommit it; a killed process frees what it had.
The file names the sweep that has it, for those who wait.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..record.folder import try_lock
from ..spec import SpecError
from ..spec.files import cache_root

DEVICES = Path("/dev")


@dataclass(frozen=True)
class Resources:
    """What this process may use: its CPU affinity and its visible GPUs."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    trials_per_gpu: int = 1
    allocated: bool = False  # a scheduler has given these GPUs to this process alone, by whatever numbers

    def workers(self, ranks: int, threads: int) -> int:
        """Trials of `ranks` ranks with `threads` threads each that fit at once; at least one, which may not fit."""
        by_cores = len(self.cores) // (ranks * threads)
        by_gpus = len(self.gpus) * self.trials_per_gpu // ranks if self.gpus else by_cores
        return max(1, min(by_cores, by_gpus))

    def check(self, workers: int, ranks: int, threads: int) -> None:
        """Refuse more workers than there are cores and GPUs for."""
        cores = workers * ranks * threads
        if cores > len(self.cores):
            each = f"{ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)}"
            raise SpecError(
                f"--workers {workers} with {each} a trial need {cores} cores, and there are {len(self.cores)}; "
                + (f"--workers {fit} fits" if (fit := len(self.cores) // (ranks * threads)) else "no trial fits")
            )
        shares = len(self.gpus) * self.trials_per_gpu
        if self.gpus and workers * ranks > shares:
            raise SpecError(
                f"--workers {workers} with {ranks} rank{'s' * (ranks > 1)} a trial need {workers * ranks} GPUs, and "
                f"there are {shares}; --trials-per-gpu lets trials share one"
            )


def own_resources(gpus: tuple[str, ...] = (), trials_per_gpu: int = 1, allocated: bool = False) -> Resources:
    return Resources(tuple(sorted(os.sched_getaffinity(0))), gpus, trials_per_gpu, allocated)


def visible_gpus() -> tuple[str, ...]:
    """Without a CUDA context, which no process that forks may have."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in named.split(",") if name and name != "-1")
    return tuple(map(str, range(len(list(DEVICES.glob("nvidia[0-9]*"))))))


@dataclass
class Slots:
    """Cores and GPUs of one trial, until `release`."""

    cores: list[int]
    gpus: list[str]
    descriptors: list[int]

    def release(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def take_slots(resources: Resources, cores: int, gpus: int, owner: Path) -> Slots | None:
    """That many for the sweep `owner`, or none: None where others have too many of them."""
    held = Slots([], [], [])
    for core in resources.cores:
        if len(held.cores) < cores and (descriptor := lock(core_file(core), owner)) is not None:
            held.cores.append(core)
            held.descriptors.append(descriptor)
    for share in range(resources.trials_per_gpu):
        for gpu in resources.gpus:
            if len(held.gpus) == gpus or gpu in held.gpus:
                continue
            descriptor = None if resources.allocated else lock(gpu_file(gpu, share), owner)
            if descriptor is not None:
                held.descriptors.append(descriptor)
            if descriptor is not None or resources.allocated:
                held.gpus.append(gpu)
    if len(held.cores) < cores or len(held.gpus) < gpus:
        held.release()
        return None
    return held


def missing_resources(resources: Resources, cores: int, gpus: int, owner: Path) -> str:
    """Why a trial of `owner` finds no such slots now: "2 cores: held by sweeps/lr"; empty where it does, or where only
    trials of its own sweep are in the way."""
    shares = range(resources.trials_per_gpu)
    of_cores = [[holder(core_file(core))] for core in resources.cores]
    of_gpus = [[holder(gpu_file(gpu, share)) for share in shares] for gpu in resources.gpus]
    for kind, needed, units in (("core", cores, of_cores), ("GPU", gpus, of_gpus)):
        holders = {one for unit in units for one in unit} - {None, str(owner.resolve())}
        if sum(None in unit for unit in units) < needed and holders:
            said = " and ".join(sorted(map(shown, filter(None, holders)))) or "another sweep"
            return f"{needed} {kind}{'s' * (needed > 1)}: held by {said}"
    return ""


def holder(name: str) -> str | None:
    """The folder of the sweep that has this slot, empty where it did not say; None where nobody has it."""
    try:
        descriptor = os.open(slots_folder() / name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if try_lock(descriptor, fcntl.LOCK_SH) is False:
            return os.pread(descriptor, 4096, 0).decode(errors="replace")
        return None
    finally:
        os.close(descriptor)


def shown(folder: str) -> str:
    """As the user would name it from here."""
    path = Path(folder)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else folder


def lock(name: str, owner: Path) -> int | None:
    """The descriptor that holds it, which processes forked from this one share; None where it is taken."""
    folder = slots_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    if try_lock(descriptor, fcntl.LOCK_EX) is False:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(owner.resolve()).encode(), 0)
    return descriptor


def core_file(core: int) -> str:
    return f"core-{core}"


def gpu_file(gpu: str, share: int) -> str:
    return f"gpu-{gpu}-{share}".replace("/", "-")


def slots_folder() -> Path:
    """Of this user on this machine; machines may share the cache."""
    return cache_root() / "slots" / socket.gethostname()
