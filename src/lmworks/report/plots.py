"""PNG curves, for slides and chat. They need matplotlib, an extra; the report draws its own without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record import RunFolder, read_metrics
from ..record.run_summary import Steps
from ..spec import LMWorksError, SpecError
from ..spec.files import refuse_unwritable

CURVES = {  # file: (keys with their label, y axis)
    "loss": ({"loss": "training", "val_loss": "validation"}, "loss"),
    "lr": ({"lr": ""}, "learning rate"),
    "throughput": ({"tokens_per_s": ""}, "tokens/s"),
}
PICTURES = (".png", ".svg", ".pdf")


def draw_plots(folder: RunFolder, steps: Steps) -> list[Path]:
    """plots/*.png; [] where matplotlib is not installed."""
    if not has_matplotlib():
        return []
    drawn = []
    for name, (keys, label) in CURVES.items():
        figure, axes = blank(label)
        for key, legend in keys.items():
            curve(axes, steps, key, legend)
        if name != "loss":
            axes.set_ylim(bottom=0)
        if any(keys.values()):
            axes.legend(frameon=False)
        drawn.append(save(figure, folder.plots / f"{name}.png"))
    return drawn


def overlay(folders: Sequence[RunFolder], out: Path) -> Path:
    """The loss curves of several runs in one picture."""
    if not has_matplotlib():
        raise SpecError('--plot needs matplotlib: pip install "lmworks[plots]"')
    figure, axes = blank("loss")
    for folder in folders:
        curve(axes, read_metrics(folder.metrics_path), "loss", folder.path.name)
    axes.legend(frameon=False)
    return save(figure, out)


def refuse_plot(path: Path, option: str) -> None:
    """Before the work that is to be drawn: no matplotlib, a kind of file that it does not write, or no place for it."""
    if not has_matplotlib():
        raise SpecError(f'{option} needs matplotlib: pip install "lmworks[plots]"')
    if path.suffix.lower() not in PICTURES:
        raise SpecError(f"{option} {path}: name a file that ends in {', '.join(PICTURES)}")
    refuse_unwritable(path, option)


def has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def blank(label: str) -> tuple[Any, Any]:
    # A Figure of its own, not pyplot: no window system, no state shared with a user's notebook.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curve(axes: Any, steps: Steps, key: str, label: str) -> None:
    known = [step for step in steps if step.get(key) is not None]
    marker = "o" if key == "val_loss" or len(known) == 1 else None
    axes.plot([s["step"] for s in known], [s[key] for s in known], label=label, marker=marker, markersize=4)


def save(figure: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not write
        raise LMWorksError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    return path
