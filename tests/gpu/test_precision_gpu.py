"""Weights of 16 bits and products of 8 on a GPU: the update, the step, and what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.kernels.training.adamw import AdamWConfig, ParamState, adamw, join_master, split
from lmworks.plan.memory.sheet import memory
from tiny import curve, make_spec, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = ("precision.dtype=bf16", "precision.weights=bf16")
COMPILED = ("parallel.compile=true", "cluster.device=cuda")


def losses(run_dir: Path) -> torch.Tensor:
    return torch.tensor([step[1] for step in curve(run_dir)])


def test_split_master_equals_fused_adamw_fp32() -> None:
    """8 million weights, 20 steps; the kernel without its reference."""
    draw = torch.Generator("cuda").manual_seed(0)
    start = torch.randn(2**23, generator=draw, device="cuda") / 50
    plain = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([plain], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    weight, low = split(start)
    mean, square, step = torch.zeros_like(start), torch.zeros_like(start), torch.zeros((), device="cuda")
    for _ in range(20):
        gradient = torch.randn(2**23, generator=draw, device="cuda").bfloat16()
        plain.grad = gradient.float()
        theirs.step()
        step += 1
        adamw([ParamState(weight, gradient, step, 1, mean, square, low)], AdamWConfig(1e-3, 0.1))
    torch.testing.assert_close(join_master(weight, low), plain.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_bf16_weights_train_like_fp32(states: str, dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "precision.dtype=bf16", *COMPILED), tmp_path / "fp32")
    train(make_spec(dataset, *BF16, f"precision.states={states}", *COMPILED), tmp_path / "bf16")
    torch.testing.assert_close(losses(tmp_path / "bf16"), losses(tmp_path / "fp32"), rtol=0.01, atol=0)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_fp8_trains_like_bf16(scaling: str, dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products would be emulated")
    train(make_spec(dataset, *BF16, *COMPILED), tmp_path / "bf16")
    fp8 = ("precision.dtype=fp8", f"precision.fp8_scaling={scaling}", "precision.fp8_head=true")
    train(make_spec(dataset, *BF16, *COMPILED, *fp8), tmp_path / "fp8")
    torch.testing.assert_close(losses(tmp_path / "fp8"), losses(tmp_path / "bf16"), rtol=0.03, atol=0)


def test_bf16_weight_memory_equals_plan(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *BF16, "model.hidden=512", "model.heads=8", "model.layers=8", "cluster.device=cuda")
    trainer = train(spec, tmp_path / "run")
    assert trainer.memory.read() == pytest.approx(memory(spec, "cuda").total, rel=0.05)
