"""RMSNorm in C++ on a CPU beside PyTorch's own and beside the formula that training uses there.

Forward and backward together, on one thread. The three take turns in one process, so that all see the same machine; a
figure is the median of ratios of neighbours, of the time that the processor gave to each: others may be at work on it.

    python benchmarks/native_cpu.py            # builds the operator the first time; then a minute
    python benchmarks/native_cpu.py --quick    # fewer turns, nothing written
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from torch import Tensor

from lmworks.kernels import native
from lmworks.kernels.rms_norm import rms_norm

EPS = 1e-5
Norm = Callable[[Tensor, Tensor], Tensor]
NORMS: dict[str, Norm] = {
    "native": lambda x, weight: rms_norm(x, weight, EPS, "native"),
    "formula": lambda x, weight: rms_norm(x, weight, EPS, "torch"),
    "pytorch": lambda x, weight: F.rms_norm(x, weight.shape, weight.type_as(x), EPS),
}
SHAPES = [(2048, 256), (2048, 2048), (8192, 64)]  # rows and their width: a small model, a large one, heads
LEAST = 0.02  # seconds of one turn: short calls are repeated


def one_turn(norm: Norm, x: Tensor, weight: Tensor, grad: Tensor, repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        x.grad = weight.grad = None
        norm(x, weight).backward(grad)
    return (time.process_time() - begin) / repeats


def measure(rows: int, hidden: int, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    x = torch.randn(rows, hidden).to(dtype).requires_grad_()
    weight, grad = torch.rand(hidden, requires_grad=True), torch.randn(rows, hidden).to(dtype)
    warm = {name: one_turn(norm, x, weight, grad, 3) for name, norm in NORMS.items()}
    repeats = {name: max(1, round(LEAST / seconds)) for name, seconds in warm.items()}
    times = [
        {name: one_turn(norm, x, weight, grad, repeats[name]) for name, norm in NORMS.items()} for _ in range(turns)
    ]
    moved = 5 * x.numel() * x.element_size()  # forward reads x and writes y; backward reads x and g, writes g
    return {
        "rows": rows,
        "hidden": hidden,
        "dtype": str(dtype).removeprefix("torch."),
        "native_ms": 1e3 * statistics.median(turn["native"] for turn in times),
        "native_gb_s": moved / 1e9 / statistics.median(turn["native"] for turn in times),
        "faster_than_formula": statistics.median(turn["formula"] / turn["native"] for turn in times),
        "faster_than_pytorch": statistics.median(turn["pytorch"] / turn["native"] for turn in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, nothing written")
    quick = parser.parse_args().quick
    native.load()
    cases = []
    torch.set_num_threads(1)
    for rows, hidden in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = measure(rows, hidden, dtype, turns=3 if quick else 25)
            cases.append(case)
            print(
                "{rows} × {hidden} {dtype}: {native_ms:.2f} ms, {native_gb_s:.1f} GB/s; {faster_than_formula:.2f}× as "
                "fast as the formula, {faster_than_pytorch:.2f}× as PyTorch's".format(**case)
            )
    if not quick:
        print(f"written to {write_result('native_cpu', {'cases': cases})}")


if __name__ == "__main__":
    main()
