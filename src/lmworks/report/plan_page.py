"""Interactive pages of `lmworks plan memory` and `lmworks plan search`.

A page embeds the command's `--json` output and shows nothing else. Static parts are written here; interactive parts are
rendered in the browser by plan_charts.js (charts) and plan_page.js (selection).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..record.formatting import binary_bytes, duration, short
from .html_page import card, header, note, page, resource_text, table, tiles

Facts = Mapping[str, Any]

# Keys in which layouts of a front differ, and their labels.
LAYOUT_KEYS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline",
    "ep": "expert parallel",
    "dp_replicate": "copies",
    "dp_shard": "sharded over",
    "zero": "ZeRO",
    "micro_batch": "micro-batch",
    "schedule": "schedule",
    "virtual": "stages a rank",
    "recompute": "recompute",
    "offload": "offload",
    "offload_activations": "activations on the host, GiB",
}
MAX_SPANS = 100_000  # of all timelines of a page: about 3 MB


def dollars_text(dollars: float | None, sign: str = "") -> str:
    """None: unknown price."""
    return "–" if dollars is None else f"{sign}{short(dollars)}"


def memory_page(facts: Facts) -> str:
    """Memory of every pipeline rank against the GPU's capacity."""
    verdict = "fits" if facts["fits"] else "does not fit"
    figures = [
        ("reserved", binary_bytes(facts["reserved"]), "by the allocator, on the fullest rank"),
        ("allocated", binary_bytes(facts["allocated"]), "tensors, at the peak"),
        ("usable", binary_bytes(facts["usable"]), f"of {binary_bytes(facts['capacity'])}"),
        ("out of memory", f"{facts['oom_probability']:.0%}", "probability"),
    ]
    if facts["host"]:
        figures.append(("host", binary_bytes(facts["host"]), "offloaded, for each rank"))
    body = [
        header(facts["name"], f"{facts['gpus']} × {facts['gpu']} · {facts['layout']}", verdict),
        tiles(figures),
        "<h2>Memory by pipeline rank</h2>",
        card("", '<div id="memory"></div>'),
        '<h2>In figures, GiB</h2><div class="card scroll" id="memory-table"></div>',
        note(
            "Reserved: taken from the GPU by PyTorch's allocator. Absent: gradients that do not exist yet at the peak."
        ),
    ]
    return document(facts["name"], body, facts)


def search_page(facts: Facts) -> str:
    """The best layouts and their cost; then the Pareto front of each cluster, and all predictions of the selected
    layout."""
    front = sorted(itertools.chain(*facts["fronts"]), key=lambda one: one["step_s"]) or facts["front"]
    gpus = " or ".join(dict.fromkeys(map(cluster_of, front)))
    found = f"{facts['legal']:,} legal layouts, {facts['fitting']:,} fit, {len(front)} on the front"
    lead = f"sequences of {facts['seq']:,} tokens, {facts['global_batch']:,} a step · {found}"
    body = [header(facts["model"], f"{gpus} · {lead}" if gpus else lead), explained(facts.get("explained"))]
    if front:
        body += [best_layouts(front), clusters(facts["fastest"]), layout_choice(front), details()]
    else:
        body.append('<p class="card">No layout fits.</p>')
    return document(facts["model"], body, {**facts, "front": limit_timelines(front), "fronts": [], "fastest": []})


def document(title: str, body: Sequence[str], facts: Facts) -> str:
    # "<" could end the script element; its JSON escape is equivalent.
    data = json.dumps(nonfinite_to_null(facts), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    carried = f'<script type="application/json" id="facts">{data}</script>'
    noscript = "<noscript><p>The drawings of this page need JavaScript.</p></noscript>"
    script = resource_text("plan_charts.js") + resource_text("plan_page.js")
    whole = [*filter(None, body), noscript, carried]
    return page(f"{title} · LMWorks plan", "\n".join(whole), resource_text("plan_page.css"), script)


# --- pieces ---------------------------------------------------------------------------------------------


def explained(verdict: Facts | None) -> str:
    """The answer to `--explain` for one layout."""
    if verdict is None:
        return ""
    layout = " ".join(f"{key}={value}" for key, value in verdict["layout"].items())
    changes = "".join(f"<li>{escape(str(change))}</li>" for change in verdict["changes"])
    wayout = f"<p>The smallest changes that make it fit:</p><ul>{changes}</ul>" if changes else ""
    return f"<h2>Explained: {escape(layout)}</h2>" + card("", f"<p>{escape(verdict['text'])}</p>{wayout}")


def best_layouts(front: Sequence[Facts]) -> str:
    """Fastest and cheapest layout as sentences, and the tiles of the selected layout."""
    fastest = front[0]
    sentences = [f"Fastest: {layout_offer(fastest)}"]
    priced = [one for one in front if one["bill"]["dollars"] is not None]
    cheapest = min(priced, key=lambda one: one["bill"]["dollars"], default=fastest)
    if cheapest["bill"]["dollars"] != fastest["bill"]["dollars"]:
        sentences.append(f"Cheapest: {layout_offer(cheapest)}")
    paragraphs = "".join(f"<p>{escape(sentence)}.</p>" for sentence in sentences)
    return (
        f'<div class="card answer">{paragraphs}</div>'
        '<h2><span id="which">Fastest layout</span>: <span id="chosen" aria-live="polite"></span></h2>'
        '<dl class="tiles" id="tiles"></dl>'
    )


def layout_offer(one: Facts) -> str:
    bill, unknown = one["bill"], "a price that is not known (cluster.price_hour sets it)"
    price = unknown if bill["dollars"] is None else dollars_text(bill["dollars"], "$")
    took = f"{bill['hours'] / 24:.3g} days and {price} for {short(bill['tokens'])} tokens"
    return f"{took}, with {one['text']} on {cluster_of(one)}"


def clusters(fastest: Sequence[Facts]) -> str:
    """The fastest layout of each cluster; empty for a single cluster."""
    if len(fastest) < 2:
        return ""
    columns = ["cluster", "fastest layout", "days", "$", "tokens/s", "MFU", "GiB a GPU"]
    rows = [
        [
            cluster_of(one),
            one["text"],
            f"{one['bill']['hours'] / 24:.3g}",
            dollars_text(one["bill"]["dollars"]),
            short(one["tokens_per_s"]),
            "–" if one["mfu"] is None else f"{one['mfu']:.1%}",
            f"{one['memory']['reserved'] / 2**30:.1f}",
        ]
        for one in sorted(fastest, key=lambda one: one["bill"]["hours"])
    ]
    return f"<h2>Cluster by cluster</h2>{table(columns, rows, numeric=5, whole=1)}"


def layout_choice(front: Sequence[Facts]) -> str:
    """Filters, the plot and the table of alternatives."""
    choices = {key: values for key in LAYOUT_KEYS if len(values := values_of(front, key)) > 1}
    return (
        f"<h2>Other layouts</h2>{controls(front, choices)}"
        + card("Speed against free memory", '<div id="pareto"></div><p class="readout" id="pareto-readout"></p>')
        + f"<h2>Alternatives</h2>{alternatives(front, list(choices))}{shared_settings(front)}"
    )


def controls(front: Sequence[Facts], choices: Mapping[str, Sequence[Any]]) -> str:
    reserved = [one["memory"]["reserved"] / 2**30 for one in front]
    low, high = math.floor(min(reserved)), math.ceil(max(reserved))
    several = len({cluster_of(one) for one in front}) > 1
    colour = '<option value="cluster">cluster</option>' if several else ""
    colour += "".join(f'<option value="{key}">{LAYOUT_KEYS[key]}</option>' for key in choices or ["recompute"])
    selects = "".join(
        f'<label>{LAYOUT_KEYS[key]}<select data-filter="{key}"><option value="">any</option>'
        + "".join(f"<option>{escape(str(value))}</option>" for value in values)
        + "</select></label>"
        for key, values in choices.items()
    )
    return (
        f'<form class="controls" id="controls"><label>colour<select id="colour">{colour}</select></label>'
        f'<label><span>memory at most <output id="most-shown" for="most">{high} GiB</output></span>'
        f'<input id="most" type="range" min="{low}" max="{high}" step="1" value="{high}"></label>{selects}'
        '<button type="button" id="everything">Show all</button><p id="count" aria-live="polite"></p></form>'
    )


def alternatives(front: Sequence[Facts], choices: Sequence[str]) -> str:
    """One row per layout; its first cell selects it."""
    figures = {
        "tokens_per_s": ("tokens/s", lambda one: short(one["tokens_per_s"])),
        "step_s": ("step", lambda one: duration(one["step_s"])),
        "mfu": ("MFU", lambda one: "–" if one["mfu"] is None else f"{one['mfu']:.1%}"),
        "reserved": ("GiB", lambda one: f"{one['memory']['reserved'] / 2**30:.1f}"),
        "headroom": ("free", lambda one: f"{one['headroom']:.0%}"),
        "dollars_per_gtoken": ("$ for 1e9 tokens", lambda one: dollars_text(one["dollars_per_gtoken"])),
    }
    columns = [("text", "layout"), *((key, name) for key, (name, _) in figures.items())]
    columns += [(key, key.replace("_", " ")) for key in choices]
    head = "".join(f'<th data-key="{key}"><button type="button">{name}</button></th>' for key, name in columns)
    rows = []
    for index, one in enumerate(front):
        cells = [show(one) for _, show in figures.values()] + [str(value_of(one, key)) for key in choices]
        rows.append(
            f'<tr data-index="{index}"><td><button type="button">{escape(one["text"])}</button></td>'
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    return (
        f'<div class="card scroll front" id="front"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def shared_settings(front: Sequence[Facts]) -> str:
    same = [(key, values_of(front, key)) for key in LAYOUT_KEYS]
    shared = ", ".join(f"{LAYOUT_KEYS[key]} {values[0]}" for key, values in same if len(values) == 1)
    return note(f"The same in all of them: {shared}.") if shared else ""


def details() -> str:
    """Containers for the charts of the selected layout; empty sections are hidden."""
    zoom = '<label>zoom<input id="zoom" type="range" min="1" max="16" step="1" value="1"></label>'
    return (
        "<h2>Memory by pipeline rank</h2>"
        + card("", '<div id="memory"></div><details><summary>In figures, GiB</summary>'
               '<div class="scroll" id="memory-table"></div></details>')
        + "<h2>Where a step's time goes</h2>"
        + card("", '<div id="waterfall"></div>')
        + '<section id="pipeline"><h2>The pipeline in time</h2>'
        + card("", f'<div class="controls">{zoom}</div><div class="timeline" id="timeline" tabindex="0"></div>'
               '<p class="readout" id="timeline-readout"></p>')
        + '</section><section id="exchanges"><h2>What the first rank exchanges in a step</h2>'
        + card("", '<div class="scroll" id="collectives"></div><details><summary>Every call</summary>'
               '<div class="scroll" id="all-collectives"></div></details>')
        + "</section>"
    )  # fmt: skip


# --- figures --------------------------------------------------------------------------------------------


def cluster_of(one: Facts) -> str:
    return f"{one['gpus']} × {one['gpu']}"


def value_of(one: Facts, key: str) -> Any:
    return one["layout"].get(key, one.get(key))


def values_of(front: Sequence[Facts], key: str) -> list[Any]:
    """Sorted, numbers numerically."""
    found = {value_of(one, key) for one in front} - {None}
    return sorted(found, key=lambda value: (isinstance(value, str), value))


def limit_timelines(front: Sequence[Facts]) -> list[Facts]:
    """Timelines of the fastest layouts, at most `MAX_SPANS` spans in all, with rounded times."""
    room, kept = MAX_SPANS, list[Facts]()
    for one in front:
        spans = one.get("timeline") or []
        room -= len(spans)
        kept.append({**one, "timeline": round_times(spans) if spans and room >= 0 else None})
    return kept


def round_times(spans: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Times rounded to 1e-5 of the total."""
    places = 5 - math.ceil(math.log10(max(span[5] for span in spans)))
    return [[*span[:4], round(span[4], places), round(span[5], places)] for span in spans]


def nonfinite_to_null(value: Any) -> Any:
    """NaN and infinity become null in JSON; the page shows a dash."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: nonfinite_to_null(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_null(inside) for inside in value]
    return value
