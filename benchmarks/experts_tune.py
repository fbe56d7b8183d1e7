"""Tries tiles of the grouped products of experts on a GPU, by tokens of a step, and names the best.

    python benchmarks/experts_tune.py [--save] [--tokens 8 64 1024] [--seconds 300]

Random choices of 8 of 128 experts of Qwen3-30B-A3B in bf16. The floor is the bytes of the visited experts over the
bandwidth of a device copy, or the products over the datasheet's peak, whichever is longer. Every candidate is checked
against the first one's result. The whole of `experts` is timed beside its two products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product

import torch
from common import write_result
from torch import Tensor

from lmworks.bench.roofline import measure_bandwidth
from lmworks.kernels.inference import experts_triton
from lmworks.kernels.inference.experts_triton import ExpertWeights, Product, Routing, Tile
from lmworks.kernels.triton_support import compile_only

HIDDEN, FFN, EXPERTS, TOP_K = 2048, 768, 128, 8
PEAK = 989e12  # FLOP/s in bf16, of the H200's datasheet
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
ROUTING = Routing(TOP_K)


def candidates(tokens: int) -> list[Tile]:
    if tokens * TOP_K <= experts_triton.MAX_PAIRS_ALONE:
        return [Tile(1, *each) for each in product((2, 4, 8, 16), (256, 512, 1024), (1, 2), (4, 8))]
    mean = tokens * TOP_K / EXPERTS
    if mean <= 4:
        sizes = product((8, 16), (32, 64, 128), (128, 256), (3, 4, 5), (4,))
    elif mean <= 16:
        sizes = product((16, 32), (64, 128), (64, 128), (3, 4), (4, 8))
    elif mean <= 64:
        sizes = product((32, 64, 128), (64, 128), (64, 128), (3, 4), (4, 8))
    else:
        sizes = product((64, 128, 256), (128, 256), (64,), (2, 3, 4), (4, 8))
    return [tile for tile in (Tile(*each) for each in sizes) if fits(tile)]


def fits(tile: Tile) -> bool:
    shared = 2 * tile.stages * tile.inputs * (tile.pairs + tile.channels)
    return shared < 225_000 and tile.pairs * tile.channels <= 128 * 32 * tile.warps


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Of one call, from the best replay of a CUDA graph of some."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best


class Case:
    """The inputs of both products for so many tokens."""

    def __init__(self, tokens: int, gate_up: list[Tensor], down: Tensor) -> None:
        generator = torch.Generator("cuda").manual_seed(tokens)
        self.x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.logits = torch.randn(tokens, EXPERTS, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.gate_up, self.down, self.tokens = gate_up, down, tokens
        self.ids, self.weights = experts_triton.route(self.logits, ROUTING)
        self.inner = torch.randn(tokens * TOP_K, FFN, device="cuda", dtype=torch.bfloat16, generator=generator)

    def launch(self, tile: Tile, up: bool) -> Callable[[], Tensor]:
        x, w = (self.x, Product(self.gate_up[0], None, self.gate_up[1])) if up else (self.inner, Product(self.down))
        out = torch.zeros(self.tokens * TOP_K, FFN if up else HIDDEN, device="cuda", dtype=torch.bfloat16)
        blocks = None if tile.pairs == 1 else experts_triton.group(self.ids, EXPERTS, tile.pairs)

        def work() -> Tensor:
            if blocks is None and up:
                experts_triton.launch_alone_up(x, w, self.ids, out, tile)
            elif blocks is None:
                return experts_triton.launch_alone_down(x, w, self.ids, self.weights, None, out[: self.tokens], tile)
            else:
                experts_triton.launch_grouped(x, w, self.weights, out, blocks, tile, TOP_K, up)
            return out

        return work

    def floor(self, up: bool, bandwidth: float) -> float:
        visited, weights = len(self.ids.unique()), (2 if up else 1) * HIDDEN * FFN
        return max(visited * weights * 2 / bandwidth, 2 * self.tokens * TOP_K * weights / PEAK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=300, help="nothing begins after them")
    chosen = parser.parse_args()
    began, found = time.perf_counter(), {}
    device = torch.device("cuda")
    bandwidth = measure_bandwidth(device)
    sizes = (EXPERTS, FFN, HIDDEN)
    gate_up = [torch.randn(sizes, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5 for _ in range(2)]
    down = torch.randn(EXPERTS, HIDDEN, FFN, device=device, dtype=torch.bfloat16) * FFN**-0.5
    cases = [Case(tokens, gate_up, down) for tokens in chosen.tokens]
    with compile_only():
        for case, up in product(cases, (True, False)):
            for tile in candidates(case.tokens):
                with suppress(Exception):  # it is named below
                    case.launch(tile, up)()
    print(f"compiled after {time.perf_counter() - began:.0f} s; {bandwidth / 1e12:.2f} TB/s", flush=True)
    for case in cases:
        repeats = 20 if case.tokens < 1024 else 3
        row = {}
        for up in (True, False):
            times: dict[Tile, float] = {}
            wanted = None
            for tile in candidates(case.tokens):
                if time.perf_counter() - began > chosen.seconds:
                    break
                try:
                    work = case.launch(tile, up)
                    result = work().float()
                    wanted = result.clone() if wanted is None else wanted
                    off = float((result - wanted).norm() / wanted.norm())
                    if not off < 1e-2:
                        print(f"{tile}: off by {off:.1e}", flush=True)
                        continue
                    times[tile] = seconds(work, repeats)
                except Exception as error:
                    print(f"{tile}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            name, floor = "up" if up else "down", case.floor(up, bandwidth)
            ranked = sorted(times, key=times.__getitem__)
            for tile in ranked[:4]:
                print(f"{case.tokens:5} tokens {name:4} {1e6 * times[tile]:8.1f} µs (floor {1e6 * floor:.1f}) {tile}")
            row[name] = {
                "floor_us": 1e6 * floor, "tiles": [[str(tile), 1e6 * times[tile]] for tile in ranked[:8]]
            }  # fmt: skip
        whole = seconds(
            lambda case=case: experts_triton.experts(case.x, case.logits, ExpertWeights(*gate_up, down), ROUTING),
            repeats,
        )
        row["experts_us"] = 1e6 * whole
        print(f"{case.tokens:5} tokens: experts {1e6 * whole:.1f} µs as it is tuned now", flush=True)
        found[str(case.tokens)] = row
    if chosen.save:
        print(write_result("experts_tune", {"shape": [HIDDEN, FFN, EXPERTS, TOP_K], "tokens": found}))


if __name__ == "__main__":
    main()
