"""What `lmworks bench collectives` is asked for: ranks, sizes, ops and groups, checked before anything starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..record.formatting import binary_bytes
from ..spec import SpecError
from ..spec.errors import did_you_mean
from ..spec.files import check_writable

if TYPE_CHECKING:
    from ..bench.collectives import Sweep

DEFAULT_SIZES = {"cpu": "1K:16M", "cuda": "1K:1G"}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
ALIASES = {"send-recv": "send", "sendrecv": "send", "alltoall": "all-to-all", "allreduce": "all-reduce"}
ALIASES |= {"allgather": "all-gather", "reducescatter": "reduce-scatter"}
BUFFERS = 2  # that a rank holds for each size


def choose_device(backend: str) -> str:
    import torch

    if backend not in ("auto", "gloo", "nccl"):
        raise SpecError(f"--backend {backend}: choose gloo or nccl")
    if backend == "nccl" and not torch.cuda.is_available():
        raise SpecError("--backend nccl: NCCL wants a GPU for each rank, and this machine has none; use --backend gloo")
    return "cuda" if backend == "nccl" or (backend == "auto" and torch.cuda.device_count() > 1) else "cpu"


def place_ranks(device: str, ranks: int | None, link: str, started: bool) -> tuple[int, int]:
    """(nodes, ranks in all)."""
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if started:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if ranks not in (None, world):
            raise SpecError(f"--ranks {ranks}: torchrun has started {world}; leave --ranks out")
        if link:
            raise SpecError("--link starts its ranks itself: leave torchrun out")
        check_gpus(device, local, gpus)
        return world // local, check_count(world)
    if link and device == "cuda":
        raise SpecError("--link shapes TCP between two namespaces of one machine: use --backend gloo")
    world = check_count(ranks if ranks is not None else gpus or 2)
    check_gpus(device, world, gpus)
    if link and world % 2:
        raise SpecError(f"--ranks {world}: a link joins two nodes with as many ranks each; use an even number")
    return (2 if link else 1), world


def check_count(world: int) -> int:
    if world < 2:
        raise SpecError(f"--ranks {world}: a collective needs at least 2 ranks")
    if world > 64 and "WORLD_SIZE" not in os.environ:
        raise SpecError(f"--ranks {world}: this command starts at most 64 on one machine; use torchrun for more")
    return world


def check_gpus(device: str, local: int, gpus: int) -> None:
    if device == "cuda" and local > gpus:
        raise SpecError(
            f"--backend nccl: NCCL wants a GPU for each rank: {local} ranks, and this machine has {gpus}; "
            "use fewer ranks or --backend gloo"
        )


def make_sweep(
    device: str,
    sizes: str,
    ops: str,
    dtypes: str,
    groups: str,
    rounds: int,
    seconds: float,
    world: int,
    nodes: int,
) -> Sweep:
    from ..bench.collective_ops import DTYPES, OPS
    from ..bench.collectives import DEFAULT_DTYPE, Sweep

    chosen = tuple(name for name in (ALIASES.get(word, word) for word in words(ops.replace("_", "-")))) or OPS
    kinds = tuple(words(dtypes)) or (DEFAULT_DTYPE[device],)
    for option, names, known in (("--ops", chosen, OPS), ("--dtypes", kinds, tuple(DTYPES))):
        for name in names:
            if name not in known:
                raise SpecError(f"{option}: there is no {name!r}{did_you_mean(name, known)}")
    return Sweep(
        device,
        parse_sizes(sizes or DEFAULT_SIZES[device]),
        chosen,
        kinds,
        groups=parse_groups(groups, world, nodes),
        rounds=rounds,
        point_s=seconds,
    )


def words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))


def parse_groups(text: str, world: int, nodes: int) -> tuple[str, ...]:
    """By default all ranks; on several nodes the groups inside them and between them apart."""
    names = words(text)
    if not names:
        return ("all",) if nodes == 1 else ("inter",) if world == nodes else ("intra", "inter", "all")
    for name in names:
        if name.isdecimal() and 2 <= int(name) <= world:
            continue
        if name not in ("all", "intra", "inter"):
            raise SpecError(f"--groups {name}: use all, intra, inter, or a number of ranks from 2 to {world}")
        if name == "inter" and nodes == 1:
            raise SpecError("--groups inter: all ranks are on one node; use --link, or torchrun on several nodes")
        if name == "intra" and world == nodes:
            raise SpecError("--groups intra: every node has one rank; use more --ranks")
    return tuple(names)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1K:1G` from … to, times 4; `1K:1G:2` times 2; `1K,64K,1M` a list."""
    if ":" in text:
        ends = text.split(":")
        first, last = (parse_size(word, text) for word in ends[:2])
        factor = ends[2] if len(ends) == 3 else "4"
        if len(ends) > 3 or not re.fullmatch(r"\d+", factor) or int(factor) < 2:
            raise SpecError(f"--sizes {text}: write FROM:TO or FROM:TO:FACTOR with a factor from 2, e.g. 1K:1G:2")
        if first > last:
            raise SpecError(f"--sizes {text}: {ends[0]} is more than {ends[1]}")
        found = [first]
        while found[-1] * int(factor) <= last:
            found.append(found[-1] * int(factor))
        return tuple(found)
    return tuple(sorted({parse_size(word, text) for word in text.split(",")}))


def parse_size(word: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)I?B?", word.strip().upper())
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if not 1 <= size <= 2**40:
        raise SpecError(f"--sizes {text}: {word.strip()!r} is no size; write e.g. 1K:1G or 4K,64K,1M")
    return size


def check_memory(sweep: Sweep, local: int) -> None:
    from ..plan.memory.host import available_bytes

    needed = (BUFFERS * sum(sweep.sizes) + 2 * max(sweep.sizes)) * local  # the largest is checked
    there = available_bytes()
    if sweep.device == "cpu" and there is not None and needed > there:
        raise SpecError(
            f"--sizes: {local} ranks with messages up to {binary_bytes(max(sweep.sizes))} need about "
            f"{binary_bytes(needed)}, and {binary_bytes(there)} are free; use smaller messages"
        )


def check_outputs(sweep: Sweep, profile: Path | None, plot: Path | None, out: Path | None) -> None:
    """Before the work."""
    import torch

    from ..bench.link_profile import check_profile
    from ..plan.devices.profile import load_profile
    from ..report.plots import check_plot_path

    if profile is not None:
        if not profile.exists():
            raise SpecError(f"--profile {profile} is not there; write it with `lmworks plan calibrate --out {profile}`")
        check_profile(load_profile(profile), torch.device(sweep.device), sweep.ops)
        if len(sweep.sizes) < 2:
            raise SpecError("--profile: a plan needs at least two --sizes")
        check_writable(profile, "--profile")
    if plot is not None:
        check_plot_path(plot, "--plot")
    if out is not None:
        check_writable(out, "--out")
