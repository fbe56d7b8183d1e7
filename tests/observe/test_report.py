"""report.html: the run's own numbers, nothing from outside, nothing executed."""

import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lmworks.observe import report
from lmworks.observe.report import smooth, write_report
from lmworks.observe.svg import Line, average, line_chart, thin, ticks
from lmworks.record import MetricsWriter

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


def test_the_numbers_are_those_of_the_metrics(make_run):
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


def test_events_and_spec_are_in_it(make_run):
    folder = make_run(end="interrupt")
    folder.event("resume", 2, attempt=1)
    folder.event("finish", 4)
    page = Page(write_report(folder).read_text())
    assert "interrupted" not in page.text.split("|")[:5]
    assert re.search(r"\|2\|resume\|attempt = 1\|", page.text)
    assert "2 attempts" in page.text
    assert folder.spec_path.read_text().strip() in page.text


def test_what_comes_from_the_user_is_text(make_run, tmp_path):
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


def test_it_loads_nothing_from_anywhere(make_run):
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


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_hardly_a_step(make_run, steps):
    page = Page(write_report(make_run(steps=steps, end=None)).read_text())
    assert f"{steps} of 4 steps" in page.text


def test_a_loss_that_was_not_finite_is_a_gap(make_run):
    folder = make_run()
    with MetricsWriter(folder.metrics_path, 1) as metrics:
        metrics.write(3, {"loss": float("nan"), "grad_norm": float("inf")})
    loss = Page(write_report(folder).read_text()).charts()[0]
    assert [step for step, _ in loss[0]["points"]] == [1, 2, 4]


def test_long_histories_are_cut(make_run, monkeypatch):
    monkeypatch.setattr(report, "MOST_EVENTS", 3)
    folder = make_run()
    for step in range(10):
        folder.event("save", step)
    page = Page(write_report(folder).read_text())
    assert page.text.count("|save|") == 3
    assert "9 earlier ones" in page.text


def test_pngs_where_matplotlib_is(make_run, plots):
    pytest.importorskip("matplotlib")
    folder = make_run()
    write_report(folder)
    assert sorted(file.name for file in folder.plots.iterdir()) == ["loss.png", "lr.png", "throughput.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.plots.iterdir())


def test_without_matplotlib_it_says_how_to_get_them(make_run, plots, monkeypatch):
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
    thinned = thin(points)
    assert len(thinned) <= 500
    assert (54_321, 99.0) in thinned
    assert (77_777, -5.0) in thinned
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_averaging_keeps_the_mean():
    rows = [(step, [1.0, step]) for step in range(1, 801)]
    means = average(rows, most=80)
    assert len(means) == 80
    assert sum(parts[1] for _, parts in means) / 80 == pytest.approx(400.5)


def test_smoothing_does_not_lag():
    ramp = [(step, 2.0 * step) for step in range(1000)]
    assert [y for _, y in smooth(ramp)] == pytest.approx([y for _, y in ramp])
    assert smooth([]) == []


def test_a_flat_line_can_be_drawn():
    assert "NaN" not in line_chart([Line("flat", [(1, 0.0), (2, 0.0)], "s0")], zero=True)
