"""The space file: every point of it, conditions, and one line for each mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lmworks.spec import SpecError
from lmworks.sweep.space import Space


def space(text: str) -> Space:
    return Space.of(tomllib.loads(text))


def values(text: str) -> list[Any]:
    (dimension,) = space(text).dimensions
    return list(dimension.every_value())


def test_every_point_is_the_product_the_last_key_fastest() -> None:
    found = space("optim.lr.values = [1e-3, 3e-3]\n[model.layers]\nrange = [1, 3]").points()
    assert [(point["optim.lr"], point["model.layers"]) for point in found] == [
        (1e-3, 1), (1e-3, 2), (1e-3, 3), (3e-3, 1), (3e-3, 2), (3e-3, 3),
    ]  # fmt: skip


def test_ranges_are_divided() -> None:
    assert values("optim.lr = {range = [1e-4, 1e-2], log = true, points = 5}") == [
        1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2,
    ]  # fmt: skip
    assert values("optim.clip = {range = [0.0, 1.0], step = 0.1}") == [round(0.1 * n, 1) for n in range(11)]
    assert values("optim.beta1 = {range = [0.8, 0.9], points = 3}") == [0.8, 0.85, 0.9]
    assert values("optim.steps = {range = [100, 1000], step = 400}") == [100, 500, 900]
    assert values("data.seq = {range = [32, 512], log = true, points = 5}") == [32, 64, 128, 256, 512]
    assert all(isinstance(value, int) for value in values("data.seq = {range = [32, 512], log = true, points = 5}"))
    assert values("optim.warmup = {range = [0, 3], points = 9}") == [0, 1, 2, 3]  # none comes twice


def test_a_key_is_left_out_where_its_condition_does_not_hold() -> None:
    text = """
    [optim.decay_ratio]
    values = [0.1, 0.3]
    when = {"optim.schedule" = "wsd"}
    [optim.schedule]
    values = ["cosine", "wsd", "linear"]
    [optim.min_lr_ratio]
    values = [0.0, 0.1]
    when.optim.schedule = ["cosine", "linear"]
    """
    found = space(text).points()
    assert [tuple(point.values()) for point in found] == [
        ("cosine", 0.0), ("cosine", 0.1), ("wsd", 0.1), ("wsd", 0.3), ("linear", 0.0), ("linear", 0.1),
    ]  # fmt: skip
    assert found[2] == {"optim.schedule": "wsd", "optim.decay_ratio": 0.1}


def test_a_condition_of_a_condition() -> None:
    text = """
    optim.beta2 = {values = [0.9], when = {"optim.beta1" = 0.8}}
    optim.beta1 = {values = [0.8, 0.9], when = {"optim.optimizer" = "adamw"}}
    optim.optimizer.values = ["adamw", "sgd"]
    """
    assert [len(point) for point in space(text).points()] == [3, 2, 1]


def test_a_written_space_reads_back() -> None:
    text = """
    optim.lr = {range = [1e-4, 1e-2], log = true}
    optim.schedule.values = ["cosine", "wsd"]
    optim.decay_ratio = {range = [0.1, 0.5], step = 0.1, when = {"optim.schedule" = "wsd"}}
    """
    one = space(text)
    assert Space.of(one.to_dict()) == one
    assert one.difference(Space.of(one.to_dict())) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the space is empty: name a key, e.g. optim.lr.values"),
        ("optim.lrr.values = [1]", "unknown key 'optim.lrr'; did you mean 'lr'?"),
        ("lr.values = [1]", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optim.values = [1]", "optim is a section of the spec; name one of its keys"),
        ('"optim.lr".values = [1.0]\n[optim.lr]\nvalues = [2.0]', "the space names optim.lr twice"),
        ("optim.lr = 3", "optim.lr = 3 is no entry of a space; write optim.lr.values"),
        ("optim.lr.values = []", "optim.lr: values = [] must be a list with at least one value"),
        ("optim.lr.values = [1, 1]", "optim.lr: values has 1 twice"),
        ("optim.lr = {values = [1], range = [1, 2]}", "optim.lr: give either values"),
        ("optim.lr = {log = true}", "optim.lr: give either values"),
        ("optim.lr = {valuse = [1]}", "optim.lr: unknown field 'valuse'; did you mean 'values'?"),
        ("optim.lr = {values = [1], log = true}", "optim.lr: log belongs to a range"),
        ("optim.lr.range = [2, 1]", "optim.lr: range = [2, 1] is empty"),
        ("optim.lr.range = [1]", "optim.lr: range = [1] must be two numbers"),
        ("optim.lr.range = [1.0, nan]", "must be two numbers"),
        ("optim.lr = {range = [0, 1], log = true}", "with log = true must begin above 0"),
        ("optim.lr = {range = [1, 2], log = true, step = 1}", "points = N spaces a log range"),
        ("optim.lr = {range = [1, 2], step = 0}", "step = 0 must be a number above 0"),
        ("optim.lr = {range = [1.0, 2.0], points = 1}", "points = 1 must be a whole number of at least 2"),
        ("optim.lr = {range = [1.0, 2.0], points = 3, step = 1}", "give one of them"),
        ('optim.lr = {values = [1], when = "wsd"}', "when = 'wsd' must be a table"),
        (
            'optim.lr = {values = [1], when = {"optim.clip" = 1}}',
            "when names optim.clip, which the space does not vary",
        ),
        (
            'optim.lr = {values = [1], when = {"optim.clip" = 1}}\n'
            'optim.clip = {values = [1], when = {"optim.lr" = 1}}',
            "the conditions of optim.lr and optim.clip depend on each other",
        ),
    ],
)
def test_a_mistake_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        Space.read(file)
    assert str(caught.value).startswith(f"{file}: ") and said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--space .*/none.toml: No such file or directory"):
        Space.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[optim.lr]\nvalues = [1]\n[optim.lr]\nvalues = [2]")
    with pytest.raises(SpecError, match=r"bad.toml is not valid TOML: Cannot declare .*twice"):
        Space.read(tmp_path / "bad.toml")


@pytest.mark.parametrize("fields", ["range = [1e-4, 1e-2], log = true", "range = [0.1, 0.2]"])
def test_a_range_without_a_division_cannot_be_enumerated(fields: str) -> None:
    with pytest.raises(SpecError, match=r"a sweep runs every point.*add points = 5.*`lmworks tune`"):
        space(f"optim.lr = {{{fields}}}").points()


def test_a_space_that_is_too_large_is_refused_before_it_is_built() -> None:
    with pytest.raises(SpecError, match="more than 100,000 points"):
        space("optim.steps.range = [1, 400]\nseed.range = [1, 400]").points()
    with pytest.raises(SpecError, match=r"seed: range = \[1, 1000000000\] has 1,000,000,000 values"):
        space("seed.range = [1, 1000000000]").points()


def test_what_differs_is_named() -> None:
    one, other = space("optim.lr.values = [1.0]"), space("optim.lr.values = [2.0]\nseed.values = [1]")
    assert one.difference(other) == "optim.lr: values = [1.0] there, values = [2.0] here"
    assert space("optim.lr.values = [2.0]").difference(other) == "seed: not in the space there, values = [1] here"
