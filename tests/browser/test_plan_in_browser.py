"""The planner's pages in a real browser: what is drawn is what was predicted, and it follows the reader's choice."""

import json

import pytest

from lmworks.report.plan_page import memory_page, search_page
from plan_facts import GIB, memory_facts, search_facts
from typed import lmworks

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def page(visit):
    return visit(search_page(search_facts()))


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def edges(page, selector):
    """Left and right end of every piece of a bar, as parts of its track."""
    return page.locator(selector).evaluate_all(
        """pieces => pieces.map(piece => {
          const [own, track] = [piece, piece.parentElement].map(one => one.getBoundingClientRect());
          return [(own.left - track.left) / track.width, (own.right - track.left) / track.width];
        })"""
    )


def shown(page):
    """All that the page says of the chosen layout."""
    timeline = page.locator("#timeline svg")
    return {
        "layout": page.inner_text("#chosen"),
        "memory": texts(page, "#memory tr td:last-child"),
        "parts": {
            row.get_attribute("data-part"): row.locator("td").nth(2).inner_text()
            for row in page.locator("#waterfall tr[data-part]").all()
        },
        "step": page.locator("#waterfall tr.total td").nth(2).inner_text(),
        "timeline": timeline.get_attribute("aria-label") if timeline.count() else None,
    }


EXPECTED = [
    {
        "layout": "tp=1, pp=1, recompute none",
        "memory": ["70.0 GiB"],
        "parts": {"matmul": "600 ms", "dp": "300 ms", "bubble": "100 ms"},
        "step": "1 s",
        "timeline": None,
    },
    {
        "layout": "tp=1, pp=2, recompute none",
        "memory": ["60.0 GiB", "46.2 GiB"],
        "parts": {"matmul": "750 ms", "dp": "375 ms", "bubble": "125 ms"},
        "step": "1.25 s",
        "timeline": "2 pipeline ranks over 6 s",
    },
    {
        "layout": "tp=2, pp=4, recompute selective",
        "memory": ["45.0 GiB", "40.0 GiB", "35.0 GiB", "34.0 GiB"],
        "parts": {"matmul": "1.2 s", "dp": "600 ms", "bubble": "200 ms"},
        "step": "2 s",
        "timeline": "4 pipeline ranks over 12 s",
    },
]


def test_the_fastest_layout_is_shown_first(page):
    assert shown(page) == EXPECTED[0]
    assert page.inner_text("#which") == "Fastest layout"


def test_what_would_be_empty_is_not_there(visit):
    facts = search_facts()
    facts["front"][0]["collectives"] = []
    page = visit(search_page(facts))
    assert not page.is_visible("#pipeline") and not page.is_visible("#exchanges")  # one rank, no pipeline
    page.click("#pareto [data-index='1']")
    assert page.is_visible("#pipeline") and page.is_visible("#exchanges")
    assert page.inner_text("#which") == "Layout chosen"
    bare = "boxes => boxes.filter(box => box.checkVisibility() && !box.innerText.trim()).length"
    assert page.locator(".card").evaluate_all(bare) == 0


def test_each_cluster_has_a_line_of_its_own(visit):
    facts = search_facts()
    other = [one | {"gpu": "A100-SXM-80GB", "tokens_per_s": one["tokens_per_s"] / 2} for one in facts["front"][1:]]
    page = visit(search_page(facts | {"fronts": [facts["front"], other], "fastest": [facts["front"][0], other[0]]}))
    lines = page.locator("#pareto .frontier").evaluate_all(
        "all => all.map(line => [line.dataset.cluster, line.points.numberOfItems])"
    )
    assert dict(lines) == {"8 × H100-SXM-80GB": 4, "8 × A100-SXM-80GB": 3}
    assert texts(page, "#pareto .legend li") == ["8 × A100-SXM-80GB", "8 × H100-SXM-80GB"]
    assert page.inner_text("#chosen") == "tp=1, pp=1, recompute none on 8 × H100-SXM-80GB"


@pytest.mark.parametrize("index", [1, 2])
def test_a_click_on_a_point_shows_its_layout(page, index):
    page.click(f"#pareto [data-index='{index}']")
    assert shown(page) == EXPECTED[index]
    assert page.get_attribute("#pareto .chosen", "data-index") == str(index)
    assert texts(page, "#front tr.chosen button") == [EXPECTED[index]["layout"]]


def test_a_row_of_the_table_shows_its_layout(page):
    page.click("#front tr[data-index='2'] button")
    assert shown(page) == EXPECTED[2]
    page.click("#front tr[data-index='0'] button")
    assert shown(page) == EXPECTED[0]


def test_tiles(page):
    page.click("#pareto [data-index='2']")
    assert [text.split("\n") for text in texts(page, "#tiles .card")] == [
        ["cost", "$200k", "for 1T tokens, and 4 MWh"],
        ["time", "20 days", "97.5% of it training, 3 stops"],
        ["step", "2 s", "1.6 s to 2.5 s"],
        ["tokens/s", "131k", "16.4k a GPU, 8 GPUs"],
        ["MFU", "40.0%", "HFU 50.0%"],
        ["memory", "45.0 GiB", "44% of the GPU stays free"],
    ]


def test_collectives_are_summed_by_kind(page):
    rows = page.locator("#collectives tbody tr")
    assert [texts(page, "#collectives tbody td"), rows.count()] == [["all-gather", "dp_shard", "8", "42", "3 GB"], 1]
    page.get_by_text("Every call").click()
    assert texts(page, "#all-collectives tbody tr:last-child td") == [
        "all-gather", "dp_shard", "weights, again", "backward", "nvswitch", "8", "2", "1 GB",
    ]  # fmt: skip


def test_points_lie_where_their_figures_are(page):
    """Free memory 12.5, 25, 43.75 and 62.5 %; tokens/s as 1 : 1/1.25 : 1/2 : 1/4."""
    places = page.locator("#pareto .point").evaluate_all(
        "all => all.map(one => [one.cx, one.cy].map(p => p.baseVal.value))"
    )
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = places
    assert (x1 - x0) / (x3 - x0) == pytest.approx(0.25) and (x2 - x0) / (x3 - x0) == pytest.approx(0.625)
    assert (y1 - y0) / (y3 - y0) == pytest.approx(0.2 / 0.75) and (y2 - y0) / (y3 - y0) == pytest.approx(0.5 / 0.75)


def test_hovering_names_a_layout_without_choosing_it(page):
    page.hover("#pareto [data-index='2']")
    assert page.inner_text("#pareto-readout").startswith("tp=2, pp=4, recompute selective · 131k tokens/s · 45.0 GiB")
    assert shown(page) == EXPECTED[0]


def test_bars_of_memory_are_as_long_as_their_bytes(visit):
    page = visit(memory_page(memory_facts()))
    whole = 1.04 * 79  # GiB: the track is a little longer than the memory of the GPU
    for rank, lengths in enumerate(([10, 8, 0, 20, 8, 0, 1, 0, 0, 5], [10, 8, 0, 20, 4, 2, 1, 0, 0, 5])):
        pieces = edges(page, f"#memory tr:nth-child({rank + 1}) i:not(.mark)")
        assert [right - left for left, right in pieces] == pytest.approx([n / whole for n in lengths], abs=2e-3)
        assert pieces[-1][1] == pytest.approx(sum(lengths) / whole, abs=2e-3)
    usable, capacity = edges(page, "#memory tr:first-child .mark")
    assert (usable[0], capacity[0]) == pytest.approx((78 / whole, 79 / whole), abs=2e-3)
    assert texts(page, "#memory-table tbody tr:first-child td") == [
        "0", "10.00", "10.00", "20.00", "8.00", "0.00", "1.00", "2.00", "47.00", "52.00",
    ]  # fmt: skip


def test_a_rank_that_does_not_fit_is_marked(visit):
    page = visit(memory_page(memory_facts(capacity=51.5 * GIB, usable=51.0 * GIB, fits=False)))
    assert texts(page, "#memory tr.does-not-fit td:first-child") == ["rank 0"]


def test_the_waterfall_adds_up(page):
    page.click("#pareto [data-index='1']")
    whole = 1.02 * 1.25 * 1.25  # to the end of the interval
    ends = edges(page, "#waterfall tr[data-part] i:not(.hatched)")
    steps = [0, 0.75, 1.125, 1.25]
    assert [left for left, _ in ends] == pytest.approx([second / whole for second in steps[:-1]], abs=2e-3)
    assert [right for _, right in ends] == pytest.approx([second / whole for second in steps[1:]], abs=2e-3)
    hidden = edges(page, "#waterfall .hatched:not(.box)")  # 0.25 s, behind what comes before
    assert hidden == [pytest.approx([0.5 / whole, 0.75 / whole], abs=2e-3)]
    assert texts(page, "#waterfall tr[data-part='dp'] td")[2:] == ["375 ms", "30.0%", "+ 250 ms hidden", "modelled"]
    assert "1 s and 1.56 s" in page.inner_text("#waterfall .note")


def test_the_timeline_names_its_work(page):
    page.click("#pareto [data-index='1']")
    chart = page.locator("#timeline svg")
    wide = chart.bounding_box()["width"]
    second = lambda time: 58 + (wide - 70) * time / 6  # noqa: E731
    said = {}
    for name, (rank, time) in {"down": (1, 1.5), "up": (0, 5.0), "idle": (0, 2.0)}.items():
        chart.hover(position={"x": second(time), "y": 24 * rank + 12})
        said[name] = page.inner_text("#timeline-readout")
    assert said == {
        "down": "rank 1: forward of micro-batch 0, stage 1, 1 s to 2 s",
        "up": "rank 0: backward of micro-batch 0, stage 0, 4 s to 6 s",
        "idle": "rank 0: waits",
    }
    assert page.input_value("#zoom") == "1"
    page.fill("#zoom", "4")
    assert chart.bounding_box()["width"] == pytest.approx(4 * wide)


def test_a_long_timeline_is_wide_enough_to_read(visit):
    """200 passes of a rank take 1,200 pixels: more than the page has."""
    facts = search_facts()
    facts["front"][1]["timeline"] = [[rank, rank, "F", i, i + 0.0, i + 1.0] for rank in (0, 1) for i in range(200)]
    page = visit(search_page(facts))
    page.click("#pareto [data-index='1']")
    assert page.input_value("#zoom") == "2"
    assert page.locator("#timeline svg").bounding_box()["width"] > 1200
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_filters(page):
    page.select_option("[data-filter=recompute]", "selective")
    assert page.inner_text("#count") == "1 of 4 layouts"
    assert page.locator("#pareto .point").count() == 1 and page.locator("#front tbody tr:visible").count() == 1
    assert shown(page) == EXPECTED[2]  # what was chosen is not among them any more
    page.select_option("[data-filter=tp]", "1")
    assert page.inner_text("#count") == "0 of 4 layouts"
    assert "No layout of the front passes" in page.inner_text("#pareto")
    page.click("#everything")
    assert page.inner_text("#count") == "4 of 4 layouts" and shown(page) == EXPECTED[2]
    page.fill("#most", "46")
    assert page.inner_text("#count") == "2 of 4 layouts" and page.inner_text("#most-shown") == "46 GiB"


def test_sorting(page):
    rows = lambda: [row.get_attribute("data-index") for row in page.locator("#front tbody tr").all()]  # noqa: E731
    page.click("th[data-key=reserved] button")
    assert rows() == ["0", "1", "2", "3"]
    page.click("th[data-key=reserved] button")
    assert rows() == ["3", "2", "1", "0"]
    assert page.get_attribute("th[data-key=reserved]", "aria-sort") == "ascending"
    page.click("th[data-key=pp] button")
    assert rows()[:2] == ["2", "1"]
    page.click("#front tbody tr:first-child button")
    assert shown(page) == EXPECTED[2]


def test_colours_follow_the_attribute(page):
    colours = lambda: page.locator("#pareto .point").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")  # noqa: E731
    by_tp = colours()
    assert by_tp[0] == by_tp[1] != by_tp[2] == by_tp[3]
    page.select_option("#colour", "recompute")
    by_recompute = colours()
    assert by_recompute[0] == by_recompute[1] and len(set(by_recompute)) == 3
    assert texts(page, "#pareto .legend li") == ["full", "none", "selective"]


def test_the_keyboard_reaches_everything(page):
    page.focus("#pareto .chosen")
    page.keyboard.press("ArrowRight")
    assert shown(page) == EXPECTED[1]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert shown(page) == EXPECTED[1]
    page.keyboard.press("Tab")  # to the table: its headings, then its rows
    assert page.evaluate("document.activeElement.closest('th').dataset.key") == "text"
    page.focus("#front tr[data-index='2'] button")
    page.keyboard.press("Enter")
    assert shown(page) == EXPECTED[2]


@pytest.mark.parametrize("html", [search_page(search_facts()), memory_page(memory_facts())])
def test_on_a_phone_only_tables_scroll_sideways(visit, html):
    page = visit(html, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_finger_beside_a_point_means_the_point(visit):
    page = visit(search_page(search_facts()), **PHONE)
    page.locator("#pareto").scroll_into_view_if_needed()
    box = page.locator("#pareto [data-index='2']").bounding_box()
    page.touchscreen.tap(box["x"] + 15, box["y"] + 12)
    assert shown(page) == EXPECTED[2]


def test_light_and_dark(visit):
    seen = set()
    for scheme in ("light", "dark"):
        page = visit(search_page(search_facts()), color_scheme=scheme)
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2


def test_a_name_is_shown_and_not_run(visit):
    evil = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    facts = search_facts(model=evil)
    facts["front"][0] |= {"text": evil}
    facts["front"][0]["collectives"][0]["what"] = evil
    page = visit(search_page(facts))
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    assert page.inner_text("h1") == evil and page.inner_text("#chosen") == evil
    assert page.locator("img").count() == 0


def test_the_commands_write_such_pages(visit, capsys, tmp_path):
    """With real figures: every layout can be looked at, and the fullest rank reserves what was said of it."""

    def written(line):
        code, out, err = lmworks(capsys, *line.split(), "--html", str(tmp_path / "written.html"), "--json")
        assert code == 0, err
        return json.loads(out), visit((tmp_path / "written.html").read_text(encoding="utf-8"))

    facts, page = written("plan search llama3-70b --cluster 32xh100 --seq 8192 --global-batch 64")
    for index, one in enumerate(facts["front"]):
        page.click(f"#front tr[data-index='{index}'] button")
        seen = shown(page)
        assert seen["layout"] == one["text"]
        assert len(seen["memory"]) == one["layout"]["pp"]
        assert f"{one['memory']['reserved'] / GIB:.1f} GiB" in seen["memory"]
    facts, page = written("plan memory llama3-8b --cluster 8xh100")
    assert texts(page, "#memory tr td:last-child") == [f"{facts['reserved'] / GIB:.1f} GiB"]
