"""silu(gate) · up in one pass over memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from torch import Tensor

from .triton_support import power_of_two, tl, triton


def launch(gate_up: Tensor) -> Tensor:
    """As `swiglu.reference`."""
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, ffn))
    block = min(1024, power_of_two(ffn))
    swiglu_kernel[(tokens, triton.cdiv(ffn, block))](
        gate_up, out, gate_up.stride(0), ffn, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, row_stride, ffn, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    gate = tl.load(x_ptr + token * row_stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + token * row_stride + ffn + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = wide / (1 + tl.exp(-wide))
    # Rounded before the product, as where the two are separate operations.
    out = silu.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * ffn + column, out, mask=inside)
