"""`report.html`: curves, events and predicted-against-measured figures of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ..diagnose.predicted_ops import predicted_ops
from ..record import RunFolder, read_metrics
from ..record.event_text import describe_event
from ..record.formatting import binary_bytes, clock, duration, short
from ..record.run_summary import Steps, Summary, measures_reward, summarize
from ..spec import LMWorksError, RunSpec
from ..spec.errors import DataError
from ..spec.files import write_whole
from ..trace import read_traces
from ..trace.files import newest_traces
from . import predicted_vs_measured
from .html_page import StyledCell, chart_cards, header, note, page, table, tiles
from .plots import draw_plots
from .post_training import Tile, points, post_training, reward_tiles
from .svg import EventMarks, Line, Points, line_chart, stacked_chart
from .trace_page import predicted_table

PARTS = {
    "forward_backward_s": "forward and backward",
    "optimizer_s": "optimizer",
    "data_s": "waiting for data",
}
MAX_EVENTS = 200
MAX_TRACES = 8  # ranks whose traces are read
# Event marks on the loss curve: name, CSS class, glyph, kinds of events.
MARKED_EVENTS = (
    ("spike or NaN", "spike", "▼", ("spike", "fault", "corrupt")),
    ("restart or rewind", "restart", "■", ("restart", "resume", "rewind")),
    ("save", "save", "◆", ("save",)),
)


def write_report(folder: RunFolder) -> Path:
    """Write report.html, and the PNG plots where matplotlib is installed. Safe to call during the run."""
    spec, summary, steps = folder.spec(), summarize(folder), read_metrics(folder.metrics_path)
    pngs = draw_plots(folder, steps)
    sections = [
        heading(summary),
        summary_tiles(summary, reward_tiles(spec, steps)),
        predicted(folder, steps),
        profiled(folder),
        charts(spec, steps, folder.events(), pngs),
        post_training(folder, spec, steps),
        events(folder),
        specification(folder),
    ]
    try:
        write_whole(folder.report_path, page(f"{summary.name} · LMWorks", "\n".join(filter(None, sections))))
    except OSError as error:
        raise LMWorksError(f"cannot write {folder.report_path}: {error.strerror}") from None
    return folder.report_path


def heading(summary: Summary) -> str:
    attempts = "" if summary.attempts < 2 else f", {summary.attempts} attempts"
    lead = f"{summary.params:,} parameters · {summary.steps:,} of {summary.total_steps:,} steps{attempts} · "
    lead += f"started {summary.started[:16].replace('T', ' ')} UTC"
    return header(summary.name, lead, summary.status)


def summary_tiles(summary: Summary, rewards: Sequence[Tile]) -> str:
    """`rewards`: of an online run, in place of its losses."""
    best = (
        "" if summary.best_val_step is None else f"best {summary.best_val_loss:.4f} at step {summary.best_val_step:,}"
    )
    wall = summary.wall_s if summary.wall_s is not None else summary.train_s
    mfu = ("MFU", "–", "peak not known") if not summary.mfu else ("MFU", f"{summary.mfu:.1%}", "median")
    memory = "–" if summary.memory_bytes is None else binary_bytes(summary.memory_bytes)
    losses = (
        ("final loss", number(summary.loss), "training, last step"),
        ("validation loss", number(summary.val_loss), best),
    )
    return tiles([
        *(rewards or losses),
        ("tokens", short(summary.tokens), f"{summary.tokens:,}"),
        ("wall time", clock(wall), f"{clock(summary.train_s)} in steps"),
        ("tokens/s", "–" if summary.tokens_per_s is None else short(summary.tokens_per_s), "median"),
        ("step time", "–" if summary.step_s is None else duration(summary.step_s), "median"),
        mfu,
        ("peak memory", memory, "over all steps"),
    ])  # fmt: skip


def predicted(folder: RunFolder, steps: Steps) -> str:
    found = predicted_vs_measured.compare(folder, steps)
    if not found:
        return ""
    columns, rows = predicted_vs_measured.table_of(found)
    ratio = columns.index("ratio")
    columns[0], columns[ratio] = "figure", "measured ÷ predicted"
    for row, cells in zip(found, rows, strict=True):
        if row.outside:
            cells[ratio] = StyledCell(cells[ratio], "outside")
    busy = predicted_vs_measured.busy_note(predicted_vs_measured.read_prediction(folder))
    notes = [note(row.why, "outside") for row in found if row.why] + ([note(busy, "busy")] if busy else [])
    notes.append(note("Measured: the peak for memory, the median over steps for the rest."))
    return f"<h2>Predicted against measured</h2>{table(columns, rows, numeric=len(columns) - 1)}{''.join(notes)}"


def profiled(folder: RunFolder) -> str:
    """Of the newest recording of a run: prices and traced times of the ops of a step."""
    files = newest_traces(folder.traces)[:MAX_TRACES]
    if not files:
        return ""
    try:
        inside = predicted_table(predicted_ops(read_traces(files)))
    except DataError as error:
        return note(str(error))
    if not inside:
        return ""
    source = note(f"From {', '.join(file.name for file in files)}; recording itself takes time, most on a CPU.")
    return f"<h2>Predicted beside measured, op by op</h2>{inside}{source}"


def event_marks(recorded: Steps) -> list[EventMarks]:
    """Spikes, restarts and saves; a restart has two events at one step, the first with its cause."""
    found = []
    for name, style, glyph, kinds in MARKED_EVENTS:
        events = {event["step"]: event for event in reversed(recorded) if event["kind"] in kinds}
        points = [(step, describe_event(events[step])) for step in sorted(events)]
        found.append(EventMarks(f"{name} ({len(points):,})", style, glyph, points, low=style == "save"))
    return found


def charts(spec: RunSpec, steps: Steps, recorded: Steps, pngs: Sequence[Path]) -> str:
    loss = points(steps, "loss")
    held_out = [] if measures_reward(steps) else points(steps, "val_loss")
    memory, unit = scaled(points(steps, "memory_bytes"))
    cards = {
        "Loss": line_chart(
            [
                Line("training", loss, "s0 faint"),
                Line("training, smoothed", smooth(loss), "s0"),
                Line("validation", held_out, "s1", dots=True),
            ],
            show="{:.4g}".format,
            y="nats a token" if spec.align.method in ("", "sft") else "loss",
            marks=event_marks(recorded),
        ),
        **suite_chart(steps),
        "Learning rate": single_line_chart(steps, "lr", "learning rate", "{:.3g}".format),
        "Throughput": single_line_chart(steps, "tokens_per_s", "tokens/s"),
        "Gradient norm, before clipping": single_line_chart(steps, "grad_norm", "norm"),
        "Where a step's time goes": parts_chart(steps),
        "Peak memory": line_chart([Line(unit, memory, "s0")], zero=True, show="{:.4g}".format, y=unit),
    }
    if pngs:
        files = "PNG files: " + ", ".join(f"<code>{png.parent.name}/{png.name}</code>" for png in pngs)
    else:
        files = 'PNG files of these plots need matplotlib: <code>pip install "lmworks[plots]"</code>'
    return f'<h2>Curves</h2>{chart_cards(cards)}<p class="note">{files}</p>'


def suite_chart(steps: Steps) -> dict[str, str]:
    """Scores of evaluation suites while training (log.suites)."""
    keys = dict.fromkeys(key for step in steps for key in step if key.startswith("eval/"))
    lines = [
        Line(key.removeprefix("eval/"), points(steps, key), f"s{place % 5}", dots=True)
        for place, key in enumerate(sorted(keys))
    ]
    return {"Evaluation suites": line_chart(lines, show="{:.4g}".format, y="score")} if lines else {}


def single_line_chart(steps: Steps, key: str, name: str, show: Callable[[float], str] = short) -> str:
    return line_chart([Line(name, points(steps, key), "s0")], zero=True, show=show, y=name)


def parts_chart(steps: Steps) -> str:
    """The parts of a step, its remaining time, and the saves between steps."""
    rows: list[tuple[float, list[float]]] = []
    for step in steps:
        if step.get("step_s") is not None:
            parts = [step.get(key) or 0.0 for key in PARTS]
            rows.append(
                (step["step"], [*parts, max(0.0, step["step_s"] - sum(parts)), step.get("checkpoint_s") or 0.0])
            )
    return stacked_chart([*PARTS.values(), "the rest", "checkpoint"], rows, duration, "time of a step")


def events(folder: RunFolder) -> str:
    recorded = folder.events()
    if not recorded:
        return ""
    shown = recorded[-MAX_EVENTS:]
    rows = [
        [
            event["time"][:19].replace("T", " "),
            f"{event['step']:,}",
            event["kind"].replace("_", " "),
            describe_event(event),
        ]
        for event in shown
    ]
    hidden = len(recorded) - len(shown)
    earlier = f'<p class="note">{hidden:,} earlier ones are in <code>events.jsonl</code>.</p>' if hidden else ""
    return f"<h2>Events</h2>{table(['time (UTC)', 'step', 'event', 'what recorded'], rows, whole=3)}{earlier}"


def specification(folder: RunFolder) -> str:
    text = folder.spec_path.read_text(encoding="utf-8")
    return f'<h2>Spec</h2><details class="card"><summary>spec.toml</summary><pre>{escape(text)}</pre></details>'


def scaled(memory: Points) -> tuple[Points, str]:
    """Bytes in GiB or MiB, so that the axis has round numbers."""
    size, unit = (2**30, "GiB") if max((y for _, y in memory), default=0) >= 2**30 else (2**20, "MiB")
    return [(x, y / size) for x, y in memory], unit


def smooth(line: Points) -> Points:
    """Centred moving average over a fiftieth of the run, narrower towards the ends."""
    sums = list(itertools.accumulate((y for _, y in line), initial=0.0))
    result = []
    for index, (x, _) in enumerate(line):
        reach = min(index, len(line) - 1 - index, len(line) // 100)
        result.append((x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return result


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
