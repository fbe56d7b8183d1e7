"""The page of traces in a browser: the timeline is drawn, says what lies under the pointer, and zooms."""

from pathlib import Path

import pytest

from lmworks.diagnose.verdict import judge
from lmworks.report.trace_page import trace_page
from lmworks.trace import read_traces
from lmworks.trace.summary import summarise

pytestmark = pytest.mark.browser
DATA = Path(__file__).parents[1] / "trace" / "data"


@pytest.fixture
def html():
    traces = read_traces([DATA / f"fsdp2_gloo_rank{rank}.json.gz" for rank in (0, 1)])
    facts = summarise(traces)
    return trace_page({**facts, **judge(traces, facts).to_dict()}, traces)


def test_the_timeline_of_a_step_zooms_and_names_events(visit, html):
    assert len(html) < 8_000_000
    page = visit(html)
    page.wait_for_selector("#timeline .bk-Figure")
    page.wait_for_function("Bokeh.documents[0]?.is_idle")
    figure = "Bokeh.documents[0].roots()[0]"
    boxes = page.evaluate(f"{figure}.renderers.map(one => [one.name, one.data_source.get_length()])")
    assert {name for name, _ in boxes} == {"annotation", "op", "collective"} and sum(n for _, n in boxes) == 5330
    assert page.evaluate(f"{figure}.x_range.end") == pytest.approx(309.488919)
    # The pointer over the longest collective.
    place = page.evaluate(
        f"""(() => {{
          const data = {figure}.renderers.find(one => one.name == "collective").data_source.data;
          const long = [...data.left.keys()].reduce((a, b) =>
            data.right[b] - data.left[b] > data.right[a] - data.left[a] ? b : a);
          const view = Bokeh.index.get_by_id({figure}.id);
          view.el.scrollIntoView({{block: "center"}});
          const at = view.el.getBoundingClientRect();
          return [at.left + view.frame.x_scale.compute((data.left[long] + data.right[long]) / 2),
                  at.top + view.frame.y_scale.compute(data.y[long]), data.name[long], data.took[long]];
        }})()"""
    )
    page.mouse.move(*place[:2])
    for text in place[2:]:
        page.locator(".bk-Tooltip").get_by_text(text, exact=True).first.wait_for()
    page.mouse.wheel(0, -400)
    page.wait_for_function(f"{figure}.x_range.end - {figure}.x_range.start < 300")


def test_on_a_phone_the_page_does_not_scroll_sideways(visit, html):
    page = visit(html, viewport={"width": 390, "height": 844})
    page.wait_for_selector("#timeline .bk-Figure")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
