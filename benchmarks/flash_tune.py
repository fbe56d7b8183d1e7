"""Tries tiles for flash attention on a GPU, beside PyTorch's own kernels, and names the best.

    python benchmarks/flash_tune.py [--save] [--seconds 150] [--flex] [--head-dim 64 128] [--group 4]

Causal attention in bf16 over a hidden size of 2048, with --group heads of queries to a head of keys. Every candidate is
checked against PyTorch's result and timed at 8192 positions; the two best of each pass at 2048 and 32768 as well. A
candidate that cannot be built, or is wrong, is named and left out. Nothing begins after --seconds; and if something
hangs, the process ends itself half a minute later.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmworks.kernels.training import flash_backward_triton, flash_forward_triton
from lmworks.kernels.training.flash_forward_triton import HALF, PASSES, Tiles

HIDDEN, TOKENS = 2048, 16_384
MIDDLE, OTHERS = 8192, (2048, 32_768)
PEAK = 989e12  # FLOP/s in bf16, of the H200's datasheet
CLOSE = 1e-2  # ‖difference‖ / ‖result‖
WORK = {"forward": 2, "queries": 3, "keys": 4}  # products of a tile that a pass computes
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}

# Around what was fastest on an H200 before, which comes first.
CANDIDATES: dict[str, dict[int, list[Tiles]]] = {
    "forward": {
        64: [
            Tiles(128, 64, 4, 3),
            Tiles(128, 64, 8, 3),
            Tiles(64, 64, 4, 3),
            Tiles(128, 64, 4, 2),
            Tiles(128, 64, 4, 4),
            Tiles(64, 128, 4, 3),
            Tiles(128, 32, 4, 4),
        ],
        128: [
            Tiles(128, 128, 8, 3),
            Tiles(128, 64, 8, 3),
            Tiles(64, 64, 4, 3),
            Tiles(128, 64, 8, 2, registers=128),
            Tiles(64, 128, 4, 2),
            Tiles(128, 64, 4, 2),
        ],
    },
    "queries": {
        64: [
            Tiles(128, 64, 8, 3),
            Tiles(128, 64, 4, 3),
            Tiles(64, 64, 4, 3),
            Tiles(128, 64, 8, 4),
            Tiles(64, 64, 4, 2),
            Tiles(128, 32, 4, 3),
        ],
        128: [
            Tiles(128, 64, 8, 3),
            Tiles(64, 64, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(128, 64, 8, 4),
            Tiles(64, 32, 4, 3),
        ],
    },
    "keys": {
        64: [
            Tiles(64, 64, 4, 3),
            Tiles(32, 128, 4, 3),
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 4),
            Tiles(32, 64, 4, 3),
            Tiles(32, 128, 4, 4),
            Tiles(64, 128, 4, 2),
        ],
        128: [
            Tiles(64, 64, 4, 2),
            Tiles(64, 64, 4, 3),
            Tiles(32, 64, 4, 3),
            Tiles(64, 128, 8, 3),
            Tiles(32, 64, 4, 2),
        ],
    },
}

Found = dict[str, dict[int, list[tuple[float, Tiles]]]]  # by pass and length: seconds, the least first


def seconds_of(call: Callable[[], Any], spend: float = 0.02) -> float:
    """Of one call: the median of three rows of calls that the host gives out ahead of the GPU."""
    call()
    count = max(2, min(50, int(spend / max(row_of(call, 2), 1e-6))))
    return sorted(row_of(call, count) for _ in range(3))[1]


def row_of(call: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


@dataclass(frozen=True)
class Inputs:
    """Of one shape, with what PyTorch makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    right: dict[str, tuple[Tensor, ...]]  # by pass
    lse: Tensor
    delta: Tensor

    @classmethod
    def of(cls, head_dim: int, seq: int, group: int) -> Inputs:
        batch, heads = max(1, TOKENS // seq), HIDDEN // head_dim
        shapes = [(batch, seq, n, head_dim) for n in (heads, heads // group, heads // group, heads)]
        q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = sdpa(*leaves)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
        scale = 1 / math.sqrt(head_dim)
        tiles = HALF["forward"][head_dim]
        _, lse = flash_forward_triton.launch(q, k, v, None, 0, scale, tiles)
        delta = (out.detach().float() * grad.float()).sum(-1).transpose(1, 2).contiguous()
        right = {"forward": (out.detach(),), "queries": (dq, delta), "keys": (dk, dv)}
        return cls(q, k, v, grad, right, lse, delta)

    @property
    def flops(self) -> float:
        """Of one product of all tiles: what a causal mask hides is not counted."""
        batch, seq, heads, head_dim = self.q.shape
        return batch * heads * seq * (seq + 1) * head_dim

    def run(self, name: str, tiles: Tiles) -> tuple[Tensor, ...]:
        """The results of a pass that are checked."""
        scale = 1 / math.sqrt(self.q.shape[3])
        if name == "forward":
            return flash_forward_triton.launch(self.q, self.k, self.v, None, 0, scale, tiles)[:1]
        backward = flash_backward_triton
        qkv = (self.grad, self.q, self.k, self.v)
        if name == "queries":
            return backward.launch_queries(*qkv, self.right["forward"][0], self.lse, None, 0, scale, tiles)
        return backward.launch_keys(*qkv, self.lse, self.delta, None, 0, scale, tiles)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared).transpose(1, 2)


def off(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True))


def try_tiles(inputs: Inputs, name: str, tiles: Tiles) -> float | str:
    """Seconds, or why there are none."""
    try:
        wrong = off(inputs.run(name, tiles), inputs.right[name])
        if not wrong < CLOSE:
            return f"wrong by {wrong:.2g}"
        return seconds_of(lambda: inputs.run(name, tiles))
    except Exception as error:  # whatever the compiler says of it
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def try_all(head_dim: int, group: int, ends: float, say: Callable[..., None]) -> Found:
    """Time the candidates, the best two at all lengths."""
    found: Found = {name: {} for name in PASSES}
    for seq in (MIDDLE, *OTHERS):
        if time.monotonic() > ends:
            break
        inputs = Inputs.of(head_dim, seq, group)
        for name in PASSES:
            wanted = CANDIDATES[name][head_dim] if seq == MIDDLE else [tiles for _, tiles in found[name][MIDDLE][:2]]
            timed = []
            for tiles in wanted:
                if time.monotonic() > ends:
                    break
                took = try_tiles(inputs, name, tiles)
                if isinstance(took, float):
                    timed.append((took, tiles))
                    took = f"{took * 1e3:.3f} ms, {WORK[name] * inputs.flops / took / 1e12:.0f} TFLOP/s computed"
                say(f"{head_dim} · {seq} · {name} {tiles}: {took}")
            found[name][seq] = sorted(timed, key=lambda pair: pair[0])
    return found


def peers(head_dim: int, seq: int, group: int, with_flex: bool) -> dict[str, tuple[float, float]]:
    """Seconds of PyTorch's kernels, forward and backward."""
    inputs = Inputs.of(head_dim, seq, group)
    found = {}
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            found[name] = both_ways(inputs, sdpa)
    found["as PyTorch chooses"] = both_ways(inputs, sdpa)
    if with_flex:
        from lmworks.model.attention import Pattern, flex, flex_block_mask

        mask = flex_block_mask(Pattern(), 1, seq, seq, inputs.q.device)
        found["flex"] = both_ways(inputs, lambda q, k, v: flex(q, k, v, Pattern(), mask))
    return {name: took for name, took in found.items() if took is not None}


def both_ways(inputs: Inputs, call: Callable[..., Tensor]) -> tuple[float, float] | None:
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    try:
        out = call(*leaves)
        forward = seconds_of(lambda: call(*leaves))
        return forward, seconds_of(lambda: torch.autograd.grad(out, leaves, inputs.grad, retain_graph=True))
    except RuntimeError:  # a backend that is not there
        return None


def rows_of(head_dim: int, group: int, found: Found, with_flex: bool) -> list[list[Any]]:
    """Length by length: ours, and each peer, in TFLOP/s of 2 products forward and 5 backward."""
    rows: list[list[Any]] = []
    for seq in sorted(found["keys"]):
        best = {name: found[name][seq][0][0] for name in PASSES if found[name].get(seq)}
        if len(best) < len(PASSES):
            continue
        flops = max(1, TOKENS // seq) * (HIDDEN // head_dim) * seq * (seq + 1) * head_dim
        theirs = peers(head_dim, seq, group, with_flex and seq == MIDDLE)
        ours = (best["forward"], best["queries"] + best["keys"])
        least = [min(took[part] for took in theirs.values()) for part in (0, 1)]
        for name, took in {"ours": ours, **theirs}.items():
            rates = [work * flops / seconds / 1e12 for work, seconds in zip((2, 5), took, strict=True)]
            ratios = [fastest / seconds for fastest, seconds in zip(least, took, strict=True)]
            shares = [100e12 * rate / PEAK for rate in rates]
            rows.append([head_dim, seq, name, *(1e3 * seconds for seconds in took), *rates, *shares, *ratios])
    return rows


COLUMNS = ["head", "seq", "kernel", "fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s", "fwd % of peak", "bwd % of peak",
           "fwd of best peer", "bwd of best peer"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/flash_tune.json (or …_group4)")
    parser.add_argument("--seconds", type=float, default=150, help="after which no candidate begins")
    parser.add_argument("--flex", action="store_true", help="time FlexAttention as well; it takes long to compile")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--group", type=int, default=1, choices=[1, 2, 4, 8, 16], help="heads that share their keys")
    args = parser.parse_args()
    console = Console(width=170, highlight=False)
    watchdog = threading.Timer(args.seconds + 30, lambda: os._exit(1))
    watchdog.daemon = True
    watchdog.start()
    began, rows, chosen = time.monotonic(), [], {}
    for turn, head_dim in enumerate(args.head_dim, 1):
        # Two thirds of what is left for our candidates, the rest for the peers.
        left = args.seconds * turn / len(args.head_dim) - (time.monotonic() - began)
        found = try_all(head_dim, args.group, time.monotonic() + left * 2 / 3, console.print)
        chosen[head_dim] = {name: str(by[MIDDLE][0][1]) for name, by in found.items() if by.get(MIDDLE)}
        rows += rows_of(head_dim, args.group, found, args.flex)
    table = Table(title=f"causal, bf16, hidden 2048, heads to a head of keys: {args.group}")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row))
    console.print(table)
    for head_dim, passes in chosen.items():
        for name, tiles in passes.items():
            console.print(f"{name:8} {head_dim}: {tiles}")
    if args.save:
        result = {"group": args.group, "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows], "tiles": chosen}
        name = "flash_tune" if args.group == 1 else f"flash_tune_group{args.group}"
        console.print(str(write_result(name, result)))


if __name__ == "__main__":
    main()
