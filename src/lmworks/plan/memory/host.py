"""Host memory: what this machine still has for a process, and how many ranks share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...spec import RunSpec

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group, version 2 and 1: its limit, what it uses, and of that what the page cache would give up.
UNIFIED = ("memory.max", "memory.current", ("inactive_file", "active_file"))
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def ranks_on_host(spec: RunSpec) -> int:
    """As the cluster says; where it is not described, all of them."""
    world = spec.parallel.world
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
    for line in lines_of(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted, (limit, usage, cached) = (CGROUPS / "memory", FIRST) if controllers else (CGROUPS, UNIFIED)
        folder = mounted / path.strip("/")
        # A container may see only its own group, as the mount, and be told its path on the machine all the same.
        for place in [folder, *(parent for parent in folder.parents if parent.is_relative_to(mounted))]:
            sizes = [lines_of(place / name) for name in (limit, usage)]
            if all(sizes) and sizes[0] != ["max"]:
                stat = numbers_in(place / "memory.stat")
                yield int(sizes[0][0]) - int(sizes[1][0]) + sum(stat.get(name, 0) for name in cached)


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
