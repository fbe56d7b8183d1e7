"""How the loss in place and the kernels of fp8 should share out their work on this GPU, and how large chunks should be.

Each constant is varied at the shapes of three models in bf16. What wins is then written into the constant by hand:
in kernels/training `ONE_PASS_WARPS` and `HELD_BLOCKS` of cross_entropy_triton.py, `CHUNK_BYTES_IN_PLACE` of
cross_entropy.py (and of plan/ops.py), `AMAX_PROGRAMS`, `AMAX_BLOCK`, `TILE` and `TRANSPOSED_TILE` of float8_triton.py.
Which implementation is the fastest is another question: `lmworks bench kernels`.

    python benchmarks/loss_tune.py            # about two minutes on an H200
    python benchmarks/loss_tune.py --only chunk
    python benchmarks/loss_tune.py --quick    # one model, nothing written
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from common import RESULTS, commit, write_result

from lmworks.kernels.training import cross_entropy, cross_entropy_triton, float8, float8_triton

COPY, PRODUCT = 4.27e12, 763e12  # bytes/s and FLOP/s of an H200
SHAPES = {"llama3-8b": (16_384, 128_256, 4096), "llama3-1b": (16_384, 128_256, 2048), "gpt2": (65_536, 50_257, 768)}
KERNEL = [*((16, held) for held in (6, 8, 10, 12, 13, 14)), *((32, held) for held in (4, 5, 6, 7))]
CHUNKS = [mib << 20 for mib in (128, 256, 512, 544, 640, 768, 1024, 1088, 1280, 1536, 2048, 4096)]
PASSES = [(132, 4096), (528, 4096), (1056, 4096), (1056, 8192), (2112, 4096)]
TILES = [(1, 4096), (2, 2048), (4, 1024), (8, 512), (16, 256), (32, 128)]
TURNED = [(32, 32), (64, 64), (128, 64), (64, 128), (128, 128)]


@contextmanager
def constants(module: ModuleType, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def measured(work: Callable[[], object], module: ModuleType, **values: Any) -> float | None:
    """Seconds; None where the GPU has not the registers, the shared memory or the memory for it."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        with constants(module, **values):
            return do_bench(work, warmup=5, rep=60) / 1e3
    except (OutOfResources, torch.OutOfMemoryError):
        return None


def loss_kernel(tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Share of a copy's pace: a row is read once and written once.

    Run after run the rows hold gradients of gradients: as many bytes, and as finite.
    """
    columns = cross_entropy.padded_vocab(vocab, torch.empty(0, dtype=torch.bfloat16, device="cuda"))
    rows = cross_entropy.chunk_rows(tokens, columns, "cuda", 2, in_place=True)
    logits = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    found = {}
    for warps, held in KERNEL:
        seconds = measured(lambda: cross_entropy_triton.loss_in_place(logits, targets, True, vocab),
                           cross_entropy_triton, ONE_PASS_WARPS=warps, HELD_BLOCKS=held)  # fmt: skip
        if seconds is not None:
            found[f"{warps} warps, {held} blocks held"] = 4 * logits.numel() / seconds / COPY
    return found


def chunk_sizes(tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Share of the products' floor, of loss and gradients together."""
    states = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")

    def work() -> object:
        loss = cross_entropy.linear_cross_entropy(states, weight, targets, implementation="triton")
        return torch.autograd.grad(loss, (states, weight))

    floor, found = 6 * tokens * vocab * hidden / PRODUCT, {}
    for size in CHUNKS:
        seconds = measured(work, cross_entropy, CHUNK_BYTES_IN_PLACE=size)
        if seconds is not None:
            found[f"{size >> 20} MiB"] = floor / seconds
    return found


def eight_bits(_tokens: int, _vocab: int, hidden: int) -> dict[str, float]:
    """Share of a copy's pace: x is read twice and written once in a byte."""
    x = torch.randn(4 * hidden, hidden, dtype=torch.bfloat16, device="cuda")
    tried: list[tuple[dict[str, Any], bool]] = [
        ({"AMAX_PROGRAMS": parts, "AMAX_BLOCK": span}, False) for parts, span in PASSES
    ]
    tried += [({"TILE": tile}, False) for tile in TILES] + [({"TRANSPOSED_TILE": tile}, True) for tile in TURNED]
    found = {}
    for values, turned in tried:
        seconds = measured(lambda turned=turned: float8_triton.quantize(x, float8.E4M3, transposed=turned),
                           float8_triton, **values)  # fmt: skip
        if seconds is not None:
            found[", ".join(f"{name} = {value}" for name, value in values.items())] = 5 * x.numel() / seconds / COPY
    return found


QUESTIONS = {"loss kernel": loss_kernel, "chunk": chunk_sizes, "fp8": eight_bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, nothing written")
    parser.add_argument("--only", choices=list(QUESTIONS), help="one question; the others keep their answers")
    chosen = parser.parse_args()
    quick, asked = chosen.quick, [chosen.only] if chosen.only else list(QUESTIONS)
    file = RESULTS / "loss_tune.json"
    kept = json.loads(file.read_text(encoding="utf-8"))["found"] if file.exists() else []
    results = [one for one in kept if one["what"] not in asked]
    for model, shape in list(SHAPES.items())[: 1 if quick else None]:
        for name in asked:
            shares = QUESTIONS[name](*shape)
            for way, share in sorted(shares.items(), key=lambda one: -one[1])[:4]:
                print(f"{model}, {name}: {share:.0%} of the floor's pace with {way}")
            results.append({"model": model, "what": name, "of_floor": shares, "commit": commit()})
            torch.cuda.empty_cache()
    if not quick:
        facts = {"copy_bytes_s": COPY, "product_flops": PRODUCT, "found": results}
        print(f"written to {write_result('loss_tune', facts)}")


if __name__ == "__main__":
    main()
