"""The section on losses in docs/post-training.md: its example runs, and its tables name every function and default."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import lmworks.align

PAGE = Path(__file__).parents[2] / "docs" / "post-training.md"
SECTION = PAGE.read_text(encoding="utf-8").split("\n## Losses\n")[1].split("\n## ")[0]
MODULES = ("advantages", "distillation", "kl", "logprobs", "masked", "policy_losses", "preference_losses")


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["loss"].isfinite() and names["logits"].grad.any()


@pytest.mark.parametrize("name", [name for name, module in lmworks.align.EXPORTS.items() if module in MODULES])
def test_every_function_is_named(name: str) -> None:
    helpers = {"masked_mean", "masked_var", "importance_weights", "sequence_log_ratio"}
    assert f"`{name}`" in SECTION or f"`{name}(" in SECTION or name in helpers
    assert callable(getattr(lmworks.align, name))


@pytest.mark.parametrize("line", [line for line in SECTION.splitlines() if re.match(r"\| `\w+` \|", line)])
def test_defaults_are_those_of_the_code(line: str) -> None:
    """“`beta` 0.1” in a row is the default of that argument; “on” and “off” are True and False."""
    (name, *_), options = re.findall(r"`(\w+)`", line), line.split(" | ")[3:]
    defaults = {key: one.default for key, one in inspect.signature(getattr(lmworks.align, name)).parameters.items()}
    named = re.findall(r"`(\w+)`(?: and `\w+`)? ([\d.,]+\b|on\b|off\b|k\d|forward)", " ".join(options))
    for option, value in named:
        if option in defaults:
            expected = {"on": True, "off": False}.get(value, value.replace(",", ""))
            found = defaults[option]
            assert found == expected or float(found) == float(expected), (option, value)
