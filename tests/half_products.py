"""Products of bf16 and fp16 tensors on a CPU without instructions for them: in fp32, rounded once.

They are multiplied number by number there, 200 times slower than fp32. There too sums are in fp32 and rounded at the
end; whoever counts tensors or operators sees the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, get_kernel

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = ("mm", "addmm", "bmm", "baddbmm", ATTENTION, f"{ATTENTION}_backward")
HALVES = {torch.bfloat16, torch.float16}
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
library = Library("aten", "IMPL")  # what it registers lasts as long as it does


def multiply_in_fp32() -> None:
    """In this process and those forked from it; nothing where the CPU multiplies bf16 itself."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    with warnings.catch_warnings(action="ignore"):  # that each replaces a kernel
        for name in OPERATORS:
            library.impl(name, in_fp32(get_kernel(f"aten::{name}", "CPU")), "CPU", allow_override=True)


def in_fp32(kernel: Any) -> Callable[..., Any]:
    def product(*given: Any, **options: Any) -> Any:
        if given[0].dtype is torch.float32:  # most are: nothing else is looked at
            return kernel.call_boxed(CPU, *given, **options)
        dtypes = {one.dtype for one in given[:3] if isinstance(one, torch.Tensor)}
        if len(dtypes) != 1 or not dtypes <= HALVES:
            return kernel.call_boxed(CPU, *given, **options)
        (dtype,) = dtypes

        def widen(one: Any) -> Any:
            return one.float() if isinstance(one, torch.Tensor) and one.dtype is dtype else one

        wide = kernel.call_boxed(CPU, *map(widen, given), **{name: widen(one) for name, one in options.items()})
        if isinstance(wide, torch.Tensor):
            return wide.to(dtype)
        # Attention has its log-sum-exp in fp32 beside its output; its gradients are all of the inputs' type.
        return tuple(one if len(wide) == 2 and place == 1 else one.to(dtype) for place, one in enumerate(wide))

    return product
