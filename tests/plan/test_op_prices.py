"""Prices of single ops add up to the step that the planner predicts, part by part."""

from __future__ import annotations

from collections import defaultdict

import pytest

from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.predict import step_flops, time_of
from lmworks.plan.step.op_prices import OpPrice, op_prices
from lmworks.spec import RunSpec, load_run

EXPERTS = ("model.experts=4", "model.top_k=2", "model.expert_ffn=64", "model.shared_experts=1")
RATES = {"gemm.fp32": 2e10, "attention.fp32": 1e10, "attention_backward.fp32": 8e9, "stream": 5e9, "strided": 4e9}
RATES |= {"exp": 1e9, "tanh": 5e8, "optimizer": 3e9}
SMALL = ("cluster.device=cpu", "data.global_batch=16")


def machine_of(device: str = "cpu") -> Machine:
    rates = {kind: (Rate((1.0,), rate),) for kind, rate in RATES.items()}
    return Machine("test", device, "measured", rates, launch_s=1e-5, launch_backward_s=2e-5)


def check(spec: RunSpec, machine: Machine) -> list[OpPrice]:
    prices, time = op_prices(spec, machine), time_of(spec, machine)
    assert prices is not None and time is not None
    assert sum(one.seconds for one in prices) == pytest.approx(time.total, rel=1e-9)
    return prices


def by_part(prices: list[OpPrice]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for one in prices:
        found[one.part] += one.seconds - one.host_s
        found["launches"] += one.host_s
    return {part: length for part, length in found.items() if length}


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "mlp"])
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["dense", "experts"])
def test_one_machine(recompute: str, experts: tuple[str, ...]) -> None:
    spec = load_run("tiny", [*SMALL, *experts, f"parallel.recompute={recompute}"])
    for machine in (machine_of("cpu"), machine_of("cuda")):
        prices = check(spec, machine)
        time = time_of(spec, machine)
        assert time is not None
        assert by_part(prices) == pytest.approx({part: length for part, length in time.parts.items() if length})
        assert any(one.way == "recompute" for one in prices) == (recompute != "none")


def test_flops_of_the_ops_are_those_of_the_step() -> None:
    spec = load_run("tiny", SMALL)
    prices = check(spec, machine_of())
    # The op list counts five products of attention backward, as its kernel does, where model FLOPs count four.
    core = sum(one.flops for one in prices if (one.op, one.way) == ("attention", "backward")) / 5
    assert sum(one.flops for one in prices) - core == pytest.approx(step_flops(spec).model, rel=0.02)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.dp=8", "parallel.strategy=fsdp2"),
        ("parallel.tp=4", "parallel.pp=2", "parallel.recompute=selective", "data.global_batch=64"),
        ("parallel.dp=8", "parallel.compile=true", "precision.dtype=fp8", "parallel.recompute=full"),
        ("parallel.dp=4", "parallel.tp=2", "data.micro_batch=2"),
    ],
)
def test_layouts_of_gpus(overrides: tuple[str, ...]) -> None:
    spec = load_run("llama3-1b", ["cluster.gpu=H100-SXM-80GB", "cluster.gpus_per_node=8", *overrides])
    assert spec.cluster.accelerator is not None
    prices = check(spec, Machine.of(spec.cluster.accelerator))
    assert {one.op for one in prices} >= {"attention", "down", "update"}


def test_nothing_is_priced_where_no_step_is() -> None:
    spec = load_run("tiny", [*SMALL, "parallel.tp=2"])
    assert op_prices(spec, None) is None and op_prices(spec, machine_of()) is None
