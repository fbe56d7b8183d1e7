"""Kernels of a mixture of experts against the model's own layer and plain loops.

They run where there is a GPU, or under Triton's interpreter: TRITON_INTERPRET=1, with triton on the path. The
interpreter multiplies bf16 tiles wrongly, so there they run in fp16.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.engine.quantization.quantized_model import get_scheme, quantize_experts
from lmworks.model.moe import MoE
from lmworks.spec import ModelSpec

GPU = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")

if GPU or INTERPRETED:
    from lmworks.kernels.inference import experts_triton
    from lmworks.kernels.inference.experts_triton import ExpertWeights, Routing

ROUTERS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "mixtral": {"experts": 8, "top_k": 2},
    "un-normalised, one choice": {"norm_topk": False, "top_k": 1},
    "odd number of experts": {"experts": 13, "top_k": 3},
    "deepseek-v2": {"norm_topk": False, "routed_scale": 16.0, "expert_groups": 4, "top_groups": 2},
    "deepseek-v3": {
        "router": "sigmoid", "routed_scale": 2.5, "expert_groups": 4, "top_groups": 2, "balance_bias": 0.001
    },
    "three groups": {"experts": 12, "expert_groups": 3, "top_groups": 2, "top_k": 2},
}  # fmt: skip


def layer(hidden: int = 64, ffn: int = 32, **traits: Any) -> MoE:
    traits = {"experts": 16, "top_k": 4, **traits}
    spec = ModelSpec(
        vocab=64, layers=1, hidden=hidden, heads=4, kv_heads=2, ffn=0, context=64, expert_ffn=ffn, **traits
    )
    moe = MoE(spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
        if moe.choice_bias is not None:
            moe.choice_bias.normal_(generator=generator).mul_(0.1)
    return moe.to(DEVICE).requires_grad_(False)


def tokens(count: int, hidden: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def routing_of(moe: MoE) -> Routing:
    return Routing(
        moe.top_k, moe.scores == "sigmoid", moe.norm_topk, moe.routed_scale, moe.expert_groups, moe.top_groups
    )


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm().cpu())


def run(moe: MoE, x: Tensor, dtype: torch.dtype, logits: Tensor | None = None, **options: Any) -> Tensor:
    if logits is None:
        logits = moe.router(x)
    weights = ExpertWeights(*(one.to(dtype) for one in (moe.gate, moe.up, moe.down)))
    return experts_triton.experts(x.to(dtype), logits, weights, routing_of(moe), moe.choice_bias, **options)


@pytest.mark.parametrize("router", ROUTERS)
def test_route_equals_the_layer(router: str) -> None:
    moe = layer(**ROUTERS[router])
    x = tokens(33)
    _, wanted_ids, wanted = moe.route(x)
    ids, weights = experts_triton.route(moe.router(x), routing_of(moe), moe.choice_bias)
    order, wanted_order = ids.argsort(), wanted_ids.argsort()
    assert torch.equal(ids.gather(1, order).long(), wanted_ids.gather(1, wanted_order))
    torch.testing.assert_close(weights.gather(1, order), wanted.gather(1, wanted_order), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "pairs, experts, of_block", [(1, 16, 8), (7, 3, 16), (129, 13, 8), (600, 128, 16), pytest.param(9000, 60, 64)]
)
def test_pairs_are_sorted_by_expert_and_blocks_cover_them_once(pairs: int, experts: int, of_block: int) -> None:
    ids = torch.randint(0, experts, (pairs, 1), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    ids[ids == experts // 2] = 0  # one that nobody chose
    blocks = experts_triton.group(ids.to(DEVICE), experts, of_block)
    flat = ids.flatten().long()
    assert torch.equal(blocks.order[:pairs].cpu().long(), flat.argsort(stable=True))
    starts = blocks.starts.cpu().tolist()
    # A kernel is compiled again where a pointer is not aligned to 16 bytes: it would be met first by a request.
    assert not any(part.data_ptr() % 16 for part in (blocks.order, blocks.starts, blocks.expert, blocks.row))
    counts = flat.bincount(minlength=experts).tolist()
    assert starts[1 : experts + 1] == [sum(counts[:e]) for e in range(experts)]
    assert starts[1 + experts_triton.power_of_two(experts)] == pairs
    wanted = [(e, starts[1 + e] + i) for e in range(experts) for i in range(0, counts[e], of_block)]
    assert starts[0] == len(wanted) <= blocks.most
    table = zip(blocks.expert[: len(wanted)].tolist(), blocks.row[: len(wanted)].tolist(), strict=True)
    assert list(table) == wanted


@pytest.mark.parametrize("count", [1, 5, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_experts_equal_the_layer(count: int, dtype: torch.dtype) -> None:
    moe, x = layer(), tokens(count)
    wanted = moe.double()(x.double().unsqueeze(0)).squeeze(0)
    moe = moe.float()
    assert off(run(moe, x, dtype), wanted) < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def test_every_token_to_one_expert() -> None:
    """The most blocks of one expert, and the fewest experts."""
    moe, x = layer(top_k=1, norm_topk=False, experts=4), tokens(50)
    logits = torch.full((50, 4), -20.0, device=DEVICE)
    logits[:, 2] = 20.0
    inner = F.silu(x @ moe.gate[2].t()) * (x @ moe.up[2].t())
    assert off(run(moe, x, torch.float32, logits), inner @ moe.down[2].t()) < 2e-6


@pytest.mark.parametrize("count", [3, 20])
def test_widths_that_are_no_multiple_of_a_tile(count: int) -> None:
    moe, x = layer(hidden=72, ffn=40), tokens(count, 72)
    assert off(run(moe, x, torch.float32), moe(x.unsqueeze(0)).squeeze(0)) < 2e-6


@pytest.mark.parametrize("count", [2, 20])
def test_the_shared_experts_result_is_added(count: int) -> None:
    moe, x = layer(), tokens(count)
    shared = tokens(count, seed=5)
    assert off(run(moe, x, torch.float32, shared=shared), moe(x.unsqueeze(0)).squeeze(0) + shared) < 2e-6


def test_a_batch_invariant_row_has_the_same_bits_in_any_batch() -> None:
    moe, x = layer(), tokens(70)
    logits = moe.router(x)
    whole = run(moe, x, HALF, logits, invariant=True)
    for first, last in ((0, 1), (1, 9), (30, 70)):
        assert torch.equal(run(moe, x[first:last], HALF, logits[first:last], invariant=True), whole[first:last])


def quantized_error(name: str, count: int, invariant: bool) -> float:
    """Against the layer whose experts were rounded, which dequantizes in fp32; widths are whole words of 16 bytes."""
    moe, x = layer(hidden=128, ffn=64), tokens(count, 128)
    logits = moe.router(x)
    quantize_experts(get_scheme(name), moe)
    wanted = moe(x.unsqueeze(0)).squeeze(0)
    parts: list[Any] = [moe.gate, moe.up, moe.down]
    weights, scales = [part.weight for part in parts], [part.scale for part in parts]
    packed = ExpertWeights(*weights, torch.cat(scales[:2], dim=1), scales[2])
    found = experts_triton.experts(x.to(HALF), logits, packed, routing_of(moe), invariant=invariant)
    return off(found, wanted)


@pytest.mark.parametrize("count, invariant", [(3, False), (20, False), (20, True)])
def test_int8_experts_equal_the_rounded_layer(count: int, invariant: bool) -> None:
    assert quantized_error("int8", count, invariant) < 0.01


@pytest.mark.skipif(not GPU, reason="the interpreter rounds to fp8 wrongly")
@pytest.mark.parametrize("count, invariant", [(3, False), (20, False), (300, False), (20, True)])
def test_fp8_experts_equal_the_rounded_layer(count: int, invariant: bool) -> None:
    """A row's largest value differs in the last bit of bf16, and moves some values by a step of e4m3."""
    assert quantized_error("fp8", count, invariant) < 0.05
