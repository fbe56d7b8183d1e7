"""Rewards: how functions are found, called, checked and added up."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.align import group_advantages, load_rewards
from lmworks.align.rewards import Reward, RewardError, Rewards
from lmworks.align.verifiers import VERIFIERS
from lmworks.spec.errors import SpecError

FILE = """
import math

def batch(prompts, completions, **columns):
    return [len(c) / 10 if columns["use"][i] else None for i, c in enumerate(completions)]

def single(completion, bonus, scale=1.0):
    return scale * (len(completion) + bonus)

def named(completions, bonus):
    return bonus

def fails(prompts, completions, **columns):
    return [1 / len(c) for c in completions]

def short(completions):
    return [1.0]

def nan(completions):
    return [0.0, math.nan]

def text(completions):
    return ["1", "2"]

def number(completions):
    return 1.0

NOT_A_FUNCTION = 3
"""
PROMPTS, COMPLETIONS = ["p", "q"], ["ab", "abcd"]
RECORDS: list[dict[str, Any]] = [{"use": True, "bonus": 1.0}, {"use": False, "bonus": 2.0}]
PLACES = ["data.jsonl line 4", "data.jsonl line 7"]


def section() -> str:
    page = Path(__file__).parents[2] / "docs" / "post-training.md"
    return page.read_text(encoding="utf-8").split("\n## Rewards and verifiers\n")[1].split("\n## ")[0]


def test_the_example_of_the_page_runs_and_its_table_names_every_reward() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", section(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    for attribute, shown in re.findall(r"^scores\.(\w+)  # (.*)$", example, re.MULTILINE):
        assert getattr(names["scores"], attribute) == eval(shown)
    for name, function in VERIFIERS.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", section(), re.MULTILINE)
        for argument, one in inspect.signature(function).parameters.items():
            if argument not in ("completions", "columns"):
                assert f"`{argument}`" in row
            if isinstance(one.default, int | float):
                assert (
                    f"`{argument}` {'off' if one.default is False else f'{one.default:g}'}".replace("e-0", "e-") in row
                )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "own.py"


def test_functions_with_and_without_an_opinion_are_added_up(file: str) -> None:
    rewards = load_rewards([f"{file}:batch", f"{file}:single", "own:named"], [10.0, 1.0, -0.5])
    scores = rewards.score(PROMPTS, COMPLETIONS, RECORDS, PLACES)
    assert scores.by_source == {"own.py:batch": [0.2, None], "own.py:single": [3.0, 6.0], "own:named": [1.0, 2.0]}
    assert scores.total == [10 * 0.2 + 3.0 - 0.5, 6.0 - 1.0]
    assert scores.metrics() == {"reward/own.py:batch": 0.2, "reward/own.py:single": 4.5, "reward/own:named": 1.5}


def test_columns_do_not_fill_options_of_built_in_rewards() -> None:
    records = [{"answer": "7", "tolerance": "x", "completions": "x", "words": 3}] * 2
    scores = load_rewards(["numeric", "length(words=1)"]).score(PROMPTS, ["7", "8 9"], records)
    assert scores.by_source == {"numeric": [1.0, 0.0], "length(words=1)": [1.0, 0.0]}


def test_without_any_opinion_a_sample_takes_no_part(file: str) -> None:
    scores = load_rewards([f"{file}:batch"]).score(PROMPTS, COMPLETIONS, RECORDS)
    assert scores.total[0] == 0.2 and math.isnan(scores.total[1])
    assert group_advantages(torch.tensor([*scores.total, 0.4, math.nan]), 4)[1] == 0


def test_arguments_in_the_name(file: str) -> None:
    scores = load_rewards([f"{file}:single(scale=2)"]).score(PROMPTS, COMPLETIONS, RECORDS)
    assert scores.total == [6.0, 12.0]
    pattern = load_rewards(["format(pattern='a.*')"])  # goes before a column of that name
    assert pattern.score(PROMPTS, ["ab", "b"], [{"pattern": "b"}] * 2).total == [1.0, 0.0]
    tolerant = load_rewards(["numeric(tolerance=0.1)", "length(words=1)"], [1.0, 0.5])
    assert tolerant.score(PROMPTS, ["105", "x 105"], [{"answer": "100"}] * 2).total == [1.5, 1.0]


@pytest.mark.parametrize(
    "values",
    [torch.tensor([1.0, 2.0]), (1, 2), [torch.tensor(1.0), 2], [True, 2.0]],
    ids=["tensor", "tuple", "scalar", "bool"],
)
def test_values_of_many_kinds(values: Any) -> None:
    rewards = Rewards((Reward("own", lambda completions: values),))
    assert rewards.score(PROMPTS, COMPLETIONS, RECORDS).total == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "completions", "message"),
    [
        ("fails", ["a", ""], r"'own.py:fails' failed on sample 1, data.jsonl line 7: ZeroDivision.*own.py, line 14"),
        ("short", COMPLETIONS, r"'own.py:short' returned 1 values for 2 completions"),
        ("nan", COMPLETIONS, r"'own.py:nan' returned nan for sample 1, data.jsonl line 7; a finite number or None"),
        ("text", COMPLETIONS, r"'own.py:text' returned str '1' for sample 0, data.jsonl line 4"),
        ("number", COMPLETIONS, r"'own.py:number' returned float; it must return a list"),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_named(file: str, name: str, completions: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=rf"^align\.rewards: {message}"):
        load_rewards([f"{file}:{name}"]).score(PROMPTS, completions, RECORDS, PLACES)


def test_a_column_that_is_missing_is_named(file: str) -> None:
    with pytest.raises(RewardError, match=r"'exact' needs the column 'answer'; the data has use, bonus"):
        load_rewards(["exact"]).score(PROMPTS, COMPLETIONS, RECORDS)
    assert load_rewards(["exact"]).score(PROMPTS, COMPLETIONS, [{"answer": "ab"}, {}]).by_source["exact"] == [1.0, None]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ([], [], r"align\.rewards is empty; give path/file\.py:function, .* exact, numeric"),
        (["numerc"], [], r"= 'numerc': no such reward; did you mean 'numeric'\? give path/file\.py:function"),
        (["exact", "exact"], [], r"'exact' is there twice"),
        (["exact"], [1.0, 2.0], r"align\.reward_weights has 2 weights; align\.rewards has 1"),
        (["no.py:f"], [], r"there is no file no\.py"),
        (["own.py:bach"], [], r"own\.py has no function 'bach'; did you mean 'batch'\?"),
        (["own.py:NOT_A_FUNCTION"], [], r"own\.py has no function 'NOT_A_FUNCTION'"),
        (["no_such_module:f"], [], r"there is no module 'no_such_module'"),
        (["needs.py:f"], [], r"needs\.py needs the module 'no_such_package'; install it"),
        (["broken.py:f"], [], r"broken\.py cannot be imported: ZeroDivisionError: .* \(broken\.py, line 1\)"),
        (["numeric(tol=1)"], [], r"no argument 'tol'; did you mean 'tolerance'\?"),
        (["length"], [], r"= 'length': give its argument, as in length\(words=100\)"),
        (["numeric(1)"], [], r"arguments are written as in numeric\(name=1\.5"),
        (["numeric(tolerance=)"], [], r"arguments are written as"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(file: str, names: list[str], weights: list[float], message: str) -> None:
    Path("broken.py").write_text("1 / 0")
    Path("needs.py").write_text("import no_such_package")
    with pytest.raises(SpecError, match=message):
        load_rewards(names, weights)
