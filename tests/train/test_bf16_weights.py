"""Weights of 16 bits train as those of 32 do, are saved with all their bits, and resume to the last of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lmworks.kernels.training.adamw import join_master
from lmworks.model.gpt import initial_weight
from lmworks.parallel.data_parallel import Shard
from lmworks.parallel.single_rank import SingleRank
from lmworks.spec import ModelSpec, OptimSpec, PrecisionSpec, SpecError
from lmworks.train import Trainer
from lmworks.train.export import export
from lmworks.train.optim import make_optimizer
from tiny import Crash, before_step, built, crash, curve, differences, make_spec, resume, saved, train

BF16 = ("precision.dtype=bf16", "precision.weights=bf16")
STOCHASTIC = (*BF16, "precision.master=false", "precision.rounding=stochastic", "precision.states=bf16")
OPTIM = OptimSpec(lr=1e-2, weight_decay=0.1, warmup=0)


def stepped(weight: Tensor, precision: PrecisionSpec, steps: int, optim: OptimSpec = OPTIM) -> tuple[Shard, Any]:
    """A weight after some steps on gradients that follow from the step alone."""
    weight = torch.nn.Parameter(weight.clone())
    shards = [Shard("w", weight, weight.shape, None)]
    optimizer = make_optimizer(shards, ModelSpec(), optim, precision)
    for step in range(steps):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return shards[0], optimizer


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_split_master_equals_torch_adamw_fp32(kind: str) -> None:
    """PyTorch's optimizers in fp32 over the same gradients: within 4e-7 after 50 steps of AdamW.

    SGD decays by another formula, p − lr · (g + decay · p): there it is a unit in the last place a step.
    """
    start = torch.randn(37, 21, generator=torch.Generator().manual_seed(0)).bfloat16()
    optim = OPTIM.replace(optimizer=kind)
    shard, optimizer = stepped(start, PrecisionSpec(dtype="bf16", weights="bf16"), 50, optim)
    plain, _ = stepped(start.float(), PrecisionSpec(), 50, optim)
    master = join_master(shard.leaf.detach(), optimizer.state[shard.leaf]["low"])
    assert (master - start.float()).abs().mean() > 0.05
    torch.testing.assert_close(master, plain.leaf.detach(), rtol={"adamw": 4e-7, "sgd": 3e-6}[kind], atol=1e-7)
    off = (shard.leaf.detach().float() - plain.leaf.detach()).abs() / plain.leaf.detach().abs()
    assert off.max() < 2**-8 + 1e-6  # what the forward pass sees is the nearest bf16 of it


def test_nearest_rounding_loses_small_updates() -> None:
    """A weight of 1 and 400 updates of −1e-4: a bf16 of 1 has its lower neighbour 4e-3 away."""
    optim = OPTIM.replace(optimizer="sgd", lr=1e-4, weight_decay=0.0)
    found = {}
    for name, fields in {
        "nearest": {"master": False},
        "stochastic": {"master": False, "rounding": "stochastic"},
    }.items():
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = make_optimizer(
            [Shard("w", weight, weight.shape, None)],
            ModelSpec(),
            optim,
            PrecisionSpec(dtype="bf16", weights="bf16", **fields),
        )
        for _ in range(400):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found[name] = weight.detach().float().mean().item()
    assert found["nearest"] == 1.0
    assert found["stochastic"] == pytest.approx(0.96, abs=2e-3)


def test_bf16_second_moments_decay_like_fp32() -> None:
    """With β2 = 0.999 rounding to the nearest would keep them where they were."""
    optim = OPTIM.replace(beta2=0.999)
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = make_optimizer(
        [Shard("w", weight, weight.shape, None)], ModelSpec(), optim, PrecisionSpec(states="bf16")
    )
    for step in range(201):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    square = optimizer.state[weight]["exp_avg_sq"].float().mean().item()
    assert square == pytest.approx(0.001 * 0.999**200, rel=5e-3)


def test_gradients_are_scaled_and_overflows_skipped() -> None:
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    precision = PrecisionSpec(dtype="bf16", weights="bf16")
    optimizer: Any = make_optimizer([Shard("w", weight, weight.shape, None)], ModelSpec(), OPTIM, precision)
    state = optimizer.state[weight]
    weight.grad = torch.full_like(weight, 6.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones_like(weight)) and state["step"] == 0 and not state["exp_avg"].any()
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert state["step"] == 1
    torch.testing.assert_close(state["exp_avg"], torch.full((8,), 0.2))


def test_a_state_dict_keeps_its_formats() -> None:
    """PyTorch's own loader casts every state to the format of its weight, the low bits too."""
    precision = PrecisionSpec(dtype="bf16", weights="bf16", states="bf16")
    shard, optimizer = stepped(torch.randn(5, 4).bfloat16(), precision, 3)
    other = make_optimizer([Shard("w", shard.leaf, shard.leaf.shape, None)], ModelSpec(), OPTIM, precision)
    other.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[shard.leaf].items():
        assert other.state[shard.leaf][key].dtype == value.dtype and torch.equal(other.state[shard.leaf][key], value)


# --- in a run -------------------------------------------------------------------------------------------


def test_master_starts_from_initial_weight(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *BF16)
    trainer = built(spec, tmp_path / "run")
    for shard in trainer.parallel_model.shards:
        drawn = initial_weight(spec.model, spec.seed, shard.name, shard.shape)
        assert shard.leaf.dtype == torch.bfloat16
        assert torch.equal(join_master(shard.leaf.detach(), trainer.optimizer.state[shard.leaf]["low"]), drawn)
    assert SingleRank(trainer.model).shards()[0].low is None  # taken by the optimizer, not held twice


@pytest.mark.parametrize(
    "change", [pytest.param(BF16, marks=pytest.mark.slow), STOCHASTIC], ids=["master", "stochastic"]
)
def test_resume_is_bitwise_equal(change: tuple[str, ...], dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "optim.steps=6", "checkpoint.every=2", *change)
    train(spec, tmp_path / "whole")
    broken = Trainer(spec, tmp_path / "broken", quiet=True)
    before_step(broken, 4, crash)
    with pytest.raises(Crash):
        broken.run()
    resume(tmp_path / "broken")
    assert curve(tmp_path / "whole") == curve(tmp_path / "broken")
    assert differences(saved(tmp_path / "whole"), saved(tmp_path / "broken")) == []
    assert any(name.endswith(".low") for name in saved(tmp_path / "whole")) == (change is BF16)


def test_changed_formats_are_rejected_on_resume(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "optim.steps=2"), tmp_path / "run")
    spec_file = tmp_path / "run" / "spec.toml"
    text = spec_file.read_text()
    assert 'weights = "fp32"' in text
    changed = text.replace('weights = "fp32"', 'weights = "bf16"').replace('dtype = "fp32"', 'dtype = "bf16"')
    spec_file.write_text(changed.replace("steps = 2", "steps = 4"))
    with pytest.raises(SpecError, match=r'precision.weights = "bf16", was "fp32" in step 2: .* checkpoint.init'):
        resume(tmp_path / "run")
    spec_file.write_text(text)
    trainer = built(make_spec(dataset, *BF16, f"checkpoint.init={tmp_path / 'run'}"), tmp_path / "next")
    trainer.load()
    for shard in trainer.parallel_model.shards:
        before = saved(tmp_path / "run")[f"model.{shard.name}"]
        assert torch.equal(shard.leaf.detach(), before.bfloat16())
        assert not trainer.optimizer.state[shard.leaf]["low"].any()


def test_export_writes_bf16_weights(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "optim.steps=2", *BF16), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


@pytest.mark.slow
def test_200_steps_are_within_the_noise_of_two_seeds(dataset: Path, tmp_path: Path) -> None:
    """Mean loss of the last 50 steps, beside fp32 weights under autocast: fp8 within half a hundredth of it."""
    pytest.importorskip("torchao")
    size = ("model.hidden=64", "model.layers=2", "optim.steps=200", "optim.lr=3e-3", "precision.dtype=bf16")

    def last(name: str, *changes: str) -> float:
        train(make_spec(dataset, *size, *changes), tmp_path / name)
        return sum(step[1] for step in curve(tmp_path / name)[-50:]) / 50

    reference = last("fp32")
    noise = abs(last("seed", "seed=1") - reference)
    assert noise > 1e-3
    for name, changes in {"master": BF16, "stochastic": STOCHASTIC, "states": (*BF16, "precision.states=bf16")}.items():
        assert abs(last(name, *changes) - reference) < noise, name
    for scaling in ("tensorwise", "rowwise"):
        fp8 = (*BF16, "precision.dtype=fp8", f"precision.fp8_scaling={scaling}", "precision.fp8_head=true")
        assert last(scaling, *fp8) == pytest.approx(reference, rel=5e-3), scaling
