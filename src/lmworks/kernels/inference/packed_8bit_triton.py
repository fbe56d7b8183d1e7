"""8-bit numbers of a cache, two at a time: what tensor cores need is fp16, laid out as they take it.

Tensor cores are handed 16-bit numbers in a pattern that the hardware can fetch from shared memory, turned or not; of
bytes it cannot, and a compiler then fetches a turned tile byte by byte. So a row of bytes is read as one of 16-bit
words, each a pair of neighbours, and a tile of words is widened to two tiles of numbers where it will be multiplied:
of the even columns, and of the odd ones. A product over columns is the sum of two products, and a product that keeps
them gives two halves, to be laid between one another in the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from ..triton_support import tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# PTX: two words → (low byte of each), (high byte of each) as two fp16 in a register.
FLOATS = tl.constexpr("""{
.reg .b32 both;
.reg .b16 low, high;
prmt.b32 both, $2, 0, 0x3120;
mov.b32 {low, high}, both;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# 0x6400 | u are the bits of 1024 + u; u = byte + 128.
INTEGERS = tl.constexpr("""{
.reg .b32 both, less;
mov.b32 less, 0xe480e480;
xor.b32 both, $2, 0x80808080;
prmt.b32 $0, both, 0x64646464, 0x4240;
prmt.b32 $1, both, 0x64646464, 0x4341;
add.rn.f16x2 $0, $0, less;
add.rn.f16x2 $1, $1, less;
}""")


@triton.jit
def evens_and_odds(x):
    """(rows, columns) → two of (rows, columns / 2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def interleave(even, odd):
    """What `evens_and_odds` took apart."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def words_at(ptr):
    return ptr.to(tl.pointer_type(tl.int16))


@triton.jit
def widened(words, INTEGER: tl.constexpr):
    """The low byte of each 16-bit word, and the high one, as fp16."""
    if INTERPRETED:
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        if not INTEGER:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            INTEGERS if INTEGER else FLOATS,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high
