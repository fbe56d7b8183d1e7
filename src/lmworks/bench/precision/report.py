"""The report of `lmworks bench precision`: report.md, report.html and, with matplotlib, report.png (all curves)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...plan.memory.rank_weights import resident
from ...plan.memory.sheet import memory as planned_peak
from ...record.formatting import binary_bytes, short
from ...report.html_page import Section, sections_as_markdown, sections_as_page, write_report_files
from ...report.plots import has_matplotlib, save
from ...report.run_report import smooth
from ...report.svg import Line, Points, line_chart
from ...spec import PrecisionSpec
from .study import THRESHOLDS, Outcome, Study, totals
from .tensor_formats import FORMATS, LOSS_SCALE, ROLES
from .variants import BASE, OVERFLOWING_SCALE, SEED, inspected_steps

TITLE = "One model in every precision"
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
STYLE = "".join(f".{name} {{ --c: {color}; }} " for name, color in COLORS.items())


def write_reports(study: Study) -> tuple[Path, Path]:
    picture = draw(study, study.folder / "report.png")
    shown = [f"![Loss, gap to fp32, gradient norm and loss scale]({picture.name})"] if picture else []
    return write_report_files(study.folder, as_markdown(study, shown), as_page(study))


def as_markdown(study: Study, pictures: list[str]) -> str:
    return sections_as_markdown(TITLE, [lead(study), *pictures], sections(study))


def as_page(study: Study) -> str:
    return sections_as_page(TITLE, lead(study), [], sections(study), STYLE)


def lead(study: Study) -> str:
    spec = study.spec
    threads = study[BASE.name].training.facts.get("threads")
    return (
        f"{spec.model.params:,} parameters ({spec.model.layers} layers, hidden {spec.model.hidden}), sequences of "
        f"{spec.data.seq}, {spec.data.global_batch} a step, {spec.optim.steps} steps of {spec.optim.optimizer} at a "
        f"rate of {spec.optim.lr:g}, on {study.device}{f', threads: {threads}' if threads else ''}."
    )


def sections(study: Study) -> list[Section]:
    found = [overview(study), curves(study), evaluations(study), gradients(study), formats(study), updates(study)]
    found += [scales(study), norms(study), memory(study), variants(study)]
    return [section for section in found if section.rows or section.charts]


# --- cells ----------------------------------------------------------------------------------------------


def cell(value: float | None, show: Callable[[float], str] | str) -> str:
    return "–" if value is None else show.format(value) if isinstance(show, str) else show(value)


def share(value: float | None) -> str:
    """A percentage, with one more digit if it is small."""
    return "–" if value is None else "0" if value == 0 else f"{value:.2g}" if value < 1e-4 else f"{value:.2%}"


def size(value: float | None) -> str:
    return cell(value, binary_bytes)


def speed(outcome: Outcome) -> str:
    if outcome.training.facts.get("emulated"):
        return "emulated"
    return cell(outcome.training.speed, "{:.2f}×")


def held(outcome: Outcome) -> float | None:
    """Bytes per parameter just before an update, from live tensors."""
    training = outcome.training
    found = next((line["held"] for line in training.looked if "held" in line), None)
    return sum(found.values()) / training.spec.model.params if found else None


# --- sections -------------------------------------------------------------------------------------------


def overview(study: Study) -> Section:
    columns, rows = overview_table(study)
    (columns, *rows) = ([line[0], line[-1], *line[1:-1]] for line in (columns, *rows))
    return Section("Overview", THRESHOLDS, columns, rows, numeric=len(columns) - 2)


def overview_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Also printed by the command; the last column is the longest."""
    columns = ["precision", "held-out loss", "gap", "speed", "peak", "bytes/parameter", "verdict"]
    rows = []
    for one in study.outcomes:
        row = [one.name, cell(one.metrics.val_loss, "{:.4f}"), cell(one.metrics.gap, "{:+.4f}"), speed(one)]
        row += [size(one.training.memory), cell(held(one), "{:.1f}"), one.verdict]
        rows.append(row)
    return columns, rows


def curves(study: Study) -> Section:
    text = (
        "Training loss, smoothed over a fiftieth of the run; and in the second half the gap of it to fp32's, over the "
        f"same batches ({SEED.name} has others, and is left out)."
    )
    base, half = dict(smoothed(study[BASE.name], "loss")), study.spec.optim.steps / 2
    gaps = {
        one.name: [(step, loss - base[step]) for step, loss in smoothed(one, "loss") if step in base and step > half]
        for one in study.outcomes
        if one.name not in (BASE.name, SEED.name)
    }
    scales = {one.name: [(x, math.log2(y)) for x, y in one.training.curve("loss_scale")] for one in study.outcomes}
    charts = {
        "Training loss": chart({one.name: smoothed(one, "loss") for one in study.outcomes}),
        "Gap of the training loss to fp32, second half": chart(gaps),
        "Gradient norm, before clipping": chart(
            {one.name: smoothed(one, "grad_norm") for one in study.outcomes}, "norm"
        ),
    }
    if any(scales.values()):
        charts["Loss scale, log₂"] = chart(scales, "log₂ of the scale")
    return Section("Curves", text, [], [], charts=charts)


def smoothed(outcome: Outcome, key: str) -> Points:
    return smooth(outcome.training.curve(key))


def chart(lines: Mapping[str, Points], y: str = "nats a token") -> str:
    drawn = [Line(name, points, name) for name, points in lines.items() if points]
    return line_chart(drawn, show="{:.4g}".format, y=y)


def evaluations(study: Study) -> Section:
    text = "Loss on held-out data, the same batches every time. A dash: the run ended before."
    steps = sorted({step for one in study.outcomes for step, _ in one.training.curve("val_loss")})
    rows = []
    for one in study.outcomes:
        known = dict(one.training.curve("val_loss"))
        rows.append([one.name, *(cell(known.get(step), "{:.4f}") for step in steps)])
    return Section(
        "Held-out loss", text, ["precision", *(f"step {step:.0f}" for step in steps)], rows, numeric=len(steps)
    )


def gradients(study: Study) -> Section:
    text = (
        f"After steps {listed(study)}, gradients of the next batch in the run's own precision against those of the "
        "same weights in fp32. Flushed: zero, but not in fp32. Not finite: infinite or NaN, under the current loss "
        "scale. Both are shares of all elements, at the worst of these steps, and in the worst part of the "
        "model. Error: ‖g − g of fp32‖ ÷ ‖g of fp32‖, the median over these steps."
    )
    columns = ["precision", "worst part", "flushed", "flushed in it", "not finite", "error"]
    rows = []
    for one in study.outcomes:
        if one.name in (BASE.name, SEED.name):
            continue
        parts = [(part, sums) for line in one.training.looked for part, sums in line.get("gradients", {}).items()]
        part, sums = max(parts, key=lambda each: each[1][1] / each[1][0], default=("–", None))
        found = one.metrics
        row = [one.name, part if sums and sums[1] else "–", share(found.flushed)]
        row += [
            share(sums[1] / sums[0] if sums else None),
            share(found.nonfinite),
            cell(found.gradient_error, "{:.2e}"),
        ]
        rows.append(row)
    return Section("Gradients against fp32", text, columns, rows, numeric=4)


def formats(study: Study) -> Section:
    text = (
        "Tensors of the fp32 run that 8-bit products would round (inputs and weights of the blocks' linear layers, "
        f"gradients of their outputs), after steps {listed(study)}, in each format. Saturated: beyond its largest "
        "number. Tensorwise and rowwise: scaled so that the largest element of the tensor, or of each row, is the "
        "format's largest number; nothing saturates. Delayed: scaled by the largest element of the previous batch. "
        f"Loss scaled: by {LOSS_SCALE:,.0f}. Error: ‖rounded − x‖ ÷ ‖x‖. All over all steps and blocks; the worst "
        "block is the one with most flushed and saturated."
    )
    rows = []
    for role in ROLES:
        for form in FORMATS:
            blocks = blocks_of(study, role, form.name)
            if not blocks:
                continue
            count, flushed, saturated, error, square = totals(blocks)
            worst = max(blocks, key=lambda block: (blocks[block][1] + blocks[block][2]) / blocks[block][0])
            row = [role, form.name, worst if flushed + saturated else "–"]
            rows.append([*row, share(flushed / count), share(saturated / count), f"{(error / square) ** 0.5:.2e}"])
    columns = ["tensors", "format", "worst block", "flushed", "saturated", "error"]
    return Section("Rounding errors by format", text, columns, rows, numeric=3)


def blocks_of(study: Study, role: str, form: str) -> dict[str, list[float]]:
    """Sums over the inspected steps, by block."""
    found: dict[str, list[float]] = {}
    for line in study[BASE.name].training.looked:
        for block, sums in line.get("formats", {}).get(role, {}).get(form, {}).items():
            found[block] = [a + b for a, b in zip(found.get(block, [0.0] * len(sums)), sums, strict=True)]
    return found


def updates(study: Study) -> Section:
    text = (
        "How much of AdamW's exact update the weights took up, with all bits that the optimizer keeps (a master's 16 "
        "bits count). Kept: the actual update, projected on the exact one; 100 % is all of it on average. Unmoved: the "
        "share of weights that should have changed and did not. Stochastic rounding leaves most weights unchanged in "
        "one step, and loses nothing on average."
    )
    steps = inspected_steps(study.spec.optim.steps)
    columns = ["precision", *(f"{what}, step {step}" for step in steps for what in ("kept", "unmoved"))]
    rows = []
    for one in study.outcomes:
        seen = {line["step"]: line.get("update") or {} for line in one.training.looked}
        found = [seen.get(step, {}).get(what) for step in steps for what in ("kept", "unmoved")]
        rows.append([one.name, *(share(value) for value in found)])
    return Section("Weight updates", text, columns, rows, numeric=len(columns) - 1)


def scales(study: Study) -> Section:
    text = (
        "Only fp16 has one. A step whose gradient overflows is skipped and halves the scale; a window of good steps "
        f"doubles it. fp16-high starts at {OVERFLOWING_SCALE:,.0f} on purpose."
    )
    rows = []
    for one in study.outcomes:
        known = [scale for _, scale in one.training.curve("loss_scale")]
        if known:
            skipped = one.training.overflows
            which = ", ".join(map(str, skipped[:12])) + (" …" if len(skipped) > 12 else "")
            rows.append([one.name, which or "none", f"{len(skipped)}", *(f"{s:,.0f}" for s in ends(known))])
    columns = ["precision", "skipped steps", "count", "first scale", "lowest", "highest", "last"]
    return Section("Loss scale", text, columns, rows, numeric=5)


def ends(known: list[float]) -> tuple[float, float, float, float]:
    return known[0], min(known), max(known), known[-1]


def norms(study: Study) -> Section:
    text = "Norm of the whole gradient before clipping; the ratio is the median over steps of that to fp32's norm."
    rows = []
    for one in study.outcomes:
        known = [norm for _, norm in one.training.curve("grad_norm")]
        row = [one.name, cell(one.metrics.norm, "{:.4f}"), cell(max(known, default=None), "{:.4f}")]
        rows.append([*row, cell(one.metrics.norm_ratio, "{:.4f}"), cell(one.metrics.loss_gap, "{:+.4f}")])
    columns = ["precision", "median", "highest", "ratio to fp32", "gap of training loss at the end"]
    return Section("Gradient norms", text, columns, rows, numeric=4)


def memory(study: Study) -> Section:
    text = (
        "Speed: steps of fp32 and this precision were interleaved, and the ratio is the median over rounds; tokens/s "
        f"is that of the run itself, which other load on the machine changes. {SEED.name} shows its noise. "
        "Peak: the highest before the first inspected step, of a process that trains nothing else; on a CPU it is the "
        "growth of the resident set. State: parameters, gradients, master and optimizer states just before an update, "
        "read from live tensors, beside the planner's."
    )
    columns = ["precision", "speed", "tokens/s", "peak", "planned", "to it", "state, bytes/parameter", "planned"]
    rows, kind = [], study[BASE.name].training.facts.get("kind", "cpu")
    for one in study.outcomes:
        peak, planned = one.training.memory, planned_peak(one.training.spec, kind).total
        row = [one.name, speed(one), cell(one.training.tokens_per_s, short), size(peak), size(planned)]
        row += [f"{peak / planned:.2f}" if peak else "–", cell(held(one), "{:.2f}")]
        rows.append([*row, f"{resident(one.training.spec, 0).total / one.training.spec.model.params:.2f}"])
    return Section("Speed and memory", text, columns, rows, numeric=7)


def variants(study: Study) -> Section:
    text = (
        f"Each is a run in `{study.folder.name}/NAME`, with its metrics, events and report: `lmworks runs` lists them."
    )
    rows = [[one.name, one.training.variant.what, keys(one)] for one in study.outcomes]
    return Section("The precisions", text, ["precision", "description", "keys of [precision]"], rows)


def keys(outcome: Outcome) -> str:
    """Settings that differ from the defaults."""
    usual = PrecisionSpec().to_dict()
    given = {key: value for key, value in outcome.training.spec.precision.to_dict().items() if value != usual[key]}
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in given.items()) or "–"


def listed(study: Study) -> str:
    *most, last = map(str, inspected_steps(study.spec.optim.steps))
    return f"{', '.join(most)} and {last}"


# --- plot ------------------------------------------------------------------------------------------------


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
