"""Expert parallelism against one rank on the whole batch: the loss and every gradient, on real gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from layouts import mesh_of
from lmworks.model import GPT
from lmworks.model.attention import dense
from lmworks.model.gpt import initial_weight
from lmworks.model.moe import MoE, moe_layers, set_balance_scale, update_balance
from lmworks.parallel.expert_parallel import (
    apply_expert_parallel,
    dispatch_tokens,
    expert_names,
    sum_balance_loss_over_cp,
)
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.sharding_plan import ShardingPlan
from lmworks.parallel.tensor_parallel import apply_tensor_parallel, local_heads
from lmworks.spec import Grid, ModelSpec, ParallelSpec

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "context": 16, "init_std": 0.3}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "balance_loss": 0.5}
# Choices that leave experts, and with them whole ranks, without a token.
CROWDED = [3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def share_of(name: str, shape: torch.Size, spec: ModelSpec, sharding: ShardingPlan, mesh: Mesh) -> Tensor:
    return sharding.local_part(name, initial_weight(spec, 0, name, sharding.shape(name, shape)), mesh)


def parallelize(spec: ModelSpec, layout: ParallelSpec, mesh: Mesh) -> tuple[GPT, ShardingPlan]:
    """Cut on the meta device, as training does it."""
    sharding = ShardingPlan()
    with torch.device("meta"):
        part = GPT(spec)
    if layout.tp > 1:
        apply_tensor_parallel(part, layout, mesh, sharding)
    if layout.ep > 1:
        apply_expert_parallel(part, mesh, sharding)
    part.to_empty(device="cpu").init_weights(0)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(share_of(name, parameter.shape, spec, sharding, mesh))
    return part, sharding


def set_bias(model: GPT, bias: list[float] | None) -> None:
    for moe in moe_layers(model):
        if bias is not None:
            assert moe.choice_bias is not None
            moe.choice_bias.copy_(torch.tensor(bias))


def drop_a_token(moe: MoE, rows: Tensor, counts: Tensor, group: ProcessGroup) -> Tensor:
    """The bug that must be seen: one row's result is lost on its way back."""
    result = dispatch_tokens(moe, rows, counts, group)
    return result * (torch.arange(len(result)) > 0).unsqueeze(-1)


def train(model: GPT, tokens: Tensor, targets: Tensor, scale: float, **more: Any) -> Tensor:
    set_balance_scale(model, scale)
    _, loss = model(tokens, targets, reduction="sum", keep_logits=False, **more)
    (loss * scale).backward()
    return loss.detach() * scale


@dataclass(frozen=True)
class Case:
    name: str
    layout: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    bias: list[float] | None = None
    broken: bool = False


def compare_all(rank: int, cases: list[Case]) -> list[dict[str, float]]:
    return [compare(case) for case in cases]


def compare(case: Case) -> dict[str, float]:
    """Relative differences of loss and gradients between this layout and one rank with all sequences."""
    spec = ModelSpec(**{**SHAPE, **EXPERTS, **case.model})
    layout = ParallelSpec(**case.layout)
    mesh = mesh_of(Grid.of(layout), "cpu")
    tokens, targets = torch.randint(0, 64, (2, 4, 16), generator=torch.Generator().manual_seed(1))
    whole, (part, sharding) = GPT(spec), parallelize(spec, layout, mesh)
    for model in (whole, part):
        set_bias(model, case.bias)
        model.recompute = case.recompute
    if case.broken:
        for moe in moe_layers(part):
            moe.dispatch = partial(drop_a_token, group=mesh.group("ep"))
    expected = train(whole, tokens, targets, 1 / targets.numel())
    mine = slice(mesh.rank("dp"), None, mesh.size("dp"))
    attend = dense(spec, torch.device("cpu"), heads=local_heads(spec, mesh))
    loss = train(part, tokens[mine], targets[mine], 1 / targets.numel(), attend=attend)
    dist.all_reduce(loss, group=mesh.group("dp"))
    differences = {"loss": abs(float(loss / expected) - 1)}
    experts = expert_names(part)
    for (name, parameter), (_, other) in zip(part.named_parameters(), whole.named_parameters(), strict=True):
        assert parameter.grad is not None, name
        assert other.grad is not None
        if name in sharding.partial_grads:
            dist.all_reduce(parameter.grad, group=mesh.group("tp"))
        dist.all_reduce(parameter.grad, group=mesh.group("edp" if name in experts else "dp"))
        theirs = sharding.local_part(name, other.grad, mesh)
        # A rank whose experts have no tokens has exact zeros: the whole gradient is the yardstick.
        differences[name] = float((parameter.grad - theirs).norm() / other.grad.norm())
    update_balance(whole)
    update_balance(part, mesh.group("dp"))
    for ours, others in zip(moe_layers(part), moe_layers(whole), strict=True):
        assert ours.load is not None
        assert others.load is not None
        differences["load"] = max(differences.get("load", 0.0), float((ours.load - others.load).abs().max()))
        if ours.choice_bias is not None and others.choice_bias is not None:
            differences["bias"] = max(
                differences.get("bias", 0.0), float((ours.choice_bias - others.choice_bias).norm())
            )
    return differences


def assert_exact(case: Case, differences: dict[str, float]) -> None:
    limits = {"loss": 1e-6, "load": 0.0, "bias": 0.0}
    for name, difference in differences.items():
        assert difference <= limits.get(name, 1e-5), f"{case.name}: {name} differs by {difference:.2g}"


TWO = [
    Case("2 ranks", {"dp": 2, "ep": 2}),
    Case("selective recompute", {"dp": 2, "ep": 2}, recompute="selective"),
    Case("capacity", {"dp": 2, "ep": 2}, {"capacity": 0.6}),
]
FOUR = [
    Case("one expert a rank, top 1", {"dp": 4, "ep": 4}, {"experts": 4, "top_k": 1}),
    Case("2 of 4 sharded ranks", {"dp_shard": 4, "ep": 2, "strategy": "fsdp2"}, recompute="full"),
    Case("idle ranks, capacity", {"dp": 4, "ep": 4}, {"balance_bias": 0.1, "capacity": 0.6}, "full", CROWDED),
    Case("sequence parallel", {"dp": 2, "ep": 2, "tp": 2, "sp": True}, recompute="full"),
]
OTHERS = [  # parts of those of four ranks
    Case("4 ranks", {"dp": 4, "ep": 4}),
    Case("2 of 4 ranks", {"dp": 4, "ep": 2}),
    Case("idle ranks", {"dp": 4, "ep": 4}, {"balance_bias": 0.1}, "none", CROWDED),
    Case("idle ranks, recompute", {"dp": 4, "ep": 4}, {"balance_bias": 0.1}, "full", CROWDED),
    Case("tensor parallel", {"dp": 2, "ep": 2, "tp": 2}),
]


@pytest.mark.parametrize("ranks, cases", [(2, TWO), (4, FOUR), pytest.param(4, OTHERS, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_rank(ranks: int, cases: list[Case]) -> None:
    for outcomes in on_ranks(ranks, compare_all, cases):
        for case, differences in zip(cases, outcomes, strict=True):
            assert_exact(case, differences)


def test_a_lost_token_is_seen() -> None:
    case = Case("a lost token", {"dp": 2, "ep": 2}, broken=True)
    for (differences,) in on_ranks(2, compare_all, [case]):
        with pytest.raises(AssertionError, match="a lost token: loss differs"):
            assert_exact(case, differences)
        assert differences["blocks.1.mlp.router.weight"] > 1e-3


# --- sequences over ranks -----------------------------------------------------------------------------


def compare_sequences(rank: int) -> float:
    """One MoE layer over half of each sequence: the router's gradient of the balance loss alone."""
    spec = ModelSpec(**{**SHAPE, **EXPERTS})
    mesh = Mesh(Grid(cp=2), "cpu")
    whole, part = GPT(spec), GPT(spec)
    sum_balance_loss_over_cp(part, mesh.group("cp"))
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1))
    gradients = []
    for model, hidden in ((whole, x), (part, x.chunk(2, dim=1)[rank])):
        set_balance_scale(model, 1 / 48)
        moe = moe_layers(model)[0]
        (moe(hidden) * 0).sum().backward()
        assert moe.router.weight.grad is not None
        gradients.append(moe.router.weight.grad)
    dist.all_reduce(gradients[1])
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def test_the_balance_loss_of_a_sequence_that_is_split() -> None:
    assert max(on_ranks(2, compare_sequences)) <= 1e-5


# --- what is cut --------------------------------------------------------------------------------------


def describe(rank: int) -> tuple[dict[str, tuple[int, ...]], set[str], dict[str, Any]]:
    spec = ModelSpec(**{**SHAPE, **EXPERTS})
    layout = ParallelSpec(dp=2, tp=2, ep=2)
    part, sharding = parallelize(spec, layout, Mesh(Grid.of(layout), "cpu"))
    shapes = {name: tuple(p.shape) for name, p in part.named_parameters() if ".0.mlp." in name}
    cuts = {
        name: (tuple(split.shape), split.axes) for name, split in sharding.by_name.items() if "blocks.0.mlp" in name
    }
    return shapes, expert_names(part), cuts


def test_names_stay_and_only_experts_are_cut() -> None:
    shapes, names, cuts = on_ranks(4, describe)[0]
    assert names == {f"blocks.{layer}.mlp.{weight}" for layer in range(2) for weight in ("gate", "up", "down")}
    assert shapes["blocks.0.mlp.router.weight"] == (8, 32)
    assert shapes["blocks.0.mlp.gate"] == (4, 8, 32)
    assert shapes["blocks.0.mlp.down"] == (4, 32, 8)
    assert cuts["blocks.0.mlp.up"] == ((8, 16, 32), {"tp": 1, "ep": 0})


def test_without_expert_parallelism_no_parameter_is_an_expert_of_its_own() -> None:
    assert expert_names(GPT(ModelSpec(**{**SHAPE, **EXPERTS}))) == set()
