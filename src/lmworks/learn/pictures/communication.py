"""Pictures of communication: collectives, their cost, overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...plan.collective_algorithms.costs import Group, algorithms, cost
from ...record.formatting import binary_bytes, duration
from ...spec.hardware import parse_cluster
from ..drawing import Drawing
from .training import Axes


def all_reduce_by_size() -> Drawing:
    """By the planner's algorithms."""
    picture, ranks = Drawing(640, 340), 1024
    cluster = parse_cluster(f"{ranks}xh100")
    gpu = cluster.accelerator
    assert gpu is not None
    group = Group.of(cluster, gpu, ranks)
    axes = Axes(picture, 76, 34, 424, 240, (2.0**10, 2.0**34), (1e-5, 1.0))
    axes.frame(
        [(2.0**power, binary_bytes(2.0**power)) for power in (10, 16, 22, 28, 34)],
        [(10.0**power, duration(10.0**power)) for power in (-5, -4, -3, -2, -1, 0)],
    )
    sizes = [2.0 ** (10 + step / 2) for step in range(49)]
    for one in algorithms("all_reduce"):
        if one.name not in ("ring", "double_tree", "in_network"):
            continue
        points = [(size, float(cost(group, "all_reduce", one, size).seconds)) for size in sizes]
        axes.curve(points)
        across, up = axes.at(*points[-1])
        down = {"ring": -8, "double_tree": 6, "in_network": 22}[one.name]
        picture.text(across + 8, up + down, one.name.replace("_", " "), anchor="start")
    for words, x, y in (("rounds · α: 2,046 of the ring", 90, 132), ("bytes · β", 352, 226)):
        picture.text(x, y, words, anchor="start")
    picture.text(14, 20, "time of an all-reduce", anchor="start")
    picture.text(288, 318, f"bytes of the buffer, {ranks:,} H100")
    return picture


@dataclass(frozen=True)
class Op:
    """On a stream; it begins when the one before it there and those in `after` are done."""

    name: str
    stream: str
    length: float
    after: tuple[str, ...] = ()


def begins(ops: Sequence[Op]) -> dict[str, float]:
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    for one in ops:
        start = max([free.get(one.stream, 0.0), *(ends[name] for name in one.after)])
        free[one.stream] = ends[one.name] = start + one.length
    return {one.name: ends[one.name] - one.length for one in ops}


# Three blocks: a backward pass takes twice the forward pass, an all-reduce twice an all-gather.
DDP = (
    *(Op(f"F{block}", "compute", 1.0) for block in (1, 2, 3)),
    *(Op(f"B{block}", "compute", 2.0) for block in (3, 2, 1)),
    *(Op(f"AR{block}", "NCCL", 1.6, (f"B{block}",)) for block in (3, 2, 1)),
)
FSDP = (
    Op("AG1", "NCCL", 0.8),
    Op("F1", "compute", 1.0, ("AG1",)),
    Op("AG2", "NCCL", 0.8),
    Op("F2", "compute", 1.0, ("AG2",)),
    Op("AG3", "NCCL", 0.8, ("F1",)),
    Op("F3", "compute", 1.0, ("AG3",)),
    Op("AG3'", "NCCL", 0.8, ("F3",)),
    Op("AG2'", "NCCL", 0.8),
    Op("B3", "compute", 2.0, ("AG3'",)),
    Op("B2", "compute", 2.0, ("AG2'",)),
    Op("RS3", "NCCL", 0.8, ("B3",)),
    Op("AG1'", "NCCL", 0.8),
    Op("B1", "compute", 2.0, ("AG1'",)),
    Op("RS2", "NCCL", 0.8, ("B2",)),
    Op("RS1", "NCCL", 0.8, ("B1",)),
)
SHADES = {"F": "blue", "B": "green", "AG": "purple", "RS": "red", "AR": "red"}


def ddp_and_fsdp_step() -> Drawing:
    picture, second = Drawing(640, 254), 39.0
    for top, title, ops in ((26, "DDP", DDP), (132, "FSDP, ZeRO-3", FSDP)):
        picture.text(14, top - 6, title, anchor="start", bold=True)
        for row, stream in enumerate(("compute", "NCCL")):
            picture.text(72, top + 24 + row * 36, stream, anchor="end")
        for one, start in zip(ops, begins(ops).values(), strict=True):
            y = top + 6 + 36 * (one.stream == "NCCL")
            shade = SHADES[one.name.rstrip("123'")]
            picture.box(80 + start * second, y, one.length * second, 28, one.name, shade=shade, size=11)
    picture.text(80, 228, "AG all-gather of weights, RS reduce-scatter of gradients, AR all-reduce", anchor="start")
    picture.text(80, 246, "' for the backward pass. A message that stands under no compute is exposed.", anchor="start")
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {one.__name__: one for one in (all_reduce_by_size, ddp_and_fsdp_step)}
