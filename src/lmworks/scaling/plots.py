"""Plots of a fit: contours of the loss with the optimum, iso-FLOP curves, residuals. They need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..report.plots import save
from .fitting import Fit
from .isoflop import IsoFlop, vertex
from .optimum import optimum

GRID = 120  # points of an axis


def draw_law(fit: Fit, path: Path) -> Path:
    """Left: the law (contours over N and D, or the curve over C); right: residuals against FLOPs."""
    figure, (left, right) = new_figure(2)
    if "n" in fit.fitted.law.variables:
        contours(left, fit)
    else:
        curve(left, fit)
    flops = fit.points.need("flops", "a plot")
    right.axhline(0, color="#888", linewidth=1)
    right.scatter(flops, 100 * fit.fitted.residuals, s=12)
    right.set(xscale="log", xlabel="FLOPs", ylabel="measured over predicted loss − 1 (%)", title="Residuals")
    return save(figure, path)


def new_figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def contours(axes: Any, fit: Fit) -> None:
    fitted, points = fit.fitted, fit.points
    n, d, flops = points.need("n", ""), points.need("d", ""), points.need("flops", "")
    across, up = np.geomspace(n.min() / 1.5, n.max() * 1.5, GRID), np.geomspace(d.min() / 1.5, d.max() * 1.5, GRID)
    seq = np.asarray(fitted.ranges["seq"][1]) if "seq" in fitted.law.variables else np.asarray(1.0)
    at = {"n": across[None, :], "d": up[:, None], "seq": seq}
    loss = np.exp(fitted.law.log_loss(fitted.theta, at))
    lines = axes.contour(across, up, loss, levels=14, cmap="viridis")
    axes.clabel(lines, fontsize=7)
    axes.scatter(n, d, s=10, color="#333")
    budgets = np.geomspace(flops.min(), flops.max(), 30)
    best = [optimum(fitted.law, fitted.theta[None], float(one), fitted.rule, float(seq)) for one in budgets]
    axes.plot([one.n[0] for one in best], [one.d[0] for one in best], color="#b03030", label="compute-optimal")
    axes.set(xscale="log", yscale="log", xlabel="parameters N", ylabel="tokens D", title=fitted.law.formula)
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    for axis in (axes.xaxis, axes.yaxis):
        label_sizes(axis)
    axes.legend(frameon=False)


def label_sizes(axis: Any) -> None:
    """1M, 2M, 5M, …: numbers of parameters or tokens on a logarithmic axis."""
    from matplotlib.ticker import EngFormatter, LogLocator

    axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(EngFormatter(sep=""))


def curve(axes: Any, fit: Fit) -> None:
    fitted, flops = fit.fitted, fit.points.need("flops", "")
    x = np.geomspace(flops.min() / 2, flops.max() * 10, GRID)
    axes.plot(x, np.exp(fitted.law.log_loss(fitted.theta, {"flops": x})), color="#b03030")
    if len(fitted.draws):
        each = np.exp(fitted.log_losses({"flops": x[:, None]}))
        edge = (1 - fitted.level) / 2
        axes.fill_between(x, *np.quantile(each, [edge, 1 - edge], axis=1), color="#b03030", alpha=0.2, linewidth=0)
    axes.scatter(flops, fit.points.loss, s=12, color="#333")
    axes.set(xscale="log", xlabel="FLOPs", ylabel="loss", title=fitted.law.formula)


def draw_isoflop(found: IsoFlop, path: Path) -> Path:
    """Left: losses of each budget with their parabolas; right: the sizes of least loss, and their power law."""
    figure, (left, right) = new_figure(2)
    n = found.points.need("n", "")
    for one in found.budgets:
        sizes, losses = n[one.rows], found.points.loss[one.rows]
        dots = left.scatter(sizes, losses, s=14, label=f"{one.flops:.2g} FLOP")
        x = np.geomspace(sizes.min(), sizes.max(), GRID)
        parabola = np.polynomial.Polynomial.fit(np.log(sizes), losses, 2)
        left.plot(x, parabola(np.log(x)), color=dots.get_facecolor()[0], linewidth=1)
        at, _ = vertex(np.log(sizes)[None], losses[None], np.ones((1, len(sizes))))
        left.plot(np.exp(at), parabola(at), marker="x", color="#333")
    left.set(xscale="log", xlabel="parameters N", ylabel="loss", title="Iso-FLOP curves")
    left.legend(frameon=False, fontsize=7)
    budgets = np.array([one.flops for one in found.budgets])
    x = np.geomspace(budgets.min() / 2, budgets.max() * 10, GRID)
    right.scatter(budgets, [one.n for one in found.budgets], s=18, color="#333")
    right.plot(x, found.k * x**found.a, color="#b03030", label=f"N* ∝ C^{found.a:.3f}")
    right.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="N*", title="Sizes of least loss")
    right.legend(frameon=False)
    return save(figure, path)
