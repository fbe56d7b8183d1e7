"""Every schedule gives the loss and gradients of plain accumulation on one rank, alone and over FSDP2 shards."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lmworks.kernels.training.cross_entropy import IGNORE
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.pipeline import MULTI_STAGE, SINGLE_STAGE, Pipeline
from lmworks.parallel.precision import autocast_forward
from lmworks.plan.pipelines.schedule import stages_of
from lmworks.plan.pipelines.stages import split_layers
from lmworks.spec import Grid, RunSpec, SpecError, TrainingError
from lmworks.spec.run import SCHEDULES

CPU = torch.device("cpu")
SCALE = 0.01
Figures = dict[str, Any]


def make_spec(schedule: str, pp: int, micro_batches: int, **more: Any) -> RunSpec:
    parallel = {"pp": pp, "schedule": schedule, **more.pop("parallel", {})}
    dp = parallel.get("dp_shard", 1)
    return RunSpec.from_dict(
        {
            "model": {"layers": 2 * pp, "hidden": 32, "heads": 2, "vocab": 64, "context": 16, **more.pop("model", {})},
            "data": {"seq": 16, "micro_batch": 2, "global_batch": 2 * micro_batches * dp},
            "parallel": parallel,
            **more,
        }
    )


def make_inputs(spec: RunSpec, count: int) -> list[dict[str, Any]]:
    """Micro-batches that differ in everything a stage could mistake: tokens, documents, how many targets count."""
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for index in range(count):
        tokens = torch.randint(spec.model.vocab, (2, spec.data.seq + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, : 2 * index] = IGNORE
        border = torch.randint(3, 12, (2, 1), generator=generator)
        documents = (torch.arange(spec.data.seq) >= border).long()
        common = {"reduction": "sum", "keep_logits": False}
        inputs.append({"tokens": tokens[:, :-1], "targets": targets, "documents": documents, **common})
    return inputs


def on_one_rank(spec: RunSpec, inputs: list[dict[str, Any]], evaluated: int) -> Figures:
    model = GPT(spec.model, spec.seed)
    autocast_forward(spec.precision, model, CPU)
    with torch.no_grad():
        evaluation = sum(model(**micro_batch)[1] for micro_batch in inputs[:evaluated])
    total = torch.zeros(())
    for micro_batch in inputs:
        _, loss = model(**micro_batch)
        (loss * SCALE).backward()
        total += loss.detach()
    return {"loss": total, "evaluation": evaluation, "gradients": {n: p.grad for n, p in model.named_parameters()}}


def make_pipeline(spec: RunSpec, mesh: Mesh) -> Pipeline:
    layout = spec.parallel
    every = split_layers(spec.model, spec.data.seq, layout.pp * layout.virtual_stages)
    parts: dict[int, nn.Module] = {}
    for index in stages_of(layout.schedule, layout.pp, layout.virtual_stages, mesh.rank("pp")):
        stage = every[index]
        part = GPT(spec.model, spec.seed, layers=stage.layers, first=stage.first, last=stage.last)
        part.recompute = layout.recompute
        autocast_forward(spec.precision, part, CPU)
        if layout.dp_shard > 1:
            for module in (*part.layers(), part):
                fully_shard(module, mesh=mesh.device_mesh("shard"), reshard_after_forward=module is not part)
            for unit in part.modules():
                if isinstance(unit, FSDPModule):
                    unit.set_gradient_divide_factor(1.0)
                    unit.set_force_sum_reduction_for_comms(True)
        parts[index] = part
    return Pipeline(parts, spec, mesh, CPU)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def in_a_pipeline(spec: RunSpec, mesh: Mesh, inputs: list[dict[str, Any]], evaluated: int) -> Figures:
    """Two steps, of which the first's gradients are dropped: nothing may be left over from one to the next."""
    pipeline, dp_rank = make_pipeline(spec, mesh), mesh.rank("dp")
    mine = inputs[dp_rank * spec.accumulation :][: spec.accumulation]
    pipeline.train(mine, SCALE)
    for part in pipeline.modules.values():
        part.zero_grad(set_to_none=True)
    before = pipeline.evaluate(inputs[:evaluated])
    loss = pipeline.train(mine, torch.tensor(SCALE))
    gradients = [(n, whole(p.grad)) for part in pipeline.modules.values() for n, p in part.named_parameters()]
    after = pipeline.evaluate(inputs[:evaluated])
    with pytest.raises(TrainingError, match=f"{spec.accumulation} micro-batches"):
        pipeline.train(mine[1:], SCALE)
    return {"loss": loss, "evaluations": (before, after), "gradients": gradients, "dp_rank": dp_rank}


def work(_rank: int, specs: list[RunSpec], evaluated: int) -> list[tuple[Figures, Figures]]:
    results = []
    mesh = Mesh(Grid.of(specs[0].parallel), "cpu")  # the schedules differ, the ranks do not
    for spec in specs:
        inputs = make_inputs(spec, spec.accumulation * spec.parallel.dp)
        results.append((on_one_rank(spec, inputs, evaluated), in_a_pipeline(spec, mesh, inputs, evaluated)))
    return results


def compare(specs: list[RunSpec], evaluated: int = 3) -> None:
    ranks = on_ranks(specs[0].parallel.world, work, specs, evaluated)
    for spec, *results in zip(specs, *ranks, strict=True):
        name = f"{spec.parallel.schedule}, {spec.accumulation} micro-batches"
        expected = results[0][0]
        own = [mine for _, mine in results]
        assert sum(mine["loss"] for mine in own) == pytest.approx(expected["loss"].item(), rel=1e-6), name
        first = [mine for mine in own if mine["dp_rank"] == 0]
        for evaluation in zip(*(mine["evaluations"] for mine in first), strict=True):
            assert sum(evaluation) == pytest.approx(expected["evaluation"].item(), rel=1e-6), name
        worst = worst_gradient(first, expected["gradients"])
        assert worst[0] <= 1e-5, f"{name}: {worst}"


def worst_gradient(ranks: list[Figures], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, with its name. Both copies of a tied embedding have a part of its gradient."""
    summed: dict[str, Tensor] = {}
    for rank in ranks:
        for name, gradient in rank["gradients"]:
            summed[name] = summed[name] + gradient if name in summed else gradient
    assert summed.keys() == expected.keys()
    return max(((summed[n] - g).norm().item() / g.norm().item(), n) for n, g in expected.items())


def test_every_schedule_on_two_ranks() -> None:
    """Tied embeddings, and numbers of micro-batches that are no multiple of the ranks."""
    uneven = {"interleaved": 3, "interleaved-zero-bubble": 3}
    compare([make_spec(s, 2, uneven.get(s, 5), model={"tie_embeddings": True}) for s in SCHEDULES])


@pytest.mark.slow
def test_every_schedule_on_four_ranks() -> None:
    uneven = {"dualpipev": 9, "gpipe": 3, "looped-bfs": 3}
    compare([make_spec(s, 4, uneven.get(s, 6)) for s in SCHEDULES], evaluated=5)


@pytest.mark.slow  # tests/parallel/test_recompute.py has one of a zero-bubble pipeline
def test_recompute_on_every_schedule() -> None:
    """A split backward pass could not run twice through what is computed again, so there it is not split."""
    policies = itertools.cycle([{"recompute": "full"}, {"recompute": "selective"}])
    cases = [*SCHEDULES[1:], "zbv", "1f1b"]  # both policies where the backward pass is split, and where it is not
    compare([make_spec(s, 2, 4, parallel=next(policies)) for s in cases])


def test_bf16_is_one_ranks_bf16() -> None:
    compare([make_spec(s, 2, 4, precision={"dtype": "bf16"}) for s in ("1f1b", "zbv")])


@pytest.mark.slow
def test_with_sharded_parameters() -> None:
    """FSDP2 under the pipeline: gradients are whole only if the schedule neither loses nor repeats a reduction."""
    sharded = {"strategy": "fsdp2", "dp_shard": 2}
    plain = [make_spec(s, 2, 4, parallel=sharded) for s in SCHEDULES[1:]]
    again = [make_spec(s, 2, 4, parallel={**sharded, "recompute": "full"}) for s in ("1f1b", "zbv")]
    compare([*plain, *again])


def test_the_residual_stream_stays_fp32() -> None:
    """What travels between stages has the shape and type that their buffers are made for."""
    spec = make_spec("1f1b", 2, 2, precision={"dtype": "bf16"})
    part = GPT(spec.model, layers=range(2), last=False)
    autocast_forward(spec.precision, part, CPU)
    with torch.no_grad():
        assert part(make_inputs(spec, 1)[0]["tokens"]).dtype == torch.float32


def without_one(_rank: int, spec: RunSpec) -> Figures:
    inputs = make_inputs(spec, spec.accumulation)
    expected = on_one_rank(spec, inputs, 1)
    inputs[1] = {**inputs[1], "targets": torch.full_like(inputs[1]["targets"], IGNORE)}
    mesh = Mesh(Grid.of(spec.parallel), "cpu")
    return {"expected": expected["gradients"], "own": in_a_pipeline(spec, mesh, inputs, 1)}


def test_a_dropped_micro_batch_is_noticed() -> None:
    ranks = on_ranks(2, without_one, make_spec("1f1b", 2, 4))
    assert worst_gradient([rank["own"] for rank in ranks], ranks[0]["expected"])[0] > 1e-2


def test_stages_of_a_rank() -> None:
    assert [stages_of("1f1b", 4, 1, rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [stages_of("interleaved", 2, 3, rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of("zbv", 3, 2, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_spec_refuses_what_the_schedule_refuses_and_nothing_else(schedule: str) -> None:
    kind: Any = {**SINGLE_STAGE, **MULTI_STAGE}[schedule]
    single = schedule in ("gpipe", "1f1b")
    for pp in (2, 3, 4):
        count = pp if single else 2 * pp
        stage = SimpleNamespace(group_size=pp, group_rank=0, num_stages=count, submod=nn.Identity())
        for micro_batches in range(1, 14):
            try:
                kind(stage if single else [stage, stage], micro_batches)
                possible = True
            except ValueError:
                possible = False
            try:
                make_spec(schedule, pp, micro_batches)
                allowed = True
            except SpecError:
                allowed = False
            assert allowed == possible, f"{schedule}, pp = {pp}, {micro_batches} micro-batches"
