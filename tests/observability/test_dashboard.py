"""The dashboard asks for what is in the list, and its panels do not lie over one another."""

from __future__ import annotations

from lmworks.observability.dashboard import ROWS, dashboard

PANELS = [panel for row in ROWS.values() for panel in row]


def test_panels() -> None:
    made = dashboard()
    drawn = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in drawn] == [panel.title for panel in PANELS]
    assert len({panel["title"] for panel in drawn}) == len(drawn)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    taken = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    first = drawn[0]["targets"][0]
    assert first["expr"] == "sum by (status) (rate(lmworks:gateway_requests_total[$__rate_interval]))"
    assert first["legendFormat"] == "{{status}}"
