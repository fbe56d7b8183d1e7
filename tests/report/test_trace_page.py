"""The page of traces: the figures of the command's JSON, and the verdict; a picture where Bokeh is not installed."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lmworks.diagnose.verdict import judge
from lmworks.report import trace_timeline
from lmworks.report.trace_page import trace_page
from lmworks.trace import read_traces
from lmworks.trace.summary import summarise

DATA = Path(__file__).parents[1] / "trace" / "data"


def facts_and_page(*names: str) -> tuple[dict[str, Any], str]:
    traces = read_traces([DATA / f"{name}.json.gz" for name in names])
    facts = summarise(traces)
    facts |= judge(traces, facts).to_dict()
    return facts, trace_page(facts, traces)


@pytest.fixture(autouse=True)
def _without_bokeh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_timeline, "find_spec", lambda name: None)


def rows_after(page: str, title: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    text = page[page.index(f"<h2>{title}</h2>") :]
    text = text[: text.index("</table>")]
    rows = re.findall(r"<tr>(.*?)</tr>", text[text.index("<table>") :])[1:]
    return [[unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def test_figures_are_those_of_the_json() -> None:
    facts, page = facts_and_page("fsdp2_gloo_rank0", "fsdp2_gloo_rank1")
    parts = ("seconds", "compute_s", "exposed_comm_s", "hidden_comm_s", "copy_s", "idle_s")
    assert rows_after(page, "Steps") == [
        [str(row["step"]), str(row["rank"]), *(ms(row[part]) for part in parts)] for row in facts["steps"]
    ]
    idle = sorted(facts["idle_by_cause"].items(), key=lambda one: -one[1])
    assert [row[:2] for row in rows_after(page, "Idle time by cause")] == [
        [cause.replace("_", " "), ms(length)] for cause, length in idle if length
    ]
    assert [(row[0], row[3], row[5], row[6], row[7]) for row in rows_after(page, "Collectives")] == [
        (one["collective"], str(one["calls"]), ms(one["seconds"]), ms(one["exposed_s"]), f"{one['percent']:.1f}%")
        for one in facts["overlap"]["collectives"]
    ]
    assert [(row[0], row[2]) for row in rows_after(page, "Hotspots")] == [
        (one["op"], ms(one["seconds"])) for one in facts["ops"]
    ]
    assert [(row[1], row[3]) for row in rows_after(page, "Host time")] == [
        (one["call"], ms(one["seconds"])) for one in facts["host"][0]["calls"]
    ]
    assert "<title>FSDP::all_gather (blocks.1), " in page  # in the timeline, with the module
    assert rows_after(page, "Skew between ranks") == [
        [str(rank), ms(length)] for rank, length in facts["skew"]["wait_s"].items()
    ]


def test_verdict_launches_critical_path_and_fusible_kernels() -> None:
    facts, page = facts_and_page("ddp_nccl")
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    assert f"Verdict: {facts['verdict']}" in text
    assert all(f"{one['value']:.1%}" in text for one in facts["evidence"] if one["unit"] == "share")
    gain = facts["predicted_gain"]
    assert f"Predicted gain: {gain['low']:.0%} to {gain['high']:.0%} of a step" in text
    (row,) = rows_after(page, "Launches and the critical path")
    assert row[2:] == [
        ms(facts["critical_path"][0]["seconds"]),
        f"{facts['launches'][0]['per_step']:,.0f}",
        f"{facts['launches'][0]['share_under_10us']:.1%}",
    ]
    fused = rows_after(page, "Kernel sequences worth fusing")
    assert [row[1:3] for row in fused] == [[f"{one['times']:,}", ms(one["gap_s"])] for one in facts["fusible"]]


def test_without_bokeh_the_step_is_a_picture_and_says_what_would_zoom() -> None:
    _, page = facts_and_page("ddp_nccl")
    picture = page[page.index('<svg id="timeline"') :]
    picture = picture[: picture.index("</svg>")]
    assert 500 < picture.count("<rect ") <= trace_timeline.MOST_IN_SVG
    assert "lmworks[timeline]" in page and "Bokeh.embed" not in page and len(page) < 1_500_000
