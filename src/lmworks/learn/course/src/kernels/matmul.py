"""A matrix product in tiles: what a program loads, it uses for a whole tile of the result.

    python src/kernels/matmul.py

compares it with PyTorch's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.device import DEVICE, compare, tl, triton


# exercise triton_matmul() -> matmul_kernel
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        c = tl.dot(a, b, c)
    tl.store(c_ptr + m * N + n, c, mask=(m < M) & (n < N))


# end triton_matmul


def matmul(a: Tensor, b: Tensor, block_m: int = 32, block_n: int = 32, block_k: int = 32) -> Tensor:
    """a (M, K) times b (K, N), both contiguous, in their dtype. A program has a tile of (block_m, block_n)."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = triton.cdiv(M, block_m), triton.cdiv(N, block_n)
    matmul_kernel[grid](a, b, c, M, N, K, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k)
    return c


def main() -> None:
    for size in (70, 200) if DEVICE == "cpu" else (70, 4099):
        a, b = torch.randn(2, size, size, dtype=torch.float16, device=DEVICE)
        compare(f"{size} × {size} times {size} × {size} in fp16", matmul, torch.matmul, a, b)


if __name__ == "__main__":
    main()
