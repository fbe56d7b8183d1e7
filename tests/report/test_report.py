"""report.html: the run's own numbers, nothing from outside, nothing executed."""

import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lmworks.record import MetricsWriter
from lmworks.report import run_report
from lmworks.report.html_page import StyledCell, resource_text, table
from lmworks.report.run_report import smooth, write_report
from lmworks.report.svg import EventMarks, Line, average, downsample, line_chart, ticks

VOID = {"meta", "circle", "line", "polyline", "polygon"}


class Page(HTMLParser):
    """Tags with their attributes, and the text of each tile; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "|"

    def charts(self):
        return [json.loads(attrs["data-chart"])["lines"] for tag, attrs in self.tags if tag == "svg"]


def test_numbers_equal_metrics(make_run):
    folder = make_run()
    folder.prediction_path.write_text(json.dumps({"step_s": 0.2}))
    page = Page(write_report(folder).read_text())
    for tile in (
        "final loss|2.0000|",
        "validation loss|4.0000|best 3.5000 at step 2|",
        "tokens|4.1k|4,096|",
        "tokens/s|250|median|",
        "step time|250 ms|",
        "MFU|–|",
        "peak memory|4 MiB|",
    ):
        assert tile in page.text
    assert "step time|200 ms|250 ms|1.25|" in page.text
    loss = page.charts()[0]
    assert loss[0] == {"name": "training", "points": [[1, "8"], [2, "4"], [3, "2.667"], [4, "2"]]}
    assert loss[2] == {"name": "validation", "points": [[2, "3.5"], [4, "4"]]}
    # Of 1.0 s in steps, 0.5 s is forward and backward, 0.2 s optimizer, 0.1 s data.
    for share in ("forward and backward 50.0%", "optimizer 20.0%", "waiting for data 10.0%", "the rest 20.0%"):
        assert share in page.text


def test_events_and_spec_are_included(make_run):
    folder = make_run(end="interrupt")
    folder.event("resume", 2, attempt=1)
    folder.event("finish", 4)
    page = Page(write_report(folder).read_text())
    assert "interrupted" not in page.text.split("|")[:5]
    assert "|2|resume|attempt 2 resumed after step 2|" in page.text
    assert "2 attempts" in page.text
    assert folder.spec_path.read_text().strip() in page.text


def test_user_text_is_escaped(make_run, tmp_path):
    evil = "<script>alert(1)<script>"
    folder = make_run(name=evil, path=tmp_path / "run")
    folder.event("fault", 4, error="<img src=x onerror=alert(2)> \"quoted\" & 'more'")
    text = write_report(folder).read_text()
    page = Page(text)
    assert evil not in text
    assert evil in page.text
    assert "<img src=x onerror=alert(2)>" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]


def test_report_is_self_contained(make_run):
    text = write_report(make_run()).read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import|\bsrc=|\bhref=", text)


def test_charts_are_well_formed(make_run):
    text = write_report(make_run()).read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        numbers = re.findall(
            r'(?:points|cx|cy|x1|y1)="([^"]*)"', ElementTree.tostring(ElementTree.fromstring(drawing)).decode()
        )
        for value in " ".join(numbers).replace(",", " ").split():
            assert -1 <= float(value) <= 641


def struck(make_run):
    folder = make_run(steps=4)
    folder.event("save", 2, path="step-000002", bytes=2**20, seconds=0.5, write_s=0.0)
    what = {"what": "loss 9 is 12 robust deviations above 3", "action": "log", "cursor": 2, "reason": "spike_loss"}
    folder.event("spike", 3, **what, data={"sources": {"tokens": 8}, "samples": [16, 23]})
    folder.event("restart", 2, attempt=1, launch="x", restarts=1, cause="rank 1 was killed", lost=2)
    folder.event("resume", 2, attempt=1)
    return folder


def test_events_are_text_with_date(make_run):
    text = write_report(struck(make_run)).read_text()
    page = Page(text)
    assert "|3|spike|loss 9 is 12 robust deviations above 3|" in page.text
    assert "|save|saved step-000002 (1 MiB); training waited 500 ms|" in page.text
    rows = re.findall(r"<tr><td class=whole>(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)</td>", text)
    assert len(rows) == 6  # start, finish, and the four above
    assert not re.search(r"[{}]|&#x27;", text[text.index("<h2>Events") : text.index("<h2>Spec")])
    assert ".whole { white-space: nowrap; }" in text


def test_loss_chart_has_event_marks(make_run):
    text = write_report(struck(make_run)).read_text()
    loss, *others = [json.loads(attrs["data-chart"]) for tag, attrs in Page(text).tags if tag == "svg"]
    assert {mark["name"]: mark["points"] for mark in loss["marks"]} == {
        "spike or NaN (1)": [[3, "loss 9 is 12 robust deviations above 3"]],
        # of the two events that a restart writes, the one that has its cause
        "restart or rewind (1)": [
            [2, "all ranks were started again (restart 1), 2 steps to be taken again: rank 1 was killed"]
        ],
        "save (1)": [[2, "saved step-000002 (1 MiB); training waited 500 ms"]],
    }
    assert [other["marks"] for other in others] == [[]] * 5
    drawn = re.search(r"<svg.*?</svg>", text, re.DOTALL)[0]
    for style, glyph in (("spike", "▼"), ("restart", "■"), ("save", "◆")):
        assert re.search(rf'<g class="mark {style}"><g><title>[^<]+</title>.*?>{glyph}</text>', drawn)
        assert f'<li class="mark {style}"><b>{glyph}</b>' in text


def test_overlapping_marks_are_merged():
    marks = EventMarks("save", "save", "◆", [(step, f"at {step}") for step in range(-5, 1001)], low=True)
    chart = line_chart([Line("loss", [(0, 1.0), (1000, 2.0)], "s0")], marks=[marks])
    assert 100 < chart.count("◆") < 200
    places = [float(x) for x in re.findall(r'class="mid" x="([\d.]+)"[^>]*>◆', chart)]
    assert all(78 <= x <= 640 for x in places)


def test_axes_have_names(make_run):
    text = write_report(make_run()).read_text()
    for drawing, y in zip(
        re.findall(r"<svg.*?</svg>", text, re.DOTALL),
        ("nats a token", "learning rate", "tokens/s", "norm", "time of a step", "MiB"),
        strict=True,
    ):
        assert re.findall(r'<text class="axis title mid"[^>]*>([^<]*)<', drawing) == ["step", y]


@pytest.mark.parametrize("steps", [0, 1])
def test_run_with_few_steps(make_run, steps):
    page = Page(write_report(make_run(steps=steps, end=None)).read_text())
    assert f"{steps} of 4 steps" in page.text


def test_nonfinite_loss_is_a_gap(make_run):
    folder = make_run()
    with MetricsWriter(folder.metrics_path, 1) as metrics:
        metrics.write(3, {"loss": float("nan"), "grad_norm": float("inf")})
    loss = Page(write_report(folder).read_text()).charts()[0]
    assert [step for step, _ in loss[0]["points"]] == [1, 2, 4]


def test_long_histories_are_truncated(make_run, monkeypatch):
    monkeypatch.setattr(run_report, "MAX_EVENTS", 3)
    folder = make_run()
    for step in range(10):
        folder.event("save", step)
    page = Page(write_report(folder).read_text())
    assert page.text.count("|save|") == 3
    assert "9 earlier ones" in page.text


def test_pngs_with_matplotlib(make_run, plots):
    pytest.importorskip("matplotlib")
    folder = make_run()
    write_report(folder)
    assert sorted(file.name for file in folder.plots.iterdir()) == ["loss.png", "lr.png", "throughput.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.plots.iterdir())


def test_missing_matplotlib_names_extra(make_run, plots, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = make_run()
    page = Page(write_report(folder).read_text())
    assert not folder.plots.exists()
    assert 'pip install "lmworks[plots]"' in page.text
    assert len(page.charts()) == 6


def test_ticks_are_round():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(1, 600, 7) == [100, 200, 300, 400, 500, 600]
    assert ticks(-0.5, 0.5, 2) == [-0.5, 0.0, 0.5]


def test_thinning_keeps_spikes():
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[77_777] = (77_777, -5.0)
    thinned = downsample(points)
    assert len(thinned) <= 500
    assert (54_321, 99.0) in thinned
    assert (77_777, -5.0) in thinned
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_averaging_keeps_the_mean():
    rows = [(step, [1.0, step]) for step in range(1, 801)]
    means = average(rows, limit=80)
    assert len(means) == 80
    assert sum(parts[1] for _, parts in means) / 80 == pytest.approx(400.5)


def test_smoothing_does_not_lag():
    ramp = [(step, 2.0 * step) for step in range(1000)]
    assert [y for _, y in smooth(ramp)] == pytest.approx([y for _, y in ramp])
    assert smooth([]) == []


def test_constant_series():
    assert "NaN" not in line_chart([Line("flat", [(1, 0.0), (2, 0.0)], "s0")], zero=True)


def test_no_string_of_the_script_is_broken_by_a_newline():
    assert all(line.count('"') % 2 == 0 and line.count("`") % 2 == 0 for line in resource_text("page.js").splitlines())


def test_numeric_and_nowrap_columns():
    rows = [["save", "2", "a < b"]]
    header = "<tr><th>a</th><th>b</th><th>c</th></tr>"
    assert f"{header}<tr><td>save</td><td>2</td><td>a &lt; b</td></tr>" in table(["a", "b", "c"], rows)
    assert "<td class=whole>save</td><td>2</td><td class=number>a" in table(["a", "b", "c"], rows, numeric=1, whole=1)
    assert '<td class=number>2</td><td class="number bad">x</td>' in table(
        ["a", "b", "c"], [["save", "2", StyledCell("x", "bad")]], numeric=2
    )
