"""docs/observability.md has what the list of metrics has (`python tests/observability/test_observability_docs.py`
writes it there again after a change)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmworks.observability.tables import alert_table, metric_table

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "server": lambda: metric_table("server"),
    "gateway": lambda: metric_table("gateway"),
    "alerts": alert_table,
}


def made(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- made: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    found = made(name).search(PAGE.read_text(encoding="utf-8"))
    assert found is not None and found[0] == "\n".join([*TABLES[name](), ""])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in TABLES.items():
        content = "\n".join([*lines(), ""])
        text = made(name).sub(lambda _, content=content: content, text, count=1)
    PAGE.write_text(text, encoding="utf-8")
