"""The pictures of docs/parallelism.md: what each parallelism cuts, who talks to whom, and what schedules do when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lmworks.parallel.ring_attention import chunk_starts
from lmworks.plan.pipelines.schedule import actions, durations, simulate, stage_times
from lmworks.report.plots import draw_timeline
from lmworks.spec import Grid
from lmworks.spec.run import SCHEDULES

RANKS = ("#7fb3e6", "#f0b27a", "#9fd3a1", "#c9a7dd")  # one colour a rank
INK, PALE = "#333333", "#ececec"
matplotlib.rcParams |= {"svg.hashsalt": "lmworks", "svg.fonttype": "none", "font.family": "sans-serif"}


@contextmanager
def picture(folder: Path, name: str, width: float, height: float) -> Iterator[Any]:
    """An empty sheet with one unit an inch, saved when it is done."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    yield axes
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"parallel-{name}.svg", metadata={"Date": None})


def box(
    axes: Any, x: float, y: float, w: float, h: float, colour: str = PALE, label: str = "", size: float = 9
) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=1.5))
    if label:
        text(axes, x + w / 2, y + h / 2, label, size)


def text(axes: Any, x: float, y: float, words: str, size: float = 9, align: str = "center") -> None:
    axes.text(x, y, words, ha=align, va="center", fontsize=size, color=INK)


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], both: bool = False, bend: float = 0) -> None:
    shape = {"arrowstyle": "<|-|>" if both else "-|>", "connectionstyle": f"arc3,rad={bend}"}
    axes.add_patch(FancyArrowPatch(begin, end, **shape, mutation_scale=10, color=INK, linewidth=1))


def draw_mesh(folder: Path) -> None:
    """pp 2 × dp 2 × tp 2, as `spec.Grid` numbers them."""
    grid = Grid(pp=2, dp_shard=2, tp=2)
    with picture(folder, "mesh", 8.2, 3.5) as axes:
        where: dict[int, tuple[float, float]] = {}
        for rank in range(grid.world):
            place = grid.coordinates(rank)
            x, y = 1.1 + 3.9 * place["pp"] + 1.45 * place["tp"], 2.05 - 1.35 * place["dp_shard"]
            where[rank] = x, y
            box(axes, x, y, 0.95, 0.7, RANKS[place["tp"] + 2 * place["pp"]], f"rank {rank}", 10)
        for first, second in grid.groups("tp"):
            (x, y), (x2, _) = where[first], where[second]
            arrow(axes, (x + 0.95, y + 0.35), (x2, y + 0.35), both=True)
            text(axes, (x + 0.95 + x2) / 2, y + 0.53, "tp", 8)
        for first, second in grid.groups("dp_shard"):
            (x, y), (_, y2) = where[first], where[second]
            arrow(axes, (x + 0.47, y), (x + 0.47, y2 + 0.7), both=True)
            text(axes, x + 0.68, (y + y2 + 0.7) / 2, "dp", 8)
        for first, second in grid.groups("pp"):
            (x, y), (x2, y2) = where[first], where[second]
            up = 1 if first < 2 else -1
            edge = 0.7 if up > 0 else 0
            lift = 0.22 if first % 2 else 0
            arrow(axes, (x + 0.47, y + edge), (x2 + 0.47, y2 + edge), both=True, bend=-up * (0.09 + lift * 0.3))
        text(axes, 2.3, 3.3, "stage 0", 10)
        text(axes, 6.2, 3.3, "stage 1", 10)
        text(axes, 4.1, 3.3, "pp", 8)
        text(axes, 4.1, 0.17, "pp", 8)
        text(axes, 0.55, 2.4, "data A")
        text(axes, 0.55, 1.05, "data B")


def draw_data(folder: Path) -> None:
    """What one rank of four holds: parameters, gradients, two moments; pale is held by others."""
    rows = [("DDP", (1, 1, 1)), ("ZeRO-1", (1, 1, 4)), ("ZeRO-2", (1, 4, 4)), ("ZeRO-3, FSDP", (4, 4, 4))]
    parts = [("parameters 4ψ", 1.0), ("gradients 4ψ", 1.0), ("AdamW's moments 8ψ", 2.0)]
    with picture(folder, "data", 8.2, 2.7) as axes:
        x = 1.5
        for label, width in parts:
            text(axes, x + width * 0.75, 2.5, label)
            x += width * 1.5 + 0.1
        for row, (name, cuts) in enumerate(rows):
            x, y = 1.5, 1.85 - 0.55 * row
            text(axes, 1.4, y + 0.2, name, 10, "right")
            for (_, width), cut, colour in zip(parts, cuts, RANKS, strict=False):
                whole = width * 1.5
                box(axes, x, y, whole, 0.4)
                box(axes, x, y, whole / cut, 0.4, colour)
                x += whole + 0.1


def draw_tensor(folder: Path) -> None:
    """One MLP over two ranks."""
    with picture(folder, "tensor", 8.2, 3.0) as axes:
        for rank in range(2):
            y, colour = 1.65 - 1.35 * rank, RANKS[rank]
            text(axes, 0.45, y + 0.45, f"rank {rank}", 10)
            box(axes, 0.95, y, 0.8, 0.9, PALE, "x\nwhole", 8)
            arrow(axes, (1.8, y + 0.45), (2.25, y + 0.45))
            box(axes, 2.3, y, 1.0, 0.9)
            box(axes, 2.3 + 0.5 * rank, y, 0.5, 0.9, colour)
            text(axes, 2.8, y + 0.45, "up", 8)
            arrow(axes, (3.35, y + 0.45), (3.75, y + 0.45))
            box(axes, 3.8, y + 0.1, 0.75, 0.7, colour, "its ffn\nf / t", 8)
            arrow(axes, (4.6, y + 0.45), (5.0, y + 0.45))
            box(axes, 5.05, y, 0.8, 0.9)
            box(axes, 5.05, y + (0.45 if rank == 0 else 0), 0.8, 0.45, colour)
            text(axes, 5.45, y + 0.45, "down", 8)
            arrow(axes, (5.9, y + 0.45), (6.4, y + 0.45))
            box(axes, 7.25, y, 0.8, 0.9, PALE, "y\nwhole", 8)
        axes.add_patch(Rectangle((6.42, 0.3), 0.5, 2.25, facecolor="#fff3c4", edgecolor=INK, linewidth=0.8))
        axes.text(6.67, 1.42, "leave: sum over ranks", ha="center", va="center", fontsize=9, color=INK, rotation=90)
        for rank in range(2):
            arrow(axes, (6.94, 2.1 - 1.35 * rank), (7.22, 2.1 - 1.35 * rank))
        text(axes, 2.8, 2.75, "cut by output", 8)
        text(axes, 5.45, 2.75, "cut by input", 8)


def draw_context(folder: Path) -> None:
    """Causal scores of 8 chunks over 4 ranks by the rank that computes them, and Ulysses' trade."""
    cp, unit = 4, 0.36
    owner = {start: rank for rank in range(cp) for start in chunk_starts(rank, cp, 1)}
    with picture(folder, "context", 8.2, 4.0) as axes:
        text(axes, 2.1, 3.8, "ring: who computes which scores", 10)
        for query in range(2 * cp):
            y = 3.15 - unit * query
            text(axes, 0.42, y + unit / 2, f"{query}", 8)
            text(axes, 0.7 + unit * (query + 0.5), 0.45, f"{query}", 8)
            for key in range(query + 1):
                box(axes, 0.7 + unit * key, y, unit, unit, RANKS[owner[query]])
        text(axes, 2.1, 0.22, "chunk of keys", 8)
        axes.text(0.17, 2.1, "chunk of queries", ha="center", va="center", fontsize=8, color=INK, rotation=90)
        for rank in range(cp):
            early, late = chunk_starts(rank, cp, 1)
            box(axes, 2.75, 3.25 - 0.3 * rank, 0.25, 0.22, RANKS[rank])
            text(axes, 3.07, 3.36 - 0.3 * rank, f"rank {rank}: chunks {early} and {late}", 8, "left")
        text(axes, 6.5, 3.8, "Ulysses: positions for heads", 10)
        for rank in range(cp):
            box(axes, 5.2, 2.75 - 0.4 * rank, 1.0, 0.4, RANKS[rank])
            box(axes, 6.95 + 0.25 * rank, 1.55, 0.25, 1.6, RANKS[rank])
        arrow(axes, (6.28, 2.35), (6.87, 2.35), both=True)
        text(axes, 6.58, 2.55, "all-to-all", 8)
        text(axes, 5.7, 1.35, "heads →", 8)
        text(axes, 7.45, 1.35, "heads →", 8)
        axes.text(5.05, 2.35, "← positions", ha="center", va="center", fontsize=8, color=INK, rotation=90)
        text(axes, 5.7, 3.3, "outside attention", 8)
        text(axes, 7.45, 3.3, "in attention", 8)


def draw_expert(folder: Path) -> None:
    """Two ranks, four experts."""
    with picture(folder, "expert", 8.2, 2.7) as axes:
        goals = [(0, 1), (0, 0), (1, 0), (1, 1)]
        for rank in range(2):
            y, colour = 1.45 - 1.2 * rank, RANKS[rank]
            text(axes, 0.5, y + 0.4, f"rank {rank}", 10)
            for index in range(2):
                box(axes, 1.05, y + 0.42 - 0.42 * index, 0.75, 0.38, colour, "rows", 8)
                box(axes, 6.5, y + 0.42 - 0.42 * index, 0.75, 0.38, colour, "rows", 8)
            box(axes, 3.4, y, 1.5, 0.8, colour, f"experts {2 * rank}, {2 * rank + 1}")
        for index, (source, goal) in enumerate(goals):
            here, there = 1.45 - 1.2 * source + 0.62 - 0.42 * (index % 2), 1.85 - 1.2 * goal
            arrow(axes, (1.85, here), (3.35, there))
            arrow(axes, (4.95, there), (6.45, here))
        text(axes, 2.6, 2.5, "all-to-all")
        text(axes, 5.7, 2.5, "all-to-all back")


def draw_all(folder: Path) -> None:
    for draw in (draw_mesh, draw_data, draw_tensor, draw_context, draw_expert):
        draw(folder)
    for name in SCHEDULES:
        virtual = 1 if name in ("gpipe", "1f1b") else 2
        spans = simulate(actions(name, 4, virtual, 8), stage_times(durations(), [1.0] * 4 * virtual))
        draw_timeline(spans, folder / f"parallel-{name}.png", f"{name}: time in forward passes of one stage")
