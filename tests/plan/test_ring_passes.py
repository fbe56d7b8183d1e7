"""What our ring attention does beside its tiles, as the planner prices it and as PyTorch runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmworks.model.attention import Pattern
from lmworks.parallel.ring_attention import Ring
from lmworks.plan import eager
from lmworks.plan.case import Case
from lmworks.plan.ops import Workload
from lmworks.plan.software import COMPILED, SOFTWARE, Software, with_precision
from lmworks.plan.step.price import price
from lmworks.spec import ModelSpec, PrecisionSpec, catalogue, components

HEADS, WIDTH, LOCAL = 4, 64, 256  # of a rank
OURS = with_precision(COMPILED, PrecisionSpec.from_dict({"dtype": "bf16", "weights": "bf16"}))
WRITES = ("zeros", "new_zeros", "zeros_like", "full")


class LoneRing(Ring):
    """The second of `ranks`, whose neighbours send nothing."""

    ranks = 2
    cp = property(lambda self: self.ranks)  # type: ignore[assignment]
    rank = property(lambda self: 1)  # type: ignore[assignment]

    def send_recv(self, block: Tensor, tag: int) -> tuple[Tensor, list[Any]]:
        return torch.empty_like(block), []


class Passes(TorchDispatchMode):
    """Bytes read and written, and kernels; without attention itself, and copies of a tensor onto itself.

    What is read of an expanded tensor is counted as if it were whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if func.is_view or "attention" in name or "empty" in name or name == "detach":
            return result
        if name == "copy_" and args[0].data_ptr() == args[1].data_ptr():
            return result
        read = () if name in WRITES else tree_leaves((args, kwargs))
        self.bytes += sum(x.nbytes for x in (*read, *tree_leaves(result)) if isinstance(x, Tensor))
        self.launches += 1
        return result


def planned(kv_heads: int, cp: int, software: Software = OURS) -> list[list[tuple[float, float]]]:
    """(bytes, launches) of the passes, forward and backward."""
    shape = {"layers": 2, "hidden": HEADS * WIDTH, "heads": HEADS, "kv_heads": kv_heads, "context": LOCAL * cp}
    model = ModelSpec.from_dict(shape)
    case = Case(model, catalogue()["H100-SXM-80GB"], software, LOCAL * cp, cp=cp)
    found = eager.ring_passes(components.attention_core(model), Workload.of_case(case))
    return [[(float(one.bytes * one.count), float(one.count)) for one in way] for way in found]


@pytest.mark.parametrize(("kv_heads", "cp"), [(4, 2), (2, 2), (2, 4)])
def test_passes_are_those_of_the_ring(kv_heads: int, cp: int) -> None:
    q, k, v = (torch.randn(1, LOCAL, heads, WIDTH, dtype=torch.bfloat16) for heads in (HEADS, kv_heads, kv_heads))
    for x in (q, k, v):
        x.requires_grad_()
    ring = LoneRing(None, Pattern(), LOCAL * cp)  # type: ignore[arg-type]
    ring.ranks = cp
    with Passes() as there:
        out = ring(q, k, v, 0)
    gradient = torch.randn_like(out)
    with Passes() as back:
        torch.autograd.grad(out, (q, k, v), gradient)
    (forward,), (backward,) = planned(kv_heads, cp)
    tiles, grouped = 2 * cp + 1, kv_heads < HEADS
    # Inside the custom op: keys and values of a tile for every head; after the ring: heads last again.
    hidden = tiles * grouped * (k.nbytes + v.nbytes + 2 * q.nbytes) / 2 + 2 * q.nbytes
    assert forward[0] - hidden == pytest.approx(there.bytes, rel=0.04)  # more is the log-sum-exp
    assert forward[1] - 2 * tiles * grouped == there.launches
    assert backward[0] == pytest.approx(back.bytes, rel=0.04)
    assert backward[1] == back.launches


def test_only_our_ring_has_them() -> None:
    assert planned(2, 1) == [[], []]
    assert planned(2, 2, SOFTWARE["torchtitan-compile"]) == [[], []]


def test_a_ring_takes_longer_than_one_rank_with_as_many_tokens() -> None:
    """405B on eight tensor-parallel ranks, one sequence of 8,192 or half of two."""
    model = ModelSpec.from_preset("llama3-405b")
    gpu = catalogue()["H100-SXM-80GB"]
    case = Case(model, gpu, OURS, 8192, tp=8, sp=True, accumulation=16)
    alone, ring = price(case), price(case.replace(cp=2, micro_batch=2))
    more = float(ring.parts["attention"] / alone.parts["attention"])
    assert 1.3 < more < 3.0
    arrays = price(case.replace(cp=np.array([1, 2])))
    assert float(arrays.parts["attention"][0]) == pytest.approx(float(alone.parts["attention"]))
