"""Constraints that the planner answers, against the planner."""

from __future__ import annotations

import pytest

from lmworks.plan.devices.machine import Machine
from lmworks.plan.predict import predict
from lmworks.spec import load_run
from lmworks.spec.errors import SpecError
from lmworks.tune.constraints import Constraints

GPU = ["cluster.gpu=h100", "data.path=stdlib:bytes", "precision.dtype=bf16"]


def test_memory_of_the_accelerator_is_the_limit() -> None:
    assert Constraints().violation(load_run("llama3-1b", GPU)) is None
    assert "of memory on a rank" in str(Constraints().violation(load_run("llama3-8b", GPU)))


def test_a_limit_in_bytes_is_held_against_the_predicted_sheet() -> None:
    spec = load_run("configs/tiny.toml")
    need = predict(spec).memory.total
    assert Constraints(memory_bytes=need).violation(spec) is None
    assert "limit" in str(Constraints(memory_bytes=need - 1).violation(spec))


def test_dollars_are_steps_times_the_predicted_step() -> None:
    spec = load_run("llama3-1b", [*GPU, "optim.steps=100000", "cluster.price_hour=2"])
    assert spec.cluster.accelerator is not None
    time = predict(spec, Machine.of(spec.cluster.accelerator)).time
    assert time is not None
    cost = 100_000 * time.total / 3600 * 2
    assert Constraints(dollars=1.05 * cost).violation(spec) is None  # 5 % for stops and saves
    assert "would cost $" in str(Constraints(dollars=0.99 * cost).violation(spec))


def test_dollars_of_an_unknown_machine_are_refused() -> None:
    with pytest.raises(SpecError, match=r"cluster\.gpu"):
        Constraints(dollars=5).violation(load_run("configs/tiny.toml"))
