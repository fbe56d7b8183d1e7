"""Charts: where lines, dots, marks and titles are on the page, and what the tooltips read."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lmworks.report.plots import new_axes, plot_curve, save
from lmworks.report.run_report import scaled
from lmworks.report.svg import EventMarks, Line, line_chart, stacked_chart


def drawing(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart[: chart.index("</svg>") + len("</svg>")])


def plot_area(svg: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, right, top and bottom: grid lines span it from side to side, the cursor from top to bottom."""
    grid, cursor = svg.find("line[@class='grid']"), svg.find("line[@class='cursor']")
    assert grid is not None and cursor is not None
    left, right = (float(grid.attrib[name]) for name in ("x1", "x2"))
    top, bottom = (float(cursor.attrib[name]) for name in ("y1", "y2"))
    return left, right, top, bottom


def coordinates(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


def test_line_and_dots_at_points() -> None:
    svg = drawing(line_chart([Line("loss", [(0, 4.0), (50, 2.0), (100, 0.0)], "s0", dots=True)]))
    left, right, top, bottom = plot_area(svg)
    (line,) = svg.findall("polyline")
    path = coordinates(line.attrib["points"])
    assert [x for x, _ in path] == [left, (left + right) / 2, right]
    heights = [bottom - y for _, y in path]
    assert heights[2] == 0 and heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert top < path[0][1] < top + 0.1 * (bottom - top)  # the highest value is near the top
    (group,) = svg.findall("g[@class='s0']")
    assert [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in group] == path


def test_a_single_point_is_a_dot() -> None:
    svg = drawing(line_chart([Line("loss", [(3, 4.0)], "s0")]))
    left, right, _, _ = plot_area(svg)
    assert svg.findall("polyline") == []
    (dot,) = svg.findall("g[@class='s0']/circle")
    assert float(dot.attrib["cx"]) == (left + right) / 2


def test_a_line_without_dots_has_none() -> None:
    assert "<circle" not in line_chart([Line("loss", [(0, 4.0), (1, 2.0)], "s0")])


def test_frequent_marks_are_inside_the_plot_on_its_axis_and_rare_ones_above_it() -> None:
    saves = EventMarks("save", "save", "◆", [(50, "saved")], low=True)
    spikes = EventMarks("spike", "spike", "▼", [(50, "loss 9")])
    svg = drawing(line_chart([Line("loss", [(0, 4.0), (100, 2.0)], "s0")], marks=[saves, spikes]))
    left, right, top, bottom = plot_area(svg)
    save, spike = (svg.find(f"g[@class='mark {name}']/g") for name in ("save", "spike"))
    assert save is not None and spike is not None
    low, high = save.find("text"), spike.find("text")
    assert low is not None and high is not None
    assert float(low.attrib["x"]) == float(high.attrib["x"]) == (left + right) / 2
    assert bottom - 10 < float(low.attrib["y"]) < bottom
    assert 0 < float(high.attrib["y"]) < top
    line = spike.find("line")
    assert line is not None and save.find("line") is None
    assert (float(line.attrib["y1"]), float(line.attrib["y2"])) == (top, bottom)


def test_titles_are_in_the_middle_of_their_axes() -> None:
    svg = drawing(line_chart([Line("loss", [(0, 4.0), (100, 2.0)], "s0")], x="step", y="nats a token"))
    left, right, top, bottom = plot_area(svg)
    x_title, y_title = svg.findall("text[@class='axis title mid']")
    assert (x_title.text, float(x_title.attrib["x"])) == ("step", (left + right) / 2)
    assert (y_title.text, float(y_title.attrib["y"])) == ("nats a token", (top + bottom) / 2)


def test_tick_labels_are_at_their_values() -> None:
    svg = drawing(line_chart([Line("loss", [(0, 0.0), (100, 4.0)], "s0")]))
    left, right, _, bottom = plot_area(svg)
    places = {text.text: float(text.attrib["x"]) for text in svg.findall("text[@class='axis mid']")}
    assert places["0"] == left and places["100"] == right
    assert places["20"] == pytest.approx(left + (right - left) / 5, abs=0.1)
    grid = [float(line.attrib["y1"]) for line in svg.findall("line[@class='grid']")]
    labels = {text.text: float(text.attrib["y"]) for text in svg.findall("text[@class='axis end']")}
    assert grid[0] == bottom and list(labels) == ["0", "1", "2", "3", "4"]
    assert [abs(label - line) < 6 for label, line in zip(labels.values(), grid, strict=True)] == [True] * 5


def test_tooltip_positions() -> None:
    svg = drawing(line_chart([Line("loss", [(10, 4.0), (110, 2.0)], "s0")]))
    left, right, _, _ = plot_area(svg)
    place = json.loads(svg.attrib["data-chart"])["place"]
    assert place == {"left": left, "right": right, "low": 10, "high": 110}


def test_stacked_areas() -> None:
    chart = stacked_chart(["a", "b"], [(0, [1.0, 3.0]), (10, [2.0, 2.0])], str, "s")
    first, second = (coordinates(area.attrib["points"]) for area in drawing(chart).findall("polygon"))
    _, _, top, bottom = plot_area(drawing(chart))
    assert [y for _, y in first[2:]] == [bottom, bottom]
    assert second[2:] == first[1::-1]  # the lower edge of the second is the upper one of the first
    assert second[0][1] == second[1][1] == pytest.approx(top + (bottom - top) * 0.04 / 1.04, abs=0.1)  # 4 s both times
    assert "a 37.5%" in chart and "b 62.5%" in chart


def test_memory_is_in_the_unit_that_fits_its_peak() -> None:
    assert scaled([(1, 2**20), (2, 3 * 2**20)]) == ([(1, 1.0), (2, 3.0)], "MiB")
    assert scaled([(1, 2**29), (2, 2**30)]) == ([(1, 0.5), (2, 1.0)], "GiB")
    assert scaled([(1, 2**30 - 2**20)]) == ([(1, 1023.0)], "MiB")
    assert scaled([]) == ([], "MiB")


def test_evaluations_and_single_points_have_markers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [{"step": 1, "loss": 4.0, "val_loss": 4.5}, {"step": 2, "loss": 3.0, "val_loss": 3.5}]
    figure, axes = new_axes("loss")
    plot_curve(axes, steps, "loss", "training")
    plot_curve(axes, steps, "val_loss", "validation")
    plot_curve(axes, steps[:1], "loss", "one step")  # a line of one point cannot be seen
    assert [line.get_marker() for line in axes.lines] == ["None", "o", "o"]
    assert list(axes.lines[1].get_xydata().flat) == [1, 4.5, 2, 3.5]
    path = tmp_path / "new" / "folder" / "loss.svg"
    assert save(figure, path) == path and "<svg" in path.read_text()
