"""PNG plots: curves of a run, goodput by cause, the timeline of a pipeline schedule (also as text).

They need matplotlib, an optional dependency; report.html does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..diagnose.goodput import Span, TimeBreakdown
from ..plan.pipelines.schedule import Span as StageSpan
from ..record import RunFolder, read_metrics
from ..record.formatting import duration
from ..record.run_summary import VAL_REWARD, Steps, measures_reward
from ..spec import LMWorksError, SpecError
from ..spec.files import check_writable

Curves = dict[str, tuple[dict[str, str], str]]  # file: (keys with their label, y axis)
CURVES: Curves = {"lr": ({"lr": ""}, "learning rate"), "throughput": ({"tokens_per_s": ""}, "tokens/s")}
LOSSES: Curves = {"loss": ({"loss": "training", "val_loss": "validation"}, "loss")}
REWARDS: Curves = {  # of an online method, whose val_loss is a negative reward
    "loss": ({"loss": ""}, "loss"),
    "reward": ({"reward/mean": "training", VAL_REWARD: "held-out prompts"}, "reward"),
}
HELD_OUT = ("val_loss", VAL_REWARD)
FROM_ZERO = tuple(CURVES)
IMAGE_TYPES = (".png", ".svg", ".pdf")


def draw_plots(folder: RunFolder, steps: Steps) -> list[Path]:
    """plots/*.png; [] without matplotlib."""
    if not has_matplotlib():
        return []
    drawn = []
    for name, (keys, label) in {**(REWARDS if measures_reward(steps) else LOSSES), **CURVES}.items():
        figure, axes = new_axes(label)
        for key, legend in keys.items():
            plot_curve(axes, steps, key, legend)
        if name in FROM_ZERO:
            axes.set_ylim(bottom=0)
        if any(keys.values()):
            axes.legend(frameon=False)
        drawn.append(save(figure, folder.plots / f"{name}.png"))
    return drawn


def overlay_losses(folders: Sequence[RunFolder], out: Path) -> Path:
    """Loss curves of several runs in one plot."""
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    figure, axes = new_axes("loss")
    for folder in folders:
        plot_curve(axes, read_metrics(folder.metrics_path), "loss", folder.path.name)
    axes.legend(frameon=False)
    return save(figure, out)


def check_plot_path(path: Path, option: str) -> None:
    """Checked before the work: matplotlib is installed, the file type is supported, the path is writable."""
    if not has_matplotlib():
        raise SpecError(f'{option} needs matplotlib: pip install "lmworks[plots]"')
    if path.suffix.lower() not in IMAGE_TYPES:
        raise SpecError(f"{option} {path}: name a file that ends in {', '.join(IMAGE_TYPES)}")
    check_writable(path, option)


def has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def new_axes(label: str) -> tuple[Any, Any]:
    # Not pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_curve(axes: Any, steps: Steps, key: str, label: str) -> None:
    known = [step for step in steps if step.get(key) is not None]
    marker = "o" if key in HELD_OUT or len(known) == 1 else None
    axes.plot([s["step"] for s in known], [s[key] for s in known], label=label, marker=marker, markersize=4)


def save(figure: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not write
        raise LMWorksError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    return path


# --- goodput plot ----------------------------------------------------------------------------------------


COLORS = {
    "useful": "#2f7d4f",
    "evaluation": "#8fc1a0",
    "start": "#b8b8b8",
    "save": "#e0a030",
    "restart": "#b03030",
    "replay": "#e07050",
    "rewind": "#9060b0",
    "skip": "#5080c0",
    "hang": "#601010",
    "other": "#d8d8d8",
}


def draw_goodput(folder: RunFolder, time_breakdown: TimeBreakdown) -> Path:
    """plots/goodput.png, pauses left out."""
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    when, much = figure.subplots(2, height_ratios=(1, 3))
    spans = list(without_pauses(time_breakdown.spans))
    for cause, color in COLORS.items():
        parts = [(span.begin / 1e6, (span.end - span.begin) / 1e6) for span in spans if span.cause == cause]
        when.broken_barh(parts, (0, 1), color=color, linewidth=0)
    end = spans[-1].end / 1e6 if spans else 1.0
    when.set(xlim=(0, end), yticks=[], xlabel="seconds, pauses left out", title=f"{folder.path.name}: time by cause")
    seconds = {cause: time_breakdown.seconds[cause] for cause in COLORS if time_breakdown.seconds[cause]}
    bars = much.barh(list(seconds), list(seconds.values()), color=[COLORS[cause] for cause in seconds])
    shares = [f"{duration(part)}, {part / time_breakdown.active_s:.1%}" for part in seconds.values()]
    much.bar_label(bars, shares, padding=4)
    much.invert_yaxis()
    much.margins(x=0.2)
    much.set_xlabel("seconds")
    for axes in (when, much):
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, folder.plots / "goodput.png")


def without_pauses(spans: list[Span]) -> Iterator[Span]:
    paused = 0
    for span in spans:
        if span.cause == "pause":
            paused += span.end - span.begin
        else:
            yield Span(span.begin - paused, span.end - paused, span.cause)


# --- pipeline timeline -----------------------------------------------------------------------------------


KIND_COLORS = {"F": "#7fb3e6", "B": "#f0b27a", "I": "#f0b27a", "W": "#9fd3a1"}
KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


def label(span: StageSpan, ranks: int) -> str:
    """F3: forward of micro-batch 3. Every second stage of a rank is lower case."""
    return (span.kind.lower() if span.stage // ranks % 2 else span.kind) + str(span.micro_batch)


def draw_timeline_text(spans: list[StageSpan], unit: float) -> str:
    """One row per rank, one column per time unit; a dot is idle. A span of one column shows only its kind."""
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    ranks = 1 + max(span.rank for span in spans)
    rows = [["·"] * math.ceil((end - start) / unit - 1e-6) for _ in range(ranks)]
    for span in spans:
        begin, stop = (round((when - start) / unit) for when in (span.begin, span.end))
        rows[span.rank][begin:stop] = label(span, ranks).ljust(stop - begin, "─")[: stop - begin]
    return "\n".join(f"rank {rank:<3}{''.join(row)}" for rank, row in enumerate(rows))


def draw_timeline(spans: list[StageSpan], path: Path, title: str) -> Path:
    """The timeline as PNG, one bar per span."""
    if not has_matplotlib():
        raise SpecError('a plot of the timeline needs matplotlib: pip install "lmworks[plots]"')
    from matplotlib.figure import Figure

    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    ranks = 1 + max(span.rank for span in spans)
    figure = Figure(figsize=(14, 0.6 * ranks + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for span in spans:
        wide = span.end - span.begin
        odd = span.stage // ranks % 2
        axes.barh(
            span.rank,
            wide,
            left=span.begin - start,
            color=KIND_COLORS[span.kind],
            alpha=0.55 if odd else 1,
            edgecolor="w",
        )
        if wide > (end - start) / 90:
            middle = span.begin - start + wide / 2
            axes.text(middle, span.rank, str(span.micro_batch), ha="center", va="center", fontsize=7)
    used = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    axes.legend(
        [axes.barh(0, 0, color=KIND_COLORS[kind]) for kind in used],
        [KINDS[kind] for kind in used],
        ncols=len(used),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        frameon=False,
    )
    axes.set(yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], xlabel=title)
    axes.invert_yaxis()
    return save(figure, path)
