"""Training goes on from a checkpoint as if it had never stopped, to the bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmworks import checkpoint
from lmworks.parallel.data_parallel import Shard
from lmworks.parallel.sharding_plan import ShardingPlan
from lmworks.parallel.state_dict import training_state
from lmworks.train.rng import rng_state, set_rng_state


class Net(nn.Module):
    """Matrices, norms, a bias, a tied head, dropout: what a small model has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.drop(self.down(self.up(self.norm(x)).relu())))


def build(seed: int, lr: Any = 0.01, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **options)


def train(model: Net, optimizer: torch.optim.AdamW, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(step))
        for group in optimizer.param_groups:
            rate = 0.01 / (1 + step) ** 0.5
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model: Net, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Weights, moments and step counts, taken by hand."""
    found = dict(model.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def state_of(model: Net, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    shards = [Shard(name, p, p.shape, None) for name, p in model.named_parameters()]
    return training_state(optimizer, shards, ShardingPlan(), None)


def resume(root: Path, model: Net, optimizer: torch.optim.AdamW) -> None:
    state = {**state_of(model, optimizer), "rng": None}
    assert checkpoint.load(root, state, refused=lambda folder, reason: pytest.fail(reason))
    set_rng_state(state["rng"])


def save(root: Path, step: int, model: Net, optimizer: torch.optim.AdamW) -> None:
    checkpoint.save(root, step, {**state_of(model, optimizer), "rng": rng_state()}, {})


@pytest.mark.parametrize("saved_at", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_loaded_state_continues_bitwise(tmp_path: Path, saved_at: int, options: dict[str, Any]) -> None:
    """Dropout draws from the restored generator, moments and step counts go on."""
    straight = build(1, **options)
    expected = train(*straight, 0, saved_at + 5)

    first = build(1, **options)
    losses = train(*first, 0, saved_at)
    save(tmp_path, saved_at, *first)
    at_save = everything(*first)

    second = build(2, **options)  # other weights, a fresh optimizer
    torch.randn(10)
    resume(tmp_path, *second)
    assert_equal(everything(*second), at_save)
    assert losses + train(*second, saved_at, 5) == expected
    assert_equal(everything(*second), everything(*straight))
    assert second[0].head.weight is second[0].embed.weight


@pytest.mark.parametrize("steps", [0, 3])
def test_saving_does_not_change_state(tmp_path: Path, steps: int) -> None:
    """Neither weights, gradients, generators nor step counts; PyTorch alone would leave a fresh optimizer at step 1."""
    plain = build(1)
    train(*plain, 0, steps)
    saved = copy.deepcopy(plain)
    saved[0](torch.arange(4)).sum().backward()
    gradients = [copy.deepcopy(p.grad) for p in saved[0].parameters()]
    generators = rng_state()
    save(tmp_path, steps, *saved)
    for before, now in zip(gradients, [p.grad for p in saved[0].parameters()], strict=True):
        assert before is not None and now is not None and torch.equal(before, now)
    assert all(value.equal(rng_state()[name]) for name, value in generators.items() if "gauss" not in name)
    saved[1].zero_grad()
    after = train(*saved, steps, 5)
    set_rng_state(generators)
    assert after == train(*plain, steps, 5)
    assert_equal(everything(*saved), everything(*plain))


def test_state_is_keyed_by_name(tmp_path: Path) -> None:
    model, optimizer = build(1)
    train(model, optimizer, 0, 3)
    save(tmp_path, 3, model, optimizer)
    other = Net()
    reordered = torch.optim.AdamW(list(other.parameters())[::-1], lr=1.0)  # one group, backwards
    resume(tmp_path, other, reordered)
    assert_equal(everything(other, reordered), everything(model, optimizer))
    group = reordered.param_groups[0]
    assert (group["lr"], group["betas"]) == (1.0, (0.9, 0.999))  # what a group is set to belongs to the spec


@pytest.mark.parametrize("odd", [False, True])  # with and without a second Gaussian waiting
def test_rng_state_round_trip(tmp_path: Path, odd: bool) -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]

    if odd:
        draw()
    checkpoint.save(tmp_path, 1, {"rng": rng_state()}, {})
    expected = [draw(), draw()]
    state: dict[str, Any] = {"rng": None}
    checkpoint.load(tmp_path, state, refused=lambda folder, reason: pytest.fail(reason))
    set_rng_state(state["rng"])
    assert [draw(), draw()] == expected


@pytest.mark.gpu
def test_cuda_rng_state_round_trip(tmp_path: Path) -> None:
    torch.rand(3, device="cuda")
    checkpoint.save(tmp_path, 1, {"rng": rng_state()}, {})
    expected = torch.rand(5, device="cuda")
    state: dict[str, Any] = {"rng": None}
    checkpoint.load(tmp_path, state, refused=lambda folder, reason: pytest.fail(reason))
    set_rng_state(state["rng"])
    assert torch.equal(torch.rand(5, device="cuda"), expected)
