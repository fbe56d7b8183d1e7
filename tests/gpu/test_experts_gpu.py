"""Experts on a GPU: grouped products against one expert after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.model.moe import MoE, each_expert, grouped_experts, supports_grouped_mm
from lmworks.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "even": [32] * 8,
    "odd": [1, 250, 3, 0, 17, 129, 64, 5],
    "one expert has all": [0, 0, 300, 0, 0, 0, 0, 0],
    "nobody has any": [0] * 8,
}


def layer(**traits: Any) -> MoE:
    shape = {"vocab": 64, "layers": 1, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 0, "context": 64}
    moe = MoE(ModelSpec(**shape, expert_ffn=128, experts=8, top_k=2, **traits))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    return moe.cuda()


def gradients(result: Tensor, weight: Tensor, moe: MoE, rows: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((result * weight).sum(), [rows, moe.gate, moe.up, moe.down]))


@pytest.mark.parametrize("capacity", [0.0, 1.0], ids=["dropless", "rows behind all runs"])
@pytest.mark.parametrize("name", SIZES)
def test_grouped_products_equal_one_expert_after_the_other(name: str, capacity: float) -> None:
    sizes, moe = SIZES[name], layer(capacity=capacity)
    count, behind = sum(sizes), 40 if capacity else 0
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count + behind, 256, generator=generator).cuda().bfloat16()
    weight = torch.randn(count + behind, 256, generator=generator).cuda()
    if not len(rows):
        assert not supports_grouped_mm(moe, rows)
        return
    assert supports_grouped_mm(moe, rows)
    rows.requires_grad_()
    exact = rows.detach().double().requires_grad_()
    wanted = each_expert(moe.double(), exact, sizes)
    expected = gradients(wanted, weight[:count].double(), moe, exact)
    moe = moe.float()
    found = grouped_experts(moe, rows, torch.tensor(sizes, device="cuda"))
    ours = gradients(found, weight, moe, rows)
    assert not found[count:].any()
    assert not ours[0][count:].any()
    for mine, theirs in zip([found[:count], *ours], [wanted, *expected], strict=True):
        assert (mine.double() - theirs).norm() <= 0.01 * theirs.norm()


def test_layer_in_bf16_equals_the_layer_in_fp32() -> None:
    """The whole layer, router and permutations included, with a shared expert's place left empty."""
    moe = layer()
    x = torch.randn(3, 50, 256, generator=torch.Generator().manual_seed(2)).cuda().requires_grad_()
    found = {}
    for kind, enabled in (("fp32", False), ("bf16", True)):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            logits = x.detach() @ moe.router.weight.t()
            result = moe(x)
        moe.expert_counts = None
        found[kind] = [result, *torch.autograd.grad(result.float().square().sum(), [x, moe.gate, moe.down])]
    sure = logits.topk(3).values  # tokens whose second and third expert are not interchangeable
    kept = (sure[..., 1] - sure[..., 2]) > 0.05
    assert kept.float().mean() > 0.8
    assert (found["bf16"][0] - found["fp32"][0])[kept].norm() < 0.01 * found["fp32"][0][kept].norm()
