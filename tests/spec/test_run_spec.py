"""A run: batches, layouts, schedules; what follows from what, and what contradicts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lmworks.spec import DataSpec, OptimSpec, ParallelSpec, RunSpec, SpecError
from lmworks.spec.fault_tolerance import HealthSpec


def run(**sections: Any) -> RunSpec:
    return RunSpec.from_dict(sections)


def test_batches() -> None:
    spec = run(data={"micro_batch": 4, "seq": 64}, parallel={"dp": 2})
    assert (spec.data.global_batch, spec.accumulation, spec.tokens_per_step) == (8, 1, 512)
    spec = run(data={"micro_batch": 4, "global_batch": 24}, parallel={"dp": 2})
    assert spec.accumulation == 3


def test_replace_derives_anew() -> None:
    spec = RunSpec(data=DataSpec(micro_batch=4))
    assert spec.replace(data=spec.data.replace(micro_batch=6)).data.global_batch == 6
    assert spec.replace(parallel=ParallelSpec(dp=2)).data.global_batch == 8
    assert OptimSpec(steps=1000).replace(steps=20).warmup == 2
    assert ParallelSpec(dp=2).replace(strategy="fsdp2").dp_shard == 2


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (50, 5), (1000, 100), (100_000, 100)])
def test_warmup_fits_the_run(steps: int, warmup: int) -> None:
    assert OptimSpec(steps=steps).warmup == warmup
    assert OptimSpec(steps=steps, warmup=0).warmup == 0
    assert OptimSpec(steps=steps, warmup=steps).warmup == steps  # the learning rate may rise to the last step


@pytest.mark.parametrize(("window", "warmup"), [(128, 32), (64, 16), (8, 4)])
def test_spikes_are_looked_for_after_a_quarter_of_the_window(window: int, warmup: int) -> None:
    assert HealthSpec(window=window).warmup == warmup
    assert HealthSpec(window=window, warmup=0).warmup == 0
    assert HealthSpec(window=window, warmup=window).warmup == window
    with pytest.raises(SpecError, match=f"health.warmup = {window + 1} is longer than health.window = {window}"):
        HealthSpec(window=window, warmup=window + 1)


def test_weights_in_bf16_alone_are_rounded_by_chance() -> None:
    bf16 = {"dtype": "bf16", "weights": "bf16", "master": False, "rounding": "stochastic"}
    assert run(precision=bf16).precision.rounding == "stochastic"
    assert run(precision={**bf16, "dtype": "fp8"}).precision.rounding == "stochastic"


@pytest.mark.parametrize(
    ("fields", "replicate", "shard"),
    [
        ({}, 1, 1),
        ({"dp": 4}, 4, 1),
        ({"dp": 4, "strategy": "fsdp1"}, 1, 4),
        ({"dp": 4, "strategy": "fsdp2"}, 1, 4),
        ({"dp": 4, "strategy": "zero", "zero": 2}, 1, 4),
        ({"dp": 4, "engine": "deepspeed", "zero": 3}, 4, 1),
        ({"dp_replicate": 2, "dp_shard": 4, "strategy": "fsdp2"}, 2, 4),
        ({"dp": 8, "dp_replicate": 2, "dp_shard": 4, "strategy": "fsdp2"}, 2, 4),
    ],
    ids=str,
)
def test_dp_is_resolved_by_strategy(fields: dict[str, Any], replicate: int, shard: int) -> None:
    spec = ParallelSpec(**fields)
    assert (spec.dp, spec.dp_replicate, spec.dp_shard) == (replicate * shard, replicate, shard)
    assert ParallelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_without_a_pipeline_there_is_one_stage_whatever_the_schedule(schedule: str) -> None:
    assert ParallelSpec(schedule=schedule).virtual_stages == 1


def test_the_last_step_can_be_profiled() -> None:
    assert run(optim={"steps": 5}, log={"profile": [5, 5]}).log.profile == [5, 5]
    with pytest.raises(SpecError, match=r"log.profile = \[6, 6\] begins after the last step: optim.steps = 5"):
        run(optim={"steps": 5}, log={"profile": [6, 6]})


def test_world() -> None:
    assert ParallelSpec(dp=2, tp=4, pp=3, cp=5, ep=2).world == 120  # ep is folded into dp


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optm": {}}, "unknown key 'optm'; did you mean 'optim'?"),
    ({"optim": 3}, "optim: expected a table, got 3"),
    ({"optim": {"lr": "fast"}}, "optim.lr must be a number, got 'fast'"),
    ({"optim": {"lr": 0}}, "optim.lr = 0.0 is out of range: it must be more than 0 and at most 10"),
    ({"optim": {"lr": 10**400}}, "optim.lr is out of range"),
    ({"optim": {"beta2": 1.0}}, "optim.beta2 = 1.0 is out of range: it must be at least 0 and less than 1"),
    ({"optim": {"schedule": "cosin"}}, "optim.schedule = 'cosin' is not one of: cosine, linear, wsd, constant"),
    (
        {"optim": {"steps": 50, "warmup": 100}},
        "optim.warmup = 100 is longer than optim.steps = 50; use at most 50, e.g. 5",
    ),
    ({"seed": -1}, "seed = -1 is out of range: it must be at least 0"),
    ({"seed": "x"}, "seed must be a whole number, got 'x'"),
    ({"data": {"seq": 512}, "model": {"context": 256}}, "data.seq = 512 is longer than model.context = 256"),
    (
        {"data": {"micro_batch": 4, "global_batch": 10}},
        "data.global_batch = 10 is not divisible by data.micro_batch × data-parallel ranks = 4 × 1 = 4; 8 or 12 would",
    ),
    ({"data": {"micro_batch": 4, "global_batch": 2}}, "; 4 would fit"),
    ({"data": {"mix": {"a": 0}}}, "data.mix: the weight of 'a' is 0; it must be more than 0"),
    ({"data": {"mix": {"a": float("nan")}}}, "data.mix.a = nan is not a finite number"),
    ({"data": {"mix": {"a": "much"}}}, "data.mix.a must be a number, got 'much'"),
    ({"data": {"mix": ["a"]}}, "data.mix must be a table, got"),
    (
        {"parallel": {"zero": 2, "strategy": "fsdp2"}},
        "parallel.zero = 2 needs parallel.strategy = 'zero' or parallel.engine = 'deepspeed'",
    ),
    ({"parallel": {"zero": 4, "strategy": "zero"}}, "parallel.zero = 4 is out of range: it must be at least 0 and at"),
    ({"parallel": {"dp_shard": 2}}, "parallel.strategy = 'ddp' replicates, but parallel.dp_shard = 2; use strategy"),
    (
        {"parallel": {"dp": 3, "dp_replicate": 2, "dp_shard": 2, "strategy": "fsdp2"}},
        "parallel.dp = 3 contradicts parallel.dp_replicate × parallel.dp_shard = 2 × 2",
    ),
    ({"parallel": {"sp": True}}, "parallel.sp = true needs parallel.tp > 1"),
    ({"parallel": {"virtual_stages": 2}}, "parallel.virtual_stages = 2 needs parallel.pp > 1"),
    ({"parallel": {"ep": 2}}, "parallel.ep = 2 does not divide model.experts = 0; ep can be 1 .the model is dense"),
    ({"parallel": {"ep": 4}, "model": {"experts": 6}}, "does not divide model.experts = 6; ep can be 1, 2, 3, 6"),
    ({"precision": {"dtype": "bf61"}}, "precision.dtype = 'bf61' is not one of: fp32, bf16, fp16, fp8"),
    *(
        (
            {"precision": {"dtype": "fp16", "loss_scale": scale}},
            re.escape(f"precision.loss_scale = {scale} is out of range: it must be at least 1 and at most 1.09951e+12"),
        )
        for scale in (-65536.0, 0.0, 1e-310, 0.5, 2.0**40 + 1, 1e38, 1e300)
    ),
    ({"precision": {"loss_scale": float("inf")}}, "precision.loss_scale = inf is not a finite number"),
    ({"precision": {"weights": "bf16"}}, "precision.weights = 'bf16' needs precision.dtype = 'bf16' or 'fp8', not"),
    ({"precision": {"weights": "bf16", "dtype": "fp16"}}, "or 'fp8', not 'fp16'"),
    ({"precision": {"dtype": "bf16", "master": False}}, "precision.master = false needs precision.weights = 'bf16'"),
    (
        {"precision": {"dtype": "bf16", "weights": "bf16", "rounding": "stochastic"}},
        "precision.rounding = 'stochastic' needs precision.weights = 'bf16' and precision.master = false",
    ),
    (
        {"precision": {"dtype": "bf16", "fp8_head": True}},
        "precision.fp8_head needs precision.dtype = 'fp8', not 'bf16'",
    ),
    ({"precision": {"fp8_scaling": "rowwise"}}, "precision.fp8_scaling needs precision.dtype = 'fp8'"),
    (
        {"precision": {"dtype": "fp8"}, "parallel": {"engine": "deepspeed", "strategy": "zero", "zero": 1}},
        "precision.dtype = 'fp8' needs parallel.engine = 'native'",
    ),
    ({"checkpoint": {"evry": 3}}, "unknown key 'checkpoint.evry'; did you mean 'every'?"),
    ({"log": {"wandb": True}}, "log.wandb must be a string, got True"),
    (
        {"cluster": {"gpu": "H1000"}},
        "cluster.gpu: 'H1000' is not in the catalogue of accelerators; did you mean 'h100'",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
def test_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        RunSpec.from_dict(fields)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
