"""The learning rate is what its formula says, and weight decay touches matrices alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lmworks.model import GPT
from lmworks.parallel.single_rank import SingleRank
from lmworks.spec import ModelSpec, OptimSpec
from lmworks.train.optim import learning_rate, make_optimizer

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def rates(**fields: object) -> list[float]:
    optim = OptimSpec(**{"lr": 1.0, "steps": 101, "warmup": 10, **fields})  # type: ignore[arg-type]
    return [learning_rate(optim, step) for step in range(optim.steps)]


# --- schedules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_linearly_and_ends_at_the_peak(schedule: str) -> None:
    assert rates(schedule=schedule)[:11] == pytest.approx([(step + 1) / 10 for step in range(10)] + [1.0], abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 55, 0.55),  # half way down from 1 to 0.1
        ("cosine", 32, 0.1 + 0.9 * (1 + math.cos(math.pi * 22 / 90)) / 2),
        ("linear", 55, 0.55),
        ("linear", 28, 1 - 0.9 * 18 / 90),
        ("wsd", 55, 1.0),
        ("wsd", 80, 1.0),  # the last step at the peak: the 20 after it fall
        ("wsd", 90, 0.55),
        ("wsd", 99, 0.1 + 0.9 / 20),
        ("constant", 55, 1.0),
        ("constant", 100, 1.0),
    ],
)
def test_rate_follows_the_closed_form(schedule: str, step: int, expected: float) -> None:
    assert rates(schedule=schedule)[step] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("floor", [0.1, 1.0])
def test_last_step_has_minimal_lr(schedule: str, floor: float) -> None:
    values = rates(schedule=schedule, min_lr_ratio=floor, lr=3e-4)
    assert values[-1] == 3e-4 * floor == min(values[10:])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_without_a_minimal_lr_the_step_after_the_last_would_have_rate_0(schedule: str) -> None:
    """A step at rate 0 trains nothing: the schedule of one more step, which is left out."""
    values = rates(schedule=schedule, min_lr_ratio=0.0, decay_ratio=0.9)
    assert values[-1] == min(values[10:]) > 0
    last = {"cosine": (1 + math.cos(math.pi * 90 / 91)) / 2, "linear": 1 / 91, "wsd": 1 / 91}
    assert values[-1] == pytest.approx(last[schedule], abs=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10, 60])
@pytest.mark.parametrize("decay_ratio", [0.01, 0.2, 1.0])
def test_lr_rises_once_without_jumps(schedule: str, warmup: int, decay_ratio: float) -> None:
    values = rates(schedule=schedule, warmup=warmup, decay_ratio=decay_ratio)
    rise, fall = values[:warmup], values[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert max(values) == values[warmup] == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (5, 5)])
def test_shortest_runs_use_peak_lr(schedule: str, steps: int, warmup: int) -> None:
    """With one step or none after the warm-up there is nothing to fall over."""
    assert rates(schedule=schedule, steps=steps, warmup=warmup)[-1] == 1.0


# --- AdamW ---------------------------------------------------------------------------------------------


def small(**fields: object) -> GPT:
    return GPT(ModelSpec.from_preset("tiny", layers=1, hidden=32, heads=2, kv_heads=1, **fields))


@pytest.mark.parametrize("fields", [{}, {"bias": True, "norm": "layer", "positions": "learned"}, {"experts": 4}])
def test_weight_decay_on_matrices_only(fields: dict[str, object]) -> None:
    model = small(**fields)
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, OptimSpec(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.1), name


def test_zero_gradient_applies_decay_to_matrices_only() -> None:
    model = small(bias=True, norm="layer")
    nn.init.ones_(model.blocks["0"].mlp.up.bias)  # type: ignore[union-attr, arg-type]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, OptimSpec(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter, before[name] * factor, rtol=1e-6, atol=0)


def test_tied_embedding_is_stepped_once() -> None:
    model = small(tie_embeddings=True)
    listed = [
        p
        for group in make_optimizer(SingleRank(model).shards(), model.spec, OptimSpec()).param_groups
        for p in group["params"]
    ]
    assert sum(p is model.embed.weight for p in listed) == 1


def test_fused_adamw_equals_the_textbook_update() -> None:
    optim = OptimSpec(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    model = small()
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, optim)
    weight = model.blocks["0"].attention.q.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    expected, m, v = weight.detach().double().clone(), torch.zeros(()), torch.zeros(())
    for step in range(1, 5):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        for parameter in model.parameters():
            parameter.grad = None
        weight.grad = gradient.clone()
        optimizer.step()
        m = optim.beta1 * m + (1 - optim.beta1) * gradient.double()
        v = optim.beta2 * v + (1 - optim.beta2) * gradient.double() ** 2
        expected = expected * (1 - optim.lr * optim.weight_decay)
        denominator = (v / (1 - optim.beta2**step)).sqrt() + optim.eps
        expected = expected - optim.lr * (m / (1 - optim.beta1**step)) / denominator
    torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)
