"""Runbooks: a page for each alert and an alert for each page; the commands of drills stand in them as they are run.

`python tests/drill/test_runbooks.py runs/drills/report.json` writes what the drills showed into the pages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lmworks.drill.drills import DRILLS
from lmworks.drill.incident import Drill
from lmworks.observability.alerts import ALERTS

FOLDER = Path(__file__).parents[2] / "docs" / "runbooks"
TRAINING = {"loss-spike"}  # of training runs: no alert of a fleet
HEADINGS = ["What it means", "What to look at", "What to do", "How to verify", "In a drill"]
PAGES = {alert.name: alert.page for alert in ALERTS}
MADE = re.compile(r"(<!-- made: drill -->\n).*?(<!-- end -->)", re.DOTALL)


def text_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def commands(text: str) -> set[str]:
    return {
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    }


def test_alerts_and_pages_match_one_to_one() -> None:
    assert set(PAGES.values()) | TRAINING == {path.stem for path in FOLDER.glob("*.md")}


@pytest.mark.parametrize("page", sorted(set(PAGES.values())))
def test_a_page_names_its_alerts_and_says_what_to_do(page: str) -> None:
    text = text_of(page)
    title = text.splitlines()[0].partition(":")[0].removeprefix("# ")
    assert set(title.split(", ")) == {name for name, own in PAGES.items() if own == page}
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert commands(text)


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_runs_what_its_runbooks_say(drill: Drill) -> None:
    assert set(drill.alerts) <= PAGES.keys()
    written = set[str]().union(*(commands(text_of(PAGES[name])) for name in drill.alerts))
    if drill.alerts:
        assert {*drill.look, *drill.act} <= written
    else:
        assert not drill.act  # it heals by itself, and nobody is told


# --- what drills showed, written into the pages ------------------------------------------------------------


def shown(report: dict[str, Any], day: str) -> str:
    """Of one drill: its moments, and the output of what was looked at."""
    checks = {one["name"]: one for one in report["checks"]}
    users = ", ".join(
        f"{checks[name]['observed']} {name}" for name in ("lost streams", "failed requests") if name in checks
    )
    lines = [f"`lmworks drill {report['drill']}` ({day}): {report['what']}. {users}.", "", "```text"]
    lines += [f"{one['at']:6.1f} s  {one['what']}" for one in report["timeline"]]
    lines += ["```", ""]
    for one in report["commands"]:
        if one["output"]:
            output = [line[:150] for line in one["output"].splitlines()[:10]]
            lines += ["```text", f"$ {one['line']}", *output, "```", ""]
    return "\n".join(lines)


def drills_of(page: str) -> set[str]:
    """The drills of its alert; where none has it as its first, those that make it fire as well."""
    first = {drill.name for drill in DRILLS if any(PAGES[name] == page for name in drill.alerts[:1])}
    return first or {drill.name for drill in DRILLS if any(PAGES[name] == page for name in drill.alerts)}


def write_pages(record: Path) -> None:
    content = json.loads(record.read_text(encoding="utf-8"))
    passed = [report for report in content["drills"] if report["ok"] and report["timeline"]]
    for page in sorted(set(PAGES.values())):
        parts = "\n".join(shown(report, content["date"]) for report in passed if report["drill"] in drills_of(page))
        if parts:
            text = MADE.sub(lambda found, parts=parts: found[1] + parts + found[2], text_of(page))
            (FOLDER / f"{page}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
