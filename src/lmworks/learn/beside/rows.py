"""Numbers of the learner's part beside LMWorks' own, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Row:
    what: str
    yours: float | str
    ours: float | str


Beside = Callable[[ModuleType], list[Row]]


def table_beside(rows: list[Row]) -> list[str]:
    cells = [("", "yours", "LMWorks"), *((row.what, number(row.yours), number(row.ours)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        "Beside LMWorks' own code:",
        *(f"  {what:<{widths[0]}}  {yours:>{widths[1]}}  {ours:>{widths[2]}}" for what, yours, ours in cells),
    ]


def numbers(*shape: int, seed: int = 0) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"
