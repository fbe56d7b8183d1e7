"""docs/models.md: its tables are made of the registry of families, and of what tests hold each family to.

`python tests/model/test_models_page.py` writes them again after a change.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / folder) for folder in ("model", "engine", "")]

import hf_reference  # noqa: E402
import hf_sweep  # noqa: E402
import test_hf  # noqa: E402

from lmworks.spec.hf_config import family_of_spec  # noqa: E402
from lmworks.spec.hf_families import EVERYWHERE, FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def families() -> str:
    """Which tests each family is a case of."""
    trained = {family for family, _ in test_hf.CASES.values()}
    written = {family_of_spec(spec): spec for spec in test_hf.SPECS.values()}
    served = {family for family, _ in (hf_reference.FAMILIES | hf_reference.MORE_FAMILIES).values()}
    lines = [
        "| `model_type` | models | reads | writes | trains | serves | tensor parallel |",
        "|---|---|:-:|:-:|:-:|:-:|:-:|",
    ]
    for name in sorted(FAMILIES):
        sharded = name in written and not written[name].qk_norm_whole
        marks = (name in hf_sweep.BASES, name in written, name in trained, name in served, sharded)
        lines.append(f"| `{name}` | {FAMILIES[name].models} | {' | '.join('✓' if mark else '–' for mark in marks)} |")
    return "\n".join(lines) + "\n"


def refused() -> str:
    """Keys of a config that must have one value, or one of some."""
    lines = ["| family | key | must be |", "|---|---|---|"]
    for name, keys in (("all", EVERYWHERE), *((name, FAMILIES[name].must_be) for name in sorted(FAMILIES))):
        for key, values in keys.items():
            allowed = ", ".join(f"`{value!r}`" for value in values if value not in (None, {}, []) or len(values) == 1)
            lines.append(f"| {name} | `{key}` | {allowed or 'absent'} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    tables = {"families": families, "refused": refused}
    return MADE.sub(lambda found: found[1] + tables[found[2]]() + found[3], text)


def test_the_page_of_models_is_made_of_the_registry_and_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "python tests/model/test_models_page.py writes docs/models.md again"
    assert families().count("–") == 2, "a family is not held to something (two are not, to tensor parallelism)"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
