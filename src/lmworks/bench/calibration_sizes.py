"""The sizes that calibration measures: a few per kernel in seconds, or many in a minute or two.

Small sizes come first: when the time is over, the slow ones are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Sizes:
    matmuls: tuple[tuple[int, int, int], ...]  # (tokens, inputs, outputs) of linear layers
    attentions: tuple[tuple[int, int, int, int], ...]  # (batch, heads, seq, head_dim)
    elementwise: tuple[int, ...]  # elements of one fp32 tensor
    optimizer: tuple[int, ...]  # parameters
    messages: tuple[int, ...]  # bytes of a collective's whole buffer
    max_overrun: float = 2.0  # factor by which a stage may exceed its time before the remaining sizes are skipped


QUICK = {
    "cpu": Sizes(
        matmuls=(
            (512, 128, 128), (2048, 192, 192), (2048, 192, 512), (2048, 256, 1024), (512, 256, 4096),
            (1024, 1024, 1024),
        ),
        attentions=((8, 4, 128, 32), (4, 6, 256, 32), (2, 4, 512, 64)),
        elementwise=(2**16, 2**18, 2**20, 2**22),
        optimizer=(2**22,),
        messages=(4 * KIB, 128 * KIB, 4 * MIB),
        max_overrun=8.0,  # no size may be skipped
    ),
    "cuda": Sizes(
        matmuls=(
            (2048, 256, 1024), (8192, 768, 768), (8192, 768, 3072), (2048, 768, 32768), (8192, 2048, 8192),
            (16384, 4096, 4096),
        ),
        attentions=((64, 12, 256, 64), (16, 12, 1024, 64), (4, 32, 4096, 128)),
        elementwise=(2**18, 2**22, 2**24, 2**26),
        optimizer=(2**27,),
        messages=(32 * KIB, 2 * MIB, 128 * MIB),
        max_overrun=8.0,
    ),
}  # fmt: skip

FULL = {
    "cpu": Sizes(
        matmuls=(
            (128, 128, 128), (512, 128, 128), (256, 192, 512), (128, 512, 512), (2048, 192, 192), (1024, 256, 256),
            (4096, 128, 384), (2048, 192, 512), (1024, 512, 512), (512, 512, 1536), (2048, 256, 1024), (512, 256, 4096),
            (4096, 384, 384), (1024, 768, 768), (1024, 1024, 1024), (4096, 256, 1024), (512, 512, 8192),
            (2048, 512, 2048), (1024, 768, 3072), (2048, 1024, 4096),
        ),
        attentions=(
            (8, 4, 64, 32), (8, 4, 128, 32), (8, 4, 128, 64), (4, 6, 256, 32), (4, 4, 256, 64), (4, 2, 256, 128),
            (2, 4, 512, 32), (2, 4, 512, 64), (2, 2, 512, 128), (1, 4, 1024, 64), (1, 4, 2048, 64),
        ),
        elementwise=(2**14, 2**16, 2**18, 2**20, 2**22, 2**24),
        optimizer=(2**20, 2**22, 2**24),
        messages=(KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    ),
    "cuda": Sizes(
        matmuls=(
            (2048, 256, 1024), (1024, 1024, 1024), (4096, 768, 768), (8192, 768, 3072), (4096, 1024, 4096),
            (2048, 2048, 6144), (2048, 768, 32768), (4096, 4096, 4096), (16384, 2048, 2048), (8192, 2048, 8192),
            (4096, 4096, 14336), (16384, 4096, 4096), (8192, 5120, 7680), (4096, 8192, 10240), (2048, 4096, 128256),
            (16384, 4096, 14336), (8192, 8192, 28672),
        ),
        attentions=(
            (64, 16, 256, 64), (32, 32, 512, 64), (32, 16, 512, 128), (16, 32, 1024, 64), (16, 16, 1024, 128),
            (8, 32, 2048, 64), (8, 16, 2048, 128), (4, 32, 4096, 64), (4, 16, 4096, 128), (2, 16, 8192, 128),
            (1, 16, 16384, 128),
        ),
        elementwise=(2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27),
        optimizer=(2**22, 2**25, 2**27),
        messages=(
            512, 2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB,
        ),
    ),
}  # fmt: skip
