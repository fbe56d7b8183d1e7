"""The curves of all variants in one PNG; needs matplotlib, an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...report.plots import has_matplotlib, save
from ...report.run_report import smooth
from .study import Outcome, Study
from .variants import BASE, SEED

COLORS = {  # distinguishable in light and dark mode
    "fp32": "#7d8087",
    "fp32-seed": "#b9bcc2",
    "bf16": "#2a6fd6",
    "bf16-master": "#1e9a83",
    "bf16-states": "#5bb85b",
    "bf16-stochastic": "#b0820c",
    "bf16-nearest": "#d9622b",
    "fp16": "#8c5bd6",
    "fp16-high": "#c04a9b",
    "fp8-tensorwise": "#c03a3a",
    "fp8-rowwise": "#7a3b2e",
}


def draw(study: Study, path: Path) -> Path | None:
    """None where matplotlib is not installed."""
    if not has_matplotlib():
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (loss, gap), (norm, scale) = figure.subplots(2, 2)
    base = dict(smooth(study[BASE.name].training.curve("loss")))
    for outcome in study.outcomes:
        points = smooth(outcome.training.curve("loss"))
        line(loss, outcome, points)
        if outcome.name not in (BASE.name, SEED.name):
            line(gap, outcome, [(step, value - base[step]) for step, value in points if step in base])
        line(norm, outcome, smooth(outcome.training.curve("grad_norm")))
        line(scale, outcome, outcome.training.curve("loss_scale"))
    if study.noise is not None:
        gap.axhspan(-study.noise, study.noise, color="#7d8087", alpha=0.2, linewidth=0, label="noise of two seeds")
        gap.set_yscale("symlog", linthresh=study.noise or 1e-6)  # one that diverges must not flatten the others

    scale.set_yscale("log", base=2)
    scale.set_visible(bool(scale.lines))  # of fp16 alone
    titles = {
        loss: "training loss",
        gap: "its gap to fp32",
        norm: "gradient norm, before clipping",
        scale: "loss scale",
    }
    for axes, title in titles.items():
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    found = [pair for axes in (loss, gap) for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in found}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
    return save(figure, path)


def line(axes: Any, outcome: Outcome, points: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=outcome.name, color=COLORS[outcome.name], linewidth=1.4)
