"""The data card: what was read, what every stage kept and dropped, samples of that, and what the result holds."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .run import READ, Run
from .statistics import add_statistics
from .tally import add_tallies

CARD_JSON, CARD_HTML = "card.json", "card.html"
SHOWN = 20  # rows of languages and domains


def card_of(run: Run) -> dict[str, Any]:
    """Follows from the documents alone: no times, no names of machines."""
    pipeline = run.pipeline
    samples = pipeline.output.samples
    stages: dict[str, dict[str, Any]] = {}
    duplicates = {name for name, stage in zip(pipeline.names(), pipeline.stages, strict=True) if stage.deduplicates}
    removed = reached = 0
    for index, phase in enumerate(run.phases):
        records = run.step_records(index)
        for name in ([READ] if index == 0 else []) + phase.names():
            stage = add_tallies([record["stages"][name] for record in records], samples)
            dropped = sum(entry["documents"] for entry in stage["dropped"].values())
            if name in duplicates:
                removed += dropped
                reached = max(reached, dropped + stage["kept"]["documents"])
            stages[name] = stage
        if phase.decided:
            report = run.conclusion(index - 1)
            stages[phase.decided[0]] |= {"report": report} if report else {}
    reasons: Counter[str] = Counter()
    for stage in stages.values():
        reasons.update({reason: entry["documents"] for reason, entry in stage["dropped"].items()})
    found = add_statistics([record["statistics"] for record in run.step_records(len(run.phases) - 1)])
    read = stages[READ]
    unread = sum(entry["documents"] for entry in read["dropped"].values())
    unread_bytes = sum(entry["bytes"] for entry in read["dropped"].values())
    return {
        "pipeline": pipeline.request(),
        "read": {
            "documents": read["kept"]["documents"] + unread,
            "bytes": read["kept"]["bytes"] + unread_bytes,
        },
        "kept": {"documents": found["documents"], "bytes": found["bytes"]},
        "dropped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        "dedup_rate": removed / reached if reached else 0.0,
        "stages": stages,
        "statistics": found,
    }


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}pre{background:#f5f5f5;padding:.5rem;overflow:auto;
max-height:12rem;white-space:pre-wrap}summary{cursor:pointer}small{color:#666}
@media(prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}td,th{border-color:#333}pre{background:#222}
small{color:#999}}
"""


def page_of(card: Mapping[str, Any]) -> str:
    """One file without scripts."""
    read, kept = card["read"], card["kept"]
    share = kept["documents"] / read["documents"] if read["documents"] else 0.0
    found = card["statistics"]
    tokens = found["tokens"]
    parts = [
        f"<h1>Data card</h1><p>{kept['documents']:,} of {read['documents']:,} documents kept ({share:.1%}), "
        f"{megabytes(kept['bytes'])} of {megabytes(read['bytes'])}. Duplicates: {card['dedup_rate']:.1%} of the "
        f"documents that reached deduplication. Sources: {escaped(', '.join(card['pipeline']['sources']))}.</p>",
        "<h2>Stages</h2>",
        table(
            ["stage", "kept", "MB", "dropped", "share", "changed"], [row_of(*item) for item in card["stages"].items()]
        ),
        "<h2>Dropped, by stage and reason</h2>",
        *(reasons_of(name, stage) for name, stage in card["stages"].items()),
        *(clusters_of(name, stage["report"]) for name, stage in card["stages"].items() if stage.get("report")),
        "<h2>What is left</h2>",
        f"<p>Mean document {found['mean_bytes']:,.0f} bytes. "
        f"Tokens ({escaped(card['pipeline']['output']['tokenizer'])}): "
        f"{tokens['entropy_bits']:.3f} bits of entropy, {tokens['bytes_each']:.2f} bytes each, "
        f"{tokens['different']:,} different.</p>",
        *(mix_of(name, found[name], kept["bytes"]) for name in ("languages", "domains")),
        "<h3>Bytes of a document</h3>",
        table(["bytes", "documents"], [[size, f"{count:,}"] for size, count in found["sizes"].items()]),
    ]
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f"{head}<title>Data card</title><style>{STYLE}</style>{''.join(parts)}</html>\n"


def row_of(name: str, stage: Mapping[str, Any]) -> list[str]:
    kept = stage["kept"]["documents"]
    dropped = sum(entry["documents"] for entry in stage["dropped"].values())
    share = dropped / (kept + dropped) if kept + dropped else 0.0
    changed = ", ".join(f"{count:,} {what}" for what, count in stage["changed"].items() if what != "documents")
    size = f"{stage['kept']['bytes'] / 1e6:,.1f}"
    return [escaped(name), f"{kept:,}", size, f"{dropped:,}", f"{share:.1%}", escaped(changed)]


def reasons_of(name: str, stage: Mapping[str, Any]) -> str:
    found = []
    for reason, entry in sorted(stage["dropped"].items(), key=lambda item: -item[1]["documents"]):
        samples = "".join(
            f"<p><small>{escaped(place)}</small></p><pre>{escaped(text)}</pre>"
            for _, place, text in stage["samples"].get(reason, [])
        )
        title = f"{escaped(name)}: {escaped(reason)}, {entry['documents']:,} documents, {megabytes(entry['bytes'])}"
        found.append(f"<details><summary>{title}</summary>{samples}</details>")
    return "".join(found)


def clusters_of(name: str, report: Mapping[str, Any]) -> str:
    """Of near-duplicates; reports of other stages are in the JSON alone."""
    found = report.get("clusters")
    if not found or not found["clusters"]:
        return ""
    shown = []
    for one in found["largest"]:
        documents = [("kept", one["kept"]), *(("dropped", other) for other in one["others"])]
        samples = "".join(
            f"<p><small>{what}: {escaped(document['id'])}</small></p><pre>{escaped(document['text'])}</pre>"
            for what, document in documents
        )
        title = f"{one['size']:,} documents like {escaped(one['kept']['id'])}"
        shown.append(f"<details><summary>{title}</summary>{samples}</details>")
    sizes = table(["documents", "clusters"], [[size, f"{count:,}"] for size, count in found["sizes"].items()])
    return (
        f"<h2>Clusters: {escaped(name)}</h2><p>{found['clusters']:,} clusters of {found['documents']:,} documents; of "
        f"each the first is kept.</p>{sizes}{''.join(shown)}"
    )


def mix_of(name: str, mix: Mapping[str, Sequence[int]], total: int) -> str:
    rows = [
        [escaped(key), f"{documents:,}", f"{size / 1e6:,.1f}", f"{size / total:.1%}" if total else ""]
        for key, (documents, size) in list(mix.items())[:SHOWN]
    ]
    more = f"<p><small>and {len(mix) - SHOWN} more in {CARD_JSON}</small></p>" if len(mix) > SHOWN else ""
    return f"<h3>{name.capitalize()}</h3>{table([name[:-1], 'documents', 'MB', 'share of bytes'], rows)}{more}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i else ''}>{cell}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def escaped(text: str) -> str:
    return html.escape(str(text))
