"""The page of `lmworks profile trace --html`: the verdict, where the time of the steps went, and one step's timeline.

All figures are those of the command's JSON; the timeline is drawn from the traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..diagnose.causes import Evidence
from ..diagnose.predicted_ops import missing_price, op_table
from ..diagnose.schedule_bubble import bubble_table
from ..record.formatting import binary_bytes, duration, short
from ..trace.hotspots import short_name
from ..trace.model import Trace
from .html_page import chart_cards, header, note, page, resource_text, table, tiles
from .svg import Bars, Line, as_svg, line_chart
from .trace_timeline import draw_timeline, legend_style, shortened

Facts = Mapping[str, Any]
MOST_BARS = 64
LISTED = 20  # rows of a table
STYLE = "h2 + p { margin: 0 0 12px; } .charts, .card.scroll { margin-top: 14px; } .verdict { margin-top: 16px; }"


def trace_page(facts: Facts, traces: Sequence[Trace]) -> str:
    drawing = draw_timeline(traces)
    ranks = facts["ranks"]
    devices = ", ".join(dict.fromkeys(rank["device"] or "device without a name" for rank in ranks))
    numbers = sorted({row["step"] for row in facts["steps"]})
    steps = (
        f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}" if numbers else "no step"
    )
    lead = f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} · {devices} · {steps}"
    body = [
        header(f"Where the time went: {facts.get('run') or ranks[0]['file']}", lead),
        verdict_card(facts),
        part_tiles(facts),
        *(note(lack) for lack in dict.fromkeys(lack for rank in ranks for lack in rank["missing"])),
        "<h2>One step</h2>",
        drawing.body,
        "<h2>Steps</h2>",
        steps_card(facts),
        *section("Idle time by cause", idle_table(facts)),
        *section("Collectives", collectives_table(facts)),
        *section("Hotspots", ops_table(facts)),
        *section("Predicted beside measured, op by op", predicted_table(facts.get("predicted"))),
        *section("Host time", host_table(facts)),
        *section("Launches and the critical path", launches_table(facts)),
        *section("Pipeline bubble", pipeline_table(facts)),
        *section("Skew between ranks", skew_table(facts)),
        *section("Kernel sequences worth fusing", fusible_table(facts)),
        *section("Memory", memory_charts(facts)),
    ]
    script = f"{resource_text('page.js')}\n{drawing.script}"
    return page("Where the time went", "\n".join(body), f"{STYLE} {legend_style()}", script)


def section(title: str, inside: str) -> list[str]:
    """Nothing where there is nothing inside."""
    return [f"<h2>{escape(title)}</h2>", inside] if inside else []


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def of_steps(facts: Facts, seconds: float) -> str:
    return f"{seconds / (facts['step_s'] or 1.0):.1%}"


# --- the verdict -----------------------------------------------------------------------------------------


def verdict_card(facts: Facts) -> str:
    kind = f" ({facts['kind'].replace('_', ' ')})" if facts["kind"] else ""
    gain, change = facts["predicted_gain"], facts["remedy"]
    because = " · ".join(Evidence(**one).text for one in facts["evidence"])
    lines = [f"<h3>Verdict: {escape(facts['verdict'])}{escape(kind)}</h3>", note(f"Because: {because}")]
    if facts["verdict"] in ("healthy", "unknown"):
        lines.append(note(change["advice"]))
    else:
        keys = " ".join(change["overrides"]) or "no key of a spec"
        lines.append(note(f"Remedy: {keys} ({change['advice']})"))
        lines.append(note(f"Predicted gain: {gain['low']:.0%} to {gain['high']:.0%} of a step"))
    lines += [note(f"Then: {one['verdict']}, about {one['expected']:.0%}") for one in facts["also"]]
    return f'<div class="card verdict">{"".join(lines)}</div>'


def part_tiles(facts: Facts) -> str:
    steps = max(len(facts["steps"]), 1)
    parts = ("compute", "exposed_comm", "hidden_comm", "copy", "idle")
    names = ("compute", "exposed communication", "hidden communication", "copies", "idle")
    mean = [("a step", f"{milliseconds(facts['step_s'] / steps)} ms", "mean of all steps and ranks")]
    return tiles(
        mean
        + [
            (name, of_steps(facts, facts[f"{part}_s"]), f"{milliseconds(facts[f'{part}_s'] / steps)} ms a step")
            for name, part in zip(names, parts, strict=True)
        ]
    )


# --- steps -----------------------------------------------------------------------------------------------


def steps_card(facts: Facts) -> str:
    """Hidden communication lies under compute, so a bar of compute is split into the two."""
    rows = facts["steps"][:MOST_BARS]
    if not rows:
        return '<p class="empty">No steps.</p>'
    bars = Bars(
        "Milliseconds of each step and rank",
        [f"step {row['step']}, rank {row['rank']}" for row in rows],
        ["compute alone", "exposed communication", "hidden under compute", "copies", "idle"],
        [
            [
                row["compute_s"] - row["hidden_comm_s"],
                row["exposed_comm_s"],
                row["hidden_comm_s"],
                row["copy_s"],
                row["idle_s"],
            ]
            for row in rows
        ],
        milliseconds,
    )
    columns = ["step", "rank", "ms", "compute", "exposed comm", "hidden comm", "copies", "idle"]
    parts = ("seconds", "compute_s", "exposed_comm_s", "hidden_comm_s", "copy_s", "idle_s")
    cells = [[str(row["step"]), str(row["rank"]), *(milliseconds(row[part]) for part in parts)] for row in rows]
    more = len(facts["steps"]) - len(rows)
    left_out = note(f"{more:,} more are in --json") if more else ""
    return f'<div class="card" style="max-width: 720px">{as_svg(bars)}</div>{table(columns, cells, 6)}{left_out}'


def idle_table(facts: Facts) -> str:
    found = [(cause, length) for cause, length in facts["idle_by_cause"].items() if length > 0]
    rows = [
        [cause.replace("_", " "), milliseconds(length), of_steps(facts, length)]
        for cause, length in sorted(found, key=lambda one: -one[1])
    ]
    return table(["cause", "ms", "of the steps"], rows, 2) if rows else ""


def collectives_table(facts: Facts) -> str:
    rows = [
        [
            one["collective"],
            one["group"] or "–",
            "–" if one["ranks"] is None else str(one["ranks"]),
            f"{one['calls']:,}",
            "–" if one["bytes"] is None else binary_bytes(one["bytes"]),
            milliseconds(one["seconds"]),
            milliseconds(one["exposed_s"]),
            "–" if one["percent"] is None else f"{one['percent']:.1f}%",
        ]
        for one in facts["overlap"]["collectives"][:LISTED]
    ]
    if not rows:
        return ""
    whole = facts["overlap"]["percent"]
    said = "" if whole is None else note(f"Overlap: {whole:.1f}% of communication lies under compute.")
    columns = ["collective", "group", "ranks", "calls", "bytes", "ms", "exposed ms", "overlap"]
    return f"{table(columns, rows, 6)}{said}"


# --- ops and the host ------------------------------------------------------------------------------------


def ops_table(facts: Facts) -> str:
    rows = [
        [
            short_name(one["op"]),
            f"{one['calls']:,}",
            milliseconds(one["seconds"]),
            f"{one['share']:.1%}",
            "–" if one["flops_per_s"] is None else f"{short(one['flops_per_s'])}FLOP/s",
            "–" if one["bytes_per_s"] is None else f"{short(one['bytes_per_s'])}B/s",
            "–" if one["floor_s"] is None else milliseconds(one["floor_s"]),
        ]
        for one in facts["ops"][:LISTED]
    ]
    return table(["op", "calls", "ms", "share", "achieved", "read and written", "floor ms"], rows, 6) if rows else ""


def predicted_table(predicted: Facts | None) -> str:
    """Of our own runs: the planner's price of every op of a step beside its traced time."""
    if not predicted:
        return ""
    columns, rows = op_table(predicted)
    said = note(
        "One step of one rank, by the seconds that the planner was wrong. Floor: the op's kernels at the machine's "
        "rates, without the host."
    )
    return f"{table(columns, rows, 6)}{said}{note(why) if (why := missing_price(predicted)) else ''}"


def host_table(facts: Facts) -> str:
    rows = [
        [str(rank["rank"]), shortened(one["call"]), f"{one['calls']:,}", milliseconds(one["seconds"])]
        for rank in facts["host"][:1]
        for one in rank["calls"][:LISTED]
    ]
    said = note("Own time of Python calls, or of annotations where no stacks were recorded; the first rank.")
    return f"{table(['rank', 'call', 'calls', 'own ms'], rows, 2)}{said}" if rows else ""


def launches_table(facts: Facts) -> str:
    paths = {one["rank"]: one for one in facts["critical_path"]}
    rows = []
    for one in facts["launches"]:
        path = paths.get(one["rank"])
        kinds = path["by_kind"].items() if path else ()
        split = ", ".join(f"{kind.replace('_', ' ')} {part / path['seconds']:.1%}" for kind, part in kinds if path)
        rows.append(
            [
                str(one["rank"]),
                split or "–",
                milliseconds(path["seconds"]) if path else "–",
                f"{one['per_step']:,.0f}",
                f"{one['share_under_10us']:.1%}",
            ]
        )
    what = "ops" if all(rank["device"] == "cpu" for rank in facts["ranks"]) else "launches"
    columns = ["rank", "critical path", "its ms", f"{what} a step", "under 10 µs"]
    longest = [
        [str(one["rank"]), short_name(part["name"]), milliseconds(part["seconds"])]
        for one in facts["critical_path"][:1]
        for part in one["longest"]
    ]
    kernels = table(["rank", "longest on the path", "ms"], longest, 1) if longest else ""
    return f"{table(columns, rows, 3)}{kernels}" if rows else ""


def pipeline_table(facts: Facts) -> str:
    if not facts["pipeline"]:
        return ""
    columns, rows = bubble_table(facts["pipeline"])
    said = note("The bubble is the share of the time from the first pass to the end of the last that a rank idles.")
    return f"{table(columns, rows, len(columns) - 2)}{said}"


def skew_table(facts: Facts) -> str:
    found = facts["skew"]
    if not found:
        return ""
    rows = [[str(rank), milliseconds(length)] for rank, length in found["wait_s"].items()]
    said = ""
    if found["late_rank"] is not None:
        cause = {"slow_compute": "it computed longer", "late_arrival": "it came late"}[found["cause"]]
        said = note(
            f"Rank {found['late_rank']} let the others wait {duration(found['late_s'])} in {found['collectives']} "
            f"collectives ({found['late_share']:.1%} of the steps): {cause}."
        )
    return f"{table(['rank', 'ms in collectives before the last rank came'], rows, 1)}{said}"


def fusible_table(facts: Facts) -> str:
    rows = [
        [
            " → ".join(short_name(name, 40) for name in one["kernels"]),
            f"{one['times']:,}",
            milliseconds(one["gap_s"]),
            milliseconds(one["kernel_s"]),
        ]
        for one in facts["fusible"]
    ]
    return table(["kernels", "times", "ms of gaps", "ms of kernels"], rows, 3) if rows else ""


# --- memory ----------------------------------------------------------------------------------------------


def memory_charts(facts: Facts) -> str:
    charts: dict[str, str] = {}
    tables = []
    for rank in facts["memory"]:
        for source, one in [
            *(("trace", one) for one in rank["devices"]),
            *(("allocator", one) for one in rank["snapshot"] or ()),
        ]:
            where = "host" if one["device"] < 0 else f"GPU {one['device']}"
            lines = [Line("allocated", [(at, held) for at, held, _ in one["timeline"]], "s0")]
            if one["peak_reserved_bytes"]:
                lines.append(Line("reserved", [(at, taken) for at, _, taken in one["timeline"]], "s1"))
            title = f"Rank {rank['rank']}, {where}, by the {source}: peak {binary_bytes(one['peak_bytes'])}"
            charts[title] = line_chart(lines, zero=True, show=show_bytes, x="seconds", y="")
            if source == "allocator":
                tables.append(holders_table(rank["rank"], one))
    return f"{chart_cards(charts)}{''.join(tables)}" if charts else ""


def holders_table(rank: int, one: Facts) -> str:
    rows = [
        [held["site"], binary_bytes(held["bytes"]), f"{held['bytes'] / one['peak_bytes']:.1%}", f"{held['blocks']:,}"]
        for held in one["holders"][:LISTED]
    ]
    said = note(
        f"Rank {rank}, GPU {one['device']}: {binary_bytes(one['allocated_bytes'])} allocated of "
        f"{binary_bytes(one['reserved_bytes'])} reserved; the largest free block is "
        f"{binary_bytes(one['largest_free_bytes'])} of {binary_bytes(one['free_bytes'])} (fragmentation "
        f"{one['fragmentation']:.0%})."
    )
    return f"{table(['held the peak, allocated by', 'bytes', 'share', 'blocks'], rows, 3)}{said}" if rows else said


def show_bytes(value: float) -> str:
    return binary_bytes(int(value))
