"""Σ x² in one launch: addresses and sizes are a table, a program adds up a span of one tensor.

Spans depend on sizes alone, and their list stays on the device; addresses change from step to step and are sent along.
Each program leaves one number, and one more launch adds these up: the order never changes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..triton_support import tl, triton
from .adamw_triton import on_device

# On an H200 gradients of 8B in bf16 take 3.51 ms, and as long with any span of 2**15 to 2**19 and blocks up to 8192.
SPAN = 2**17  # elements of a program: Llama 3 8B has 61,000 of them
BLOCK, WARPS = 8192, 8  # elements at once: four loads of 16 bytes of each thread, where there are 2 bytes each


def launch(tensors: Sequence[Tensor]) -> Tensor:
    """As `squares.reference`."""
    groups: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in tensors:
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        groups.setdefault((whole.dtype, whole.data_ptr() % 16 == 0), []).append(whole)
    return torch.cat([partial_sums(group, aligned) for (_, aligned), group in groups.items()]).sum()


def partial_sums(tensors: list[Tensor], aligned: bool) -> Tensor:
    """Of each span. `aligned`: all addresses divide by 16, and loads are that wide."""
    device = tensors[0].device
    places = places_of(tuple(tensor.numel() for tensor in tensors), SPAN, device)
    sums = torch.empty(len(places), dtype=torch.float32, device=device)
    if len(places):
        table = on_device([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], device)
        squares_kernel[(len(places),)](
            table, places, tensors[0], sums, ALIGNED=aligned, SPAN=SPAN, BLOCK=BLOCK, num_warps=WARPS
        )
    return sums


@functools.lru_cache(maxsize=8)
def places_of(sizes: tuple[int, ...], span: int, device: torch.device) -> Tensor:
    """(spans, 2): the tensor of each, and which of its spans it is."""
    counts = torch.tensor([-(-size // span) for size in sizes])
    which = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    before = counts.cumsum(0) - counts
    return torch.stack([which, torch.arange(len(which)) - before[which]], dim=1).to(device)


@triton.jit
def squares_kernel(
    table,  # (tensors, 2) int64: address, elements
    places, like, sums,
    ALIGNED: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    entry = table + 2 * tl.load(places + 2 * place)
    start = tl.load(places + 2 * place + 1) * SPAN
    x = tl.load(entry).to(like.dtype)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    x += start
    count = tl.minimum(tl.load(entry + 1) - start, SPAN)
    whole = count // BLOCK * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, whole, BLOCK):  # without a mask, whose end is known too late for wide loads
        here = tl.load(x + first + tl.arange(0, BLOCK)).to(tl.float32)
        total += here * here
    if whole < count:
        at = whole + tl.arange(0, BLOCK)
        here = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        total += here * here
    tl.store(sums + place, tl.sum(total, 0))
