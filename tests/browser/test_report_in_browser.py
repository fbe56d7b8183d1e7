"""report.html in a browser: what the pointer reads, and how it looks on a phone."""

import pytest

from lmworks.report.run_report import write_report
from table_samples import interrupted_run

pytestmark = pytest.mark.browser


@pytest.fixture
def html(tmp_path):
    return write_report(interrupted_run(tmp_path)).read_text()


def test_the_pointer_reads_values_and_marks(visit, html):
    page = visit(html)
    chart = page.locator("svg[data-chart]").first
    box = chart.bounding_box()
    # The spike is at step 4 of 1 to 6, between the margins of the drawing (see svg.py).
    x = (88 + (4 - 1) / (6 - 1) * (640 - 88 - 24)) / 640 * box["width"]
    chart.hover(position={"x": x, "y": box["height"] / 2})
    said = page.locator(".readout").first.inner_text()
    assert said.startswith("step 4:") and "spike or NaN (1) at 4: loss 9.25 is high" in said
    assert page.locator(".legend").first.inner_text().split("\n")[-3:] == [
        "▼spike or NaN (1)", "■restart or rewind (1)", "◆save (1)",
    ]  # fmt: skip


def test_on_a_phone_tables_scroll_and_the_page_does_not(visit, html):
    page = visit(html, viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    events = page.locator(".scroll").last
    assert events.evaluate("box => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX") == "auto"
    date = page.locator("td.whole").first
    assert date.evaluate("cell => cell.getClientRects().length") == 1
    height = date.evaluate("cell => { const r = document.createRange(); r.selectNodeContents(cell);"
                           " return r.getClientRects().length; }")  # fmt: skip
    assert height == 1  # one line
