"""Plots of a search, as the tuning playbook asks for them: isolation, parallel coordinates, importances, curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..report.plots import check_plot_path, new_axes, save
from ..sweep.folder import Trial
from ..sweep.space import Dimension
from .importances import importances
from .outcome import Outcome, is_number

GREY, BLUE, RED = "#b0b0b0", "#3060b0", "#c03020"


def draw_outcome(found: Outcome, folder: Path) -> list[Path]:
    """PNG files; a plot that needs more trials than there are is left out."""
    check_plot_path(folder / "isolation.png", "--plots")
    measured = [trial for trial in found.trials if found.loss(trial.number) is not None]
    if not measured:
        return []
    drawn = [draw_isolation(found, measured, folder / "isolation.png")]
    drawn.append(draw_curves(found, measured, folder / "curves.png"))
    drawn.append(draw_history(found, folder / "history.png"))
    if len(found.sweep.space.dimensions) > 1 and len(measured) > 1:
        drawn.append(draw_parallel(found, measured, folder / "parallel.png"))
    if shares := importances(found):
        drawn.append(draw_importances(shares, folder / "importances.png"))
    if any(trial.parent for trial in found.trials):
        drawn.append(draw_lineage(found, folder / "lineage.png"))
    return drawn


def draw_isolation(found: Outcome, trials: list[Trial], path: Path) -> Path:
    """Loss against each key, the other keys free: the lower envelope is the best that this value allowed. Trials that
    came to the last step are filled."""
    from matplotlib.figure import Figure

    dimensions = found.sweep.space.dimensions
    figure = Figure(figsize=(4 * len(dimensions), 3.4), layout="constrained")
    last = max(trial.step for trial in trials)
    for axes, dimension in zip(np.atleast_1d(figure.subplots(1, len(dimensions))), dimensions, strict=True):
        here = [trial for trial in trials if dimension.key in trial.overrides]
        for whole in (False, True):
            chosen = [trial for trial in here if (trial.step >= last) == whole]
            x = [place(dimension, trial.overrides[dimension.key]) for trial in chosen]
            y = [found.loss(trial.number) for trial in chosen]
            axes.scatter(x, y, s=22, color=BLUE if whole else "none", edgecolors=BLUE if whole else GREY)
        label_axis(axes, dimension)
        best = found.best
        if best and dimension.key in best.overrides:
            axes.scatter([place(dimension, best.overrides[dimension.key])], [found.loss(best.number)], s=60, color=RED)
        axes.set(xlabel=dimension.key, ylabel="loss at the last evaluation")
    return save(figure, path)


def place(dimension: Dimension, value: Any) -> float:
    """Where a value stands on its axis: numbers as they are, others by their index."""
    ordered = dimension.range is not None or all(map(is_number, dimension.values))
    return float(value) if ordered else float(dimension.values.index(value))


def label_axis(axes: Any, dimension: Dimension) -> None:
    if dimension.range is None and not all(map(is_number, dimension.values)):
        axes.set_xticks(range(len(dimension.values)), [str(value) for value in dimension.values])
    if dimension.log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
    if dimension.range is not None:  # the whole of it: a best value at its edge is seen
        axes.set_xlim(*dimension.range)


def draw_curves(found: Outcome, trials: list[Trial], path: Path) -> Path:
    figure, axes = new_axes("held-out loss")
    for trial in trials:
        curve = {step: loss for step, loss in found.losses(trial.number).items() if loss is not None}
        best = found.best is not None and trial.number == found.best.number
        axes.plot(
            list(curve),
            list(curve.values()),
            marker="o",
            markersize=3,
            linewidth=2 if best else 0.8,
            color=RED if best else GREY,
            label=f"trial {trial.number}, the best" if best else None,
            zorder=2 if best else 1,
        )
    axes.set(xscale="log", xlabel="step")
    axes.legend(frameon=False)
    return save(figure, path)


def draw_history(found: Outcome, path: Path) -> Path:
    """The loss of each trial by its number, and the lowest so far among those that came to the last step."""
    figure, axes = new_axes("loss at the last evaluation")
    ends = {trial.number: loss for trial in found.trials if (loss := found.loss(trial.number)) is not None}
    whole = {number: loss for number, loss in ends.items() if number in found.results.finished}
    axes.scatter(list(ends), list(ends.values()), s=18, color=GREY, label="stopped or paused")
    axes.scatter(list(whole), list(whole.values()), s=22, color=BLUE, label="finished")
    if whole:
        axes.step(
            list(whole), np.minimum.accumulate(list(whole.values())), where="post", color=RED, label="best so far"
        )
    axes.set(xlabel="trial")
    axes.legend(frameon=False)
    return save(figure, path)


def draw_parallel(found: Outcome, trials: list[Trial], path: Path) -> Path:
    """A line a trial through its values, each axis from its lower to its upper end; the better, the darker."""
    dimensions = found.sweep.space.dimensions
    figure, axes = new_axes("")
    losses = {trial.number: loss for trial in trials if (loss := found.loss(trial.number)) is not None}
    order = sorted(losses, key=lambda number: losses[number], reverse=True)
    rank = {number: (index + 1) / len(order) for index, number in enumerate(order)}
    low, high = min(losses.values()), max(losses.values())
    for trial in sorted(trials, key=lambda trial: rank[trial.number]):
        heights = [height(dimension, trial.overrides.get(dimension.key)) for dimension in dimensions]
        heights.append((losses[trial.number] - low) / ((high - low) or 1.0))
        best = found.best is not None and trial.number == found.best.number
        axes.plot(heights, color=RED if best else BLUE, alpha=1.0 if best else rank[trial.number] ** 2, linewidth=1.2)
    axes.set_xticks(range(len(dimensions) + 1), [*(d.key.replace(".", ".\n") for d in dimensions), "loss"], fontsize=8)
    axes.set_yticks([0, 1], ["lower end", "upper end"])
    axes.set(xlabel="")
    return save(figure, path)


def height(dimension: Dimension, value: Any) -> float:
    if value is None:
        return float("nan")
    ends = dimension.range or (0.0, float(max(1, len(dimension.values) - 1)))
    if dimension.range is None:
        return dimension.values.index(value) / ends[1]
    if dimension.log:
        return float(np.log(value / ends[0]) / np.log(ends[1] / ends[0]))
    return float((value - ends[0]) / (ends[1] - ends[0]))


def draw_importances(shares: Mapping[str, float], path: Path) -> Path:
    figure, axes = new_axes("")
    axes.barh(list(shares), list(shares.values()), color=BLUE)
    axes.set(xlabel="share of the variance of finished losses (PED-ANOVA)")
    axes.invert_yaxis()
    return save(figure, path)


def draw_lineage(found: Outcome, path: Path) -> Path:
    """Which checkpoint each trial was forked from: a row a trial, arrows from parent to fork."""
    figure, axes = new_axes("trial")
    for trial in found.trials:
        start = trial.parent["step"] if trial.parent else 0
        best = found.best is not None and trial.number == found.best.number
        axes.plot([start, trial.step], [trial.number, trial.number], color=RED if best else BLUE, linewidth=2)
        if trial.parent:
            axes.annotate(
                "",
                xy=(start, trial.number),
                xytext=(start, trial.parent["trial"]),
                arrowprops={"arrowstyle": "->", "color": GREY},
            )
    axes.invert_yaxis()
    return save(figure, path)
