"""Layouts that cannot run are refused before anything starts, with what is wrong and what would be legal."""

from __future__ import annotations

import pytest

from lmworks.spec import SpecError, load_run

MOE = ["model.experts=4", "model.top_k=2"]

ILLEGAL = {
    "heads": (["parallel.tp=8"], "parallel.tp = 8 does not divide model.heads = 4"),
    "vocabulary": (["parallel.tp=2", "model.vocab=321"], "a vocabulary may be padded: 322"),
    "key-value heads": (
        ["parallel.tp=4", "model.heads=12", "model.kv_heads=6", "model.hidden=96"],
        "tp = 4 and model.kv_heads = 6: one must divide the other",
    ),
    "sequence shards": (["parallel.tp=2", "parallel.sp=true", "data.seq=63"], "data.seq / cp = 63 divisible by"),
    "sp alone": (["parallel.sp=true"], "parallel.sp = true needs parallel.tp > 1"),
    "ring chunks": (["parallel.cp=2", "data.seq=62"], "data.seq = 62 divisible by 4"),
    "ulysses heads": (["parallel.cp=8", "parallel.cp_method=ulysses"], "does not divide the 4 heads of a rank"),
    "capacity over cp": ([*MOE, "parallel.cp=2", "model.capacity=1.5"], "counts the tokens of a whole sequence"),
    "stages": (["parallel.pp=4"], "is more than model.layers = 2"),
    "micro-batches": (
        ["parallel.pp=2", "data.micro_batch=4", "data.global_batch=4"],
        "needs at least 2 micro-batches, not 1: data.global_batch = 8 would do",
    ),
    "stages of 1f1b": (["parallel.pp=2", "parallel.virtual_stages=2", "model.layers=8"], "has one stage a rank"),
    "stages of zbv": (
        ["parallel.pp=2", "parallel.virtual_stages=3", "parallel.schedule=zbv", "model.layers=8"],
        "has two stages a rank",
    ),
    "compiled split backward": (
        ["parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "parallel.compile=true"],
        "parallel.compile does not work with schedule = 'zbv'",
    ),
    "experts of a dense model": (["parallel.ep=2", "parallel.dp=2"], "ep can be 1 (the model is dense)"),
    "experts": ([*MOE, "parallel.ep=3", "parallel.dp=3"], "ep can be 1, 2, 4"),
    "ranks of experts": ([*MOE, "parallel.ep=4", "parallel.dp=2"], "does not divide the 2 ranks (dp × cp)"),
    "fsdp1 in a pipeline": (["parallel.strategy=fsdp1", "parallel.pp=2", "parallel.dp=2"], "use 'fsdp2'"),
    "deepspeed and tp": (
        ["parallel.engine=deepspeed", "parallel.strategy=zero", "parallel.zero=2", "parallel.tp=2"],
        "works without parallel.tp = 2",
    ),
    "full offload of ddp": (["parallel.offload=full", "parallel.dp=2"], "needs strategy = 'fsdp2'"),
    "activations of several micro-batches on the host": (
        ["parallel.offload_activations=1", "parallel.pp=2", "model.layers=4"],
        "works without parallel.pp = 2",
    ),
    "activations of deepspeed on the host": (
        ["parallel.offload_activations=1", "parallel.engine=deepspeed", "parallel.strategy=zero", "parallel.zero=2"],
        "parallel.offload_activations = 1 works with parallel.engine = 'native'",
    ),
    "activations of two blocks on the host": (
        ["parallel.offload_activations=1", "model.layers=2"],
        "needs more than model.layers = 2",
    ),
    "a cluster that is not used": (["cluster.gpus_per_node=8"], "is 8 ranks, the layout has 1"),
    "sync each with zero": (
        ["parallel.sync_each_pass=true", "parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"],
        "needs strategy = 'ddp' or 'fsdp2' without pipeline and offload",
    ),
    "sync each with offload": (
        ["parallel.sync_each_pass=true", "parallel.dp=2", "parallel.strategy=fsdp2", "parallel.offload=full"],
        "needs strategy = 'ddp' or 'fsdp2' without pipeline and offload",
    ),
    "sync each in bf16": (
        ["parallel.sync_each_pass=true", "parallel.dp=2", "precision.reduce=bf16"],
        "would round DDP's sums to precision.reduce = 'bf16' after every micro-batch",
    ),
    "async tensor parallelism": (
        ["parallel.async_tp=true", "parallel.tp=2", "parallel.compile=true"],
        "use parallel.async_tp = false, which computes the same",
    ),
    "profile": (["log.profile=[5, 2]"], "must be [first step, last step]"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal(case: str) -> None:
    overrides, message = ILLEGAL[case]
    with pytest.raises(SpecError) as error:
        load_run("tiny", overrides)
    assert message in str(error.value)


def test_the_nearest_legal_layouts_are_named_and_are_legal() -> None:
    with pytest.raises(SpecError) as error:
        load_run("tiny", ["parallel.tp=8", "data.micro_batch=2"])
    suggested = str(error.value).split("legal with 8 ranks: ")[1].split(" | ")
    assert len(suggested) == 3 and "tp=4 cp=2" in suggested  # one degree halved, another taken up
    for layout in suggested:
        spec = load_run("tiny", ["data.micro_batch=2", *(f"parallel.{degree}" for degree in layout.split())])
        assert spec.parallel.world == 8


def test_the_default_batch_fills_a_pipeline() -> None:
    deep = ["model.layers=8", "data.micro_batch=3"]
    assert load_run("tiny", [*deep, "parallel.pp=4", "parallel.dp=2"]).accumulation == 4
    assert load_run("tiny", [*deep, "parallel.pp=2", "parallel.schedule=dualpipev"]).accumulation == 4
    assert load_run("tiny", [*deep, "parallel.dp=2"]).accumulation == 1


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("looped-bfs", 2)])
def test_stages_of_a_rank_follow_from_the_schedule(schedule: str, stages: int) -> None:
    spec = load_run("tiny", ["model.layers=8", "parallel.pp=2", f"parallel.schedule={schedule}"])
    assert spec.parallel.virtual_stages == stages
