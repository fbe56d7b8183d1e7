"""Mixture of experts against loops over tokens and plain autograd; balancing counts every trained token once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.model import GPT
from lmworks.model.moe import MoE, expert_load, moe_layers, set_balance_scale, update_balance
from lmworks.spec import ModelSpec


def make(**changes: Any) -> GPT:
    """Weights large enough that probabilities differ and every path has a gradient."""
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "context": 24, "init_std": 0.3}
    return GPT(ModelSpec(**{**shape, "experts": 5, "top_k": 2, "expert_ffn": 24, **changes}))


def batch(rows: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, 64, (2, rows, 24), generator=torch.Generator().manual_seed(seed))
    return tokens, targets


def layer(**changes: Any) -> MoE:
    return moe_layers(make(**changes))[0]


def by_loop(moe: MoE, x: Tensor, limit: int) -> Tensor:
    """Token by token; an expert that has had `limit` tokens of a sequence passes over the rest."""
    sequences = []
    for sequence in x:
        had = [0] * moe.experts
        rows = []
        for token in sequence:
            logits = moe.router.weight @ token
            probs = 1 / (1 + torch.exp(-logits)) if moe.scores == "sigmoid" else torch.softmax(logits, dim=0)
            scores = (probs if moe.choice_bias is None else probs + moe.choice_bias).tolist()
            best = sorted(range_of_groups(moe, scores), key=scores.__getitem__, reverse=True)[: moe.top_k]
            total = probs[best].sum() if moe.norm_topk else 1.0
            row = torch.zeros_like(token)
            for e in best:
                had[e] += 1
                if had[e] <= limit:
                    h = F.silu(moe.gate[e] @ token) * (moe.up[e] @ token)
                    row = row + (moe.down[e] @ h) * (probs[e] / total) * moe.routed_scale
            if moe.shared is not None:
                gate = 1.0 if moe.shared_gate is None else 1 / (1 + torch.exp(-moe.shared_gate.weight[0] @ token))
                row = row + gate * moe.shared(token)
            rows.append(row)
        sequences.append(torch.stack(rows))
    return torch.stack(sequences)


def range_of_groups(moe: MoE, scores: list[float]) -> list[int]:
    """Experts that a token may visit: those of its best groups."""
    each = moe.experts // moe.expert_groups
    groups = [range(start, start + each) for start in range(0, moe.experts, each)]
    count = 2 if moe.scores == "sigmoid" else 1
    worth = {group: sum(sorted(scores[e] for e in group)[-count:]) for group in groups}
    kept = sorted(groups, key=worth.__getitem__, reverse=True)[: moe.top_groups]
    return [e for group in sorted(kept, key=lambda group: group.start) for e in group]


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {"norm_topk": False},
    "qwen2": {"norm_topk": False, "shared_experts": 2, "shared_gate": True},
    "deepseek v2": {"experts": 6, "expert_groups": 3, "top_groups": 2, "norm_topk": False, "routed_scale": 1.5},
    "deepseek v3": {"experts": 6, "expert_groups": 3, "top_groups": 1, "router": "sigmoid", "routed_scale": 2.5,
                    "balance_bias": 0.01},
    "sigmoid": {"router": "sigmoid", "norm_topk": False, "shared_experts": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_equal_a_loop_over_tokens(name: str) -> None:
    moe = layer(**ROUTERS[name])
    generator = torch.Generator().manual_seed(0)
    if moe.choice_bias is not None:
        moe.choice_bias.copy_(torch.tensor([0.4, 0.0, -0.3, 0.0, 0.2, 0.1]))
    x = torch.randn(3, 11, 32, generator=generator).requires_grad_()
    weight = torch.randn(3, 11, 32, generator=generator)
    result, expected = moe(x), by_loop(moe, x, 11)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(*(gradients((y * weight).sum(), moe, x) for y in (result, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def gradients(loss: Tensor, moe: MoE, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x, *moe.parameters()]))


@pytest.mark.parametrize("bias", [0.0, 0.01], ids=["", "biased"])
@pytest.mark.parametrize("capacity", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("top_k, shared", [(1, 0), (2, 2), (5, 0)])
def test_result_and_gradients_equal_a_loop_over_tokens(top_k: int, shared: int, capacity: float, bias: float) -> None:
    moe = layer(top_k=top_k, shared_experts=shared, capacity=capacity, balance_bias=bias)
    if moe.choice_bias is not None:
        moe.choice_bias.copy_(torch.tensor([0.4, 0.0, -0.3, 0.0, 0.2]))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 11, 32, generator=generator).requires_grad_()
    weight = torch.randn(3, 11, 32, generator=generator)
    expected = by_loop(moe, x, math.ceil(capacity * 11 * top_k / 5) if capacity else 11)
    result = moe(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = (gradients((y * weight).sum(), moe, x) for y in (result, expected))
    for ours_of_one, theirs_of_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_of_one, theirs_of_one, rtol=1e-4, atol=1e-4)


def test_capacity_drops_the_late_ones_and_only_in_training() -> None:
    """All tokens want experts 0 and 1, which take ceil(0.5 · 10 · 2 / 5) = 2 of each sequence."""
    moe = layer(capacity=0.5, balance_bias=0.1)
    assert moe.choice_bias is not None
    moe.choice_bias.copy_(torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0]))
    x = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(0))
    served = moe(x).abs().sum(dim=-1) > 0
    assert served.tolist() == 3 * [[True, True, *(8 * [False])]]
    with torch.no_grad():
        assert (moe(x).abs().sum(dim=-1) > 0).all()
    assert (moe.eval()(x).abs().sum(dim=-1) > 0).all()


def test_capacity_does_not_depend_on_how_sequences_are_batched() -> None:
    moe = layer(capacity=0.7)
    x = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(moe(x), torch.cat([moe(row[None]) for row in x]), rtol=1e-5, atol=1e-6)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zeros() -> None:
    moe = layer(top_k=1, balance_bias=0.1)
    assert moe.choice_bias is not None
    moe.choice_bias[3] = 2.0
    moe(torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert moe.gate.grad is not None
    assert [bool(g.any()) for g in moe.gate.grad] == [False, False, False, True, False]


def test_autocast_moves_rows_in_its_precision_and_sums_in_fp32() -> None:
    moe = layer()
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = moe(x)
    assert narrow.dtype == torch.float32
    assert 0 < (narrow - moe(x)).norm() / moe(x).norm() < 0.02


# --- balance loss -------------------------------------------------------------------------------------


def balance_formula(model: GPT, tokens: Tensor, targets: Tensor, coefficient: float) -> Tensor:
    """Main loss and balance loss as one number, by plain autograd over the routers' outputs."""
    logits: list[Tensor] = []
    hooks = [moe.router.register_forward_hook(lambda _m, _i, out: logits.append(out)) for moe in moe_layers(model)]
    loss = model(tokens, targets, reduction="sum")[1]
    for hook in hooks:
        hook.remove()
    for of_layer in logits:
        probs = of_layer.softmax(dim=-1).view(*tokens.shape, 5)
        for sequence in probs:
            chosen = F.one_hot(sequence.topk(2).indices, 5).sum(dim=1).float()
            share, mean = chosen.mean(dim=0), sequence.mean(dim=0)  # of tokens that chose it; of its probability
            loss = loss + coefficient * tokens.shape[1] * 5 / 2 * (share * mean).sum()
    return loss


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "mlp"])
def test_balance_loss_has_the_gradient_of_its_formula(recompute: str) -> None:
    tokens, targets = batch()
    plain, model = make(), make(balance_loss=0.5)
    scale = 64.0 / targets.numel()  # as a loss scale would make it
    (balance_formula(plain, tokens, targets, 0.5) * scale).backward()
    model.recompute = recompute
    set_balance_scale(model, scale)
    (model(tokens, targets, reduction="sum")[1] * scale).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


def test_balance_loss_is_one_a_token_when_all_is_even() -> None:
    moe = layer(experts=4, balance_loss=1.0)
    probs, counts = torch.full((3, 8, 4), 0.25), torch.full((3, 4), 4)
    assert moe.balance_term(probs, counts).item() == pytest.approx(3 * 8)


def test_without_a_scale_the_balance_loss_is_a_mean_as_the_main_loss_is() -> None:
    tokens, targets = batch()
    ours, theirs = make(balance_loss=0.5), make(balance_loss=0.5)
    ours(tokens, targets)[1].backward()
    set_balance_scale(theirs, 1 / targets.numel())
    theirs(tokens, targets)[1].backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_micro_batches_add_up_to_their_batch() -> None:
    tokens, targets = batch()
    models = make(balance_loss=0.5, capacity=0.8), make(balance_loss=0.5, capacity=0.8)
    for model, size in zip(models, (4, 1), strict=True):
        set_balance_scale(model, 1 / targets.numel())
        for part in range(0, 4, size):
            loss = model(tokens[part : part + size], targets[part : part + size], reduction="sum")[1]
            (loss / targets.numel()).backward()
    for whole, parts in zip(*(model.parameters() for model in models), strict=True):
        assert (whole.grad - parts.grad).norm() <= 1e-5 * whole.grad.norm()


# --- balance bias -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "mlp"])
def test_every_trained_token_is_counted_once(recompute: str) -> None:
    tokens, targets = batch()
    model = make(balance_bias=0.01)
    model.recompute = recompute
    with torch.no_grad():
        model(tokens, targets)
    for part in (slice(0, 2), slice(2, 4)):
        model(tokens[part], targets[part])[1].backward()
    for moe in moe_layers(model):
        assert moe.expert_counts is not None
        assert moe.expert_counts.sum() == tokens.numel() * 2


def test_counts_are_those_of_the_choices() -> None:
    model = make(layers=1)
    (moe,) = moe_layers(model)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    moe(x).sum().backward()
    chosen = moe.router(x).topk(2).indices
    assert moe.expert_counts is not None
    assert moe.expert_counts.tolist() == [int((chosen == e).sum()) for e in range(5)]
    update_balance(model)
    busiest = max((chosen == e).sum() for e in range(5)).item()
    assert expert_load(model) == pytest.approx(busiest / (2 * 9 * 2 / 5))


def test_the_bias_moves_by_its_step_against_the_load() -> None:
    model = make(layers=1, balance_bias=0.25)
    (moe,) = moe_layers(model)
    moe.expert_counts = torch.tensor([10, 4, 6, 0, 5])
    update_balance(model)
    assert moe.choice_bias is not None
    assert moe.choice_bias.tolist() == [-0.25, 0.25, -0.25, 0.25, 0.0]
    assert moe.expert_counts is None
    assert expert_load(model) == 2.0


def test_the_bias_evens_out_the_load_with_recompute_as_without() -> None:
    """Every token wants expert 0 at first; weights stand still, so nothing but the bias can mend it."""
    tokens, targets = batch(rows=8)
    biases = []
    for recompute in ("none", "full", "selective", "mlp"):
        model = make(layers=1, balance_bias=0.02)
        model.recompute = recompute
        for moe in moe_layers(model):
            assert moe.choice_bias is not None
            moe.choice_bias[0] = 0.4
        loads = []
        for step in range(20 if recompute == "none" else 6):
            model(tokens, targets)[1].backward()
            update_balance(model)
            loads.append(expert_load(model))
            if step == 5:
                biases.append([moe.choice_bias.clone() for moe in moe_layers(model) if moe.choice_bias is not None])
        assert loads[0] > 2
        assert recompute != "none" or loads[-1] < 1.15
    for other in biases[1:]:
        torch.testing.assert_close(biases[0], other, rtol=0, atol=0)


def test_the_bias_is_saved_but_is_no_parameter() -> None:
    with torch.device("meta"):
        model = GPT(ModelSpec(layers=1, hidden=32, heads=4, experts=4, balance_bias=0.1))
    model.to_empty(device="cpu").init_weights(0)
    assert sum(p.numel() for p in model.parameters()) == model.spec.params
    assert model.state_dict()["blocks.0.mlp.choice_bias"].tolist() == [0.0] * 4
    assert not [name for name in make().state_dict() if "bias" in name]


def test_the_choice_bias_does_not_weigh() -> None:
    """A bias for everyone alike changes no choice, and so nothing."""
    moe = layer(balance_bias=0.1)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    before = moe(x)
    assert moe.choice_bias is not None
    moe.choice_bias += 3.0
    assert torch.equal(moe(x), before)
