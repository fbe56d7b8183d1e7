"""How the update of bf16 weights should share out its work on this GPU, and what a whole model's costs.

`TILE`, `WARPS`, `TURNS` and `SMALL` of adamw_triton.py are varied; what wins is then written there by hand.

    python benchmarks/adamw_tune.py            # about a minute on an H200
    python benchmarks/adamw_tune.py --quick    # one format and one model, nothing written
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import write_result
from torch import Tensor

from lmworks.kernels.training import adamw_triton
from lmworks.kernels.training.adamw import AdamWConfig, ParamState, adamw
from lmworks.parallel.data_parallel import Shard
from lmworks.plan.exact.shards import weights
from lmworks.spec import ModelSpec, OptimSpec, PrecisionSpec
from lmworks.train.optim import make_optimizer

COPY = 4.27e12  # bytes/s of an H200, read and written
COUNT = 2**28  # weights of one large tensor
# What is kept, and the bytes that the update of a weight moves: weight, low bits, moments both ways, and the gradient.
FORMATS = {
    "split master": (PrecisionSpec(dtype="bf16", weights="bf16"), 26),
    "split master, bf16 moments": (PrecisionSpec(dtype="bf16", weights="bf16", states="bf16"), 18),
    "stochastic, bf16 moments": (
        PrecisionSpec(dtype="bf16", weights="bf16", master=False, rounding="stochastic", states="bf16"),
        14,
    ),
}
TILES = [
    (tile, tile // (32 * each), turns) for each in (4, 8, 16) for tile in (512, 1024, 2048) for turns in (1, 4, 16)
]
THRESHOLDS = [0, 2**12, 2**14, 2**16, 2**18, 2**20]
MODELS = ("gpt2-small", "llama3-1b")


def timed(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=60)) / 1e3


def large(precision: PrecisionSpec) -> tuple[ParamState, AdamWConfig]:
    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(COUNT, dtype=dtype, device="cuda")

    moments = torch.bfloat16 if precision.states == "bf16" else torch.float32
    low = zeros(torch.int16) if precision.master else None
    step = torch.ones((), device="cuda")
    slot = ParamState(
        zeros(torch.bfloat16), zeros(torch.bfloat16) + 1, step, 2**62, zeros(moments), zeros(moments), low
    )
    return slot, AdamWConfig(1e-3, 0.1, stochastic=precision.rounding == "stochastic")


def tiles(name: str) -> dict[str, float]:
    """Share of a copy's pace."""
    precision, moved = FORMATS[name]
    slot, rule = large(precision)
    scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    found = {}
    before = adamw_triton.TILE, adamw_triton.WARPS, adamw_triton.MAX_TILES_PER_PROGRAM
    for adamw_triton.TILE, adamw_triton.WARPS, adamw_triton.MAX_TILES_PER_PROGRAM in TILES:
        seconds = timed(lambda: adamw([slot], rule, grad_scale=scale, found_inf=found_inf))
        way = f"tile {adamw_triton.TILE}, {adamw_triton.WARPS} warps, {adamw_triton.MAX_TILES_PER_PROGRAM} turns"
        found[way] = moved * COUNT / seconds / COPY
    adamw_triton.TILE, adamw_triton.WARPS, adamw_triton.MAX_TILES_PER_PROGRAM = before
    return found


def model_step(model: str) -> dict[str, float]:
    """Seconds of a whole optimizer step, host and device, by the size below which tensors share a launch."""
    found = {}
    for below in [*THRESHOLDS, None]:  # None: PyTorch's fused AdamW of fp32 weights
        dtype = torch.float32 if below is None else torch.bfloat16
        shards = []
        for weight in weights(ModelSpec.from_preset(model)):
            leaf = torch.nn.Parameter(torch.zeros(weight.shape, dtype=dtype, device="cuda"))
            leaf.grad = torch.ones_like(leaf)
            shards.append(Shard(weight.name, leaf, leaf.shape, None))
        precision = PrecisionSpec() if below is None else FORMATS["split master"][0]
        optimizer = make_optimizer(shards, ModelSpec(), OptimSpec(), precision)
        adamw_triton.SMALL = below or 0
        found["PyTorch's, fp32" if below is None else f"below {below}"] = timed(optimizer.step)
    adamw_triton.SMALL = 2**16
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one format and one model, nothing written")
    quick = parser.parse_args().quick
    shares, steps = {}, {}
    for name in list(FORMATS)[: 1 if quick else None]:
        shares[name] = tiles(name)
        for way, share in sorted(shares[name].items(), key=lambda one: -one[1])[:3]:
            print(f"{name}: {share:.0%} of a copy's pace with {way}")
        torch.cuda.empty_cache()
    for model in MODELS[: 1 if quick else None]:
        steps[model] = model_step(model)
        floor = 26 * ModelSpec.from_preset(model).params / COPY
        print(
            f"{model}: floor {1e3 * floor:.2f} ms; " + ", ".join(f"{k} {1e3 * s:.2f}" for k, s in steps[model].items())
        )
        torch.cuda.empty_cache()
    if not quick:
        facts = {"copy_bytes_s": COPY, "weights": COUNT, "of_copy": shares, "step_s": steps}
        print(f"written to {write_result('adamw_tune', facts)}")


if __name__ == "__main__":
    main()
