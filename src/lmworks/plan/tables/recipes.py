"""What a code base's published recipes set for a model on a GPU, where a table of their runs does not say it."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...spec import Gpu
from ..software import Software
from .columns import Row

NEWEST = (99,)  # of a row that names no release


@functools.cache
def tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))


def with_recipe(software: Software, row: Row, gpu: Gpu) -> Software:
    """The code base with what the recipe of this row's model set in its release."""
    model = re.sub(r"[^a-z0-9]+", "-", row.text("model").lower())
    family, precision = gpu.name.split("-")[0], row.text("precision").lower()
    traits = ""
    for recipe in next((found for name, found in tables()["recipes"].items() if model.startswith(name)), []):
        suits = family in recipe["gpus"].split() and recipe.get("only", "") in precision
        if suits and version(recipe["since"]) <= release(row):
            traits = tables()["sets"].get(recipe["traits"], recipe["traits"])
    if not traits:
        return software
    row.assumed.append(f"framework: {', '.join(traits.split())}, as in its recipe of this model for {family}")
    given: dict[str, Any] = dict.fromkeys(traits.split(), True)
    return replace(software, **given)


def release(row: Row) -> tuple[int, ...]:
    """Year, month and patch of "26.02.01 NeMo Container"."""
    found = re.search(r"\b2\d\.\d\d(\.\d\d)?\b", row.hints)
    return version(found[0]) if found else NEWEST


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
