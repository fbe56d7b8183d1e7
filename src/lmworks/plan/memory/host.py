"""Host memory: what this machine still has for a process, how many ranks share it, and whom the kernel has ended."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...spec import RunSpec

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group, version 2 and 1: its limit, what it uses, and of that what the page cache would give up.
UNIFIED = ("memory.max", "memory.current", ("inactive_file", "active_file"))
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
COUNTED = ("memory.events", "memory.oom_control")  # where a group counts its processes that the OOM killer ended
# Limits of one process, and the field of /proc/self/statm that counts towards each: all of its address space, or data.
PROCESS_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def ranks_on_host(spec: RunSpec) -> int:
    """As the cluster says; where it is not described, all of them."""
    world = spec.ranks
    return spec.cluster.gpus_per_node if spec.cluster.gpus == world else world


def available_bytes() -> int | None:
    """Memory that is free, or that the page cache would give up, under the limits of a container or a Slurm job.

    None where the system does not tell.
    """
    meminfo = numbers_in(PROC / "meminfo")
    if "MemAvailable:" not in meminfo:
        return None
    return max(0, min([1024 * meminfo["MemAvailable:"], *left_in_groups()]))


def left_in_groups() -> Iterator[int]:
    """Bytes below the limit of each control group that this process is in, down from the mount."""
    for place, (limit, usage, cached) in groups():
        sizes = [lines_of(place / name) for name in (limit, usage)]
        if all(sizes) and sizes[0] != ["max"]:
            stat = numbers_in(place / "memory.stat")
            yield int(sizes[0][0]) - int(sizes[1][0]) + sum(stat.get(name, 0) for name in cached)


def groups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Folders of the memory groups that this process is in, its own first, and the names of their files."""
    for line in lines_of(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, names = (CGROUPS / "memory", FIRST) if controllers else (CGROUPS, UNIFIED)
        folder = mounted / path.strip("/")
        # A container may see only its own group, as the mount, and be told its path on the machine all the same.
        for place in [folder, *(parent for parent in folder.parents if parent.is_relative_to(mounted))]:
            yield place, names


def process_bytes() -> int | None:
    """What this process alone may still take under `ulimit -v` or `-d`; None where it has no such limit."""
    limits = [(resource.getrlimit(limit)[0], field) for limit, field in PROCESS_LIMITS]
    pages = lines_of(PROC / "self" / "statm")
    if not pages:
        return None
    used = [int(count) * resource.getpagesize() for count in pages[0].split()]
    return min((max(0, most - used[field]) for most, field in limits if most != resource.RLIM_INFINITY), default=None)


def oom_kills() -> int | None:
    """Processes that the kernel's OOM killer has ended so far: in this process's own group, or else on this machine.

    None where the system does not tell.
    """
    for place, _ in groups():
        for name in COUNTED:
            if (count := numbers_in(place / name).get("oom_kill")) is not None:
                return count
    return numbers_in(PROC / "vmstat").get("oom_kill")


def numbers_in(path: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    words = (line.split() for line in lines_of(path))
    return {name: int(size) for name, size, *_ in (found for found in words if len(found) > 1)}


def lines_of(path: Path) -> list[str]:
    """Those of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
