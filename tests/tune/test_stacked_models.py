"""Stacked models of the tuning table: each is the network of `lmworks train`, updated as torch's AdamW does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.model.gpt import GPT
from lmworks.spec import ModelSpec

NAMES = {
    "attn_norm": "attention_norm",
    **{name: f"attention.{name}" for name in ("q", "k", "v", "out")},
    "mlp_norm": "mlp_norm",
    **{name: f"mlp.{name}" for name in ("gate", "up", "down")},
}


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import stacked_models

    return stacked_models


def own_name(name: str) -> str:
    layer, dot, rest = name.partition(".")
    return f"blocks.{layer}.{NAMES[rest]}.weight" if dot else f"{name}.weight"


def single(stacked: Any, weights: dict[str, torch.Tensor], model: int, shape: Any) -> GPT:
    spec = ModelSpec(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.heads,
        ffn=shape.mlp,
        vocab=shape.vocab,
        context=64,
    )
    gpt = GPT(spec)
    gpt.load_state_dict({own_name(name): weight[model].detach().clone() for name, weight in weights.items()})
    return gpt


def test_three_steps_of_each_model_are_those_of_one_alone(stacked: Any) -> None:
    """Losses against our network, weights after three clipped steps against torch's AdamW with the same figures."""
    shape = stacked.Shape(2, 32, 2, 48)
    weights = stacked.initial_weights(shape, [1, 2, 3], torch.device("cpu"))
    singles = [single(stacked, weights, model, shape) for model in range(3)]
    update = stacked.Update(
        torch.tensor([1e-2, 3e-3, 1e-3]),
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([0.1, 1.0, 0.0]),
        torch.tensor([0.9, 0.95, 0.999]),
    )
    optimizer = stacked.StackedAdamW(weights, update)
    theirs = [adamw(gpt, update, model) for model, gpt in enumerate(singles)]
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2, 3):
        tokens = torch.randint(0, 256, (3, 2, 17), generator=generator)
        losses = stacked.losses(weights, tokens, shape)
        losses.sum().backward()
        optimizer.step(step, 3)
        for model, gpt in enumerate(singles):
            _, loss = gpt(tokens[model, :, :-1], tokens[model, :, 1:])
            assert losses[model].item() == pytest.approx(loss.item(), rel=1e-5)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), update.clip)
            for group in theirs[model].param_groups:
                group["lr"] = float(update.rate(step, 3)[model])
            theirs[model].step()
            theirs[model].zero_grad()
    for model, gpt in enumerate(singles):
        own = dict(gpt.named_parameters())
        for name, weight in weights.items():
            assert torch.allclose(weight[model], own[own_name(name)], atol=2e-5), name


def adamw(gpt: GPT, update: Any, model: int) -> torch.optim.AdamW:
    """Decay on matrices only."""
    decay = float(update.weight_decay[model])
    groups = [
        {"params": [p for p in gpt.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in gpt.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(update.beta1, float(update.beta2[model])), eps=update.eps)


def test_the_rate_rises_and_falls(stacked: Any) -> None:
    update = stacked.Update(*(torch.tensor([value]) for value in (1.0, 0.2, 0.0, 0.9)))
    rates = [float(update.rate(step, 100)) for step in (1, 10, 20, 60, 100)]
    assert rates == pytest.approx([0.05, 0.5, 1.0, 0.55, 0.1], abs=1e-6)


def test_a_data_order_depends_on_its_seed_alone(stacked: Any) -> None:
    both = stacked.windows(torch.tensor([3, 4]), 7, 5, 1000)
    assert torch.equal(both[1], stacked.windows(torch.tensor([4]), 7, 5, 1000)[0])
    many = stacked.windows(torch.arange(200), 1, 50, 1000).flatten()
    assert many.min() >= 0
    assert many.max() < 1000
    assert len(many.unique()) > 990  # of 10,000 draws: 1,000 · (1 − e^−10)
