"""8-bit elements of a KV cache, unpacked in pairs to fp16 for tensor cores.

Tensor cores need 16-bit operands in a layout that the hardware can load from shared memory, transposed or not; bytes it
cannot transpose, and a compiler then loads a transposed tile byte by byte. So a row of bytes is loaded as 16-bit words,
each a pair of neighbours, and a tile of words is unpacked to two tiles in registers: the even columns and the odd ones.
A product over columns is the sum of two products, and a product that keeps columns gives two halves, interleaved at the
end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from ..triton_support import tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# PTX: two words → (low byte of each), (high byte of each) as two fp16 in a register.
FP8_PTX = tl.constexpr("""{
.reg .b32 both;
.reg .b16 low, high;
prmt.b32 both, $2, 0, 0x3120;
mov.b32 {low, high}, both;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# 0x6400 | u are the bits of 1024 + u; u = byte + 128.
INT8_PTX = tl.constexpr("""{
.reg .b32 both, less;
mov.b32 less, 0xe480e480;
xor.b32 both, $2, 0x80808080;
prmt.b32 $0, both, 0x64646464, 0x4240;
prmt.b32 $1, both, 0x64646464, 0x4341;
add.rn.f16x2 $0, $0, less;
add.rn.f16x2 $1, $1, less;
}""")


@triton.jit
def deinterleave(x):
    """(rows, columns) → two of (rows, columns / 2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def interleave(even, odd):
    """The inverse of `deinterleave`."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def as_int16_pointer(ptr):
    return ptr.to(tl.pointer_type(tl.int16))


@triton.jit
def unpack_8bit(words, INTEGER: tl.constexpr):
    """The low bytes of 16-bit words, and the high ones, as fp16."""
    if INTERPRETED:
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        if not INTEGER:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            INT8_PTX if INTEGER else FP8_PTX,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high
