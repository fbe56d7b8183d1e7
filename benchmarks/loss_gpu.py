"""Does what makes training fast change what is learnt? The first 200 losses of every fast path against the plain one.

    python benchmarks/loss_gpu.py                                   all paths, about 3 minutes on one H200
    python benchmarks/loss_gpu.py --paths compile,"fp8 rowwise"     some of them
    python benchmarks/loss_gpu.py --tiny --steps 40                 on a CPU, the paths that exist there

The plain path: eager, attention and loss as PyTorch has them, bf16 autocast over fp32 weights. Every path trains
the same model from the same weights on the same batches. The gap is that of losses smoothed over a window of steps; the
yardstick is the widest gap between any two of four plain runs that differ in nothing but the seed, which is what chance
does. fp8 is not expected to stay within it, and its gap is stated. results/loss_gpu.json is written after each path.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from common import write_result

from lmworks.kernels import choose
from lmworks.spec import LMWorksError, RunSpec, load_run
from lmworks.study.train_bench import one_step
from lmworks.train import Trainer
from lmworks.train.feed import Feed

WINDOW = 20  # steps
SEEDS = 4  # of plain runs
PLAIN = ("precision.dtype=bf16", "model.attention=reference")
MODEL = (
    "tiny", "model.layers=8", "model.hidden=512", "model.heads=8", "model.kv_heads=4", "model.head_dim=64",
    "model.ffn=1536", "model.vocab=8192", "model.context=512", "data.path=stdlib:bytes", "data.seq=512",
    "data.micro_batch=32", "optim.lr=3e-4", "optim.warmup=50", "log.eval_every=0",
)  # fmt: skip
TINY = (
    "tiny", "model.layers=1", "data.path=stdlib:bytes", "data.seq=64", "data.micro_batch=4", "optim.lr=3e-3",
    "optim.warmup=5", "log.eval_every=0",
)  # fmt: skip


@dataclass(frozen=True)
class Fast:
    overrides: tuple[str, ...]
    cpu: bool = False  # it exists there, and takes seconds


HALF = ("precision.dtype=bf16", "precision.weights=bf16")
CHANCE = (*HALF, "precision.master=false", "precision.rounding=stochastic", "precision.states=bf16")
FP8 = ("precision.dtype=fp8", "parallel.compile=true")
PATHS = {
    "sdpa": Fast(("precision.dtype=bf16", "model.attention=sdpa"), cpu=True),
    "compile": Fast(("precision.dtype=bf16", "parallel.compile=true")),
    "flash": Fast(("precision.dtype=bf16", "parallel.compile=true", "model.attention=flash")),
    "bf16 weights + master": Fast((*HALF, "parallel.compile=true")),
    "bf16 weights + master eager": Fast(HALF, cpu=True),
    "stochastic": Fast((*CHANCE, "parallel.compile=true")),
    "stochastic eager": Fast(CHANCE, cpu=True),
    "selective recompute": Fast((*HALF, "parallel.compile=true", "parallel.recompute=selective")),
    "fp8 tensorwise": Fast(FP8),
    "fp8 rowwise": Fast((*FP8, "precision.fp8_scaling=rowwise")),
    "fp8 tensorwise + fp8 head": Fast((*FP8, "precision.fp8_head=true")),
    "fp8 tensorwise + bf16 weights": Fast((*FP8, "precision.weights=bf16")),
}


def losses_of(spec: RunSpec, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="lmworks-losses-") as folder:
        trainer = Trainer(spec, Path(folder) / "run", quiet=True)
        trainer.build()
        with closing(Feed(trainer.batches, 0, trainer.device)) as trainer.feed:
            return [one_step(trainer, steps - step) for step in range(steps)]


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each window of steps, from the first whole one on."""
    sums = torch.tensor(losses, dtype=torch.float64).cumsum(0)
    padded = torch.cat([torch.zeros(1, dtype=torch.float64), sums])
    return ((padded[WINDOW:] - padded[:-WINDOW]) / WINDOW).tolist()


def gap(one: list[float], other: list[float]) -> dict[str, float]:
    """By how much `one` lies above `other`: on the mean, at the end, and the most that it is away on either side."""
    apart = [a - b for a, b in zip(smoothed(one), smoothed(other), strict=True)]
    distances = [abs(difference) for difference in apart]
    return {
        "mean": sum(apart) / len(apart),
        "last": apart[-1],
        "most": max(distances),
        "away": sum(distances) / len(apart),
    }


def run(name: str, arguments: list[str], steps: int) -> tuple[dict[str, Any], list[float] | None]:
    began = time.perf_counter()
    try:
        spec = load_run(arguments[0], [*arguments[1:], f"optim.steps={steps}"])
        losses = losses_of(spec, steps)
    except (LMWorksError, RuntimeError) as error:  # one path that fails must not cost the others
        return {"path": name, "failed": str(error).splitlines()[0][:500]}, None
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {"path": name, "seconds": time.perf_counter() - began, "losses": losses}, losses


def compare(base: list[str], chosen: list[str], steps: int, file: str | None) -> None:
    with mock.patch.object(choose, "fastest", lambda *_, **__: choose.TORCH):
        plain = [run(f"plain, seed {seed}", [*base, *PLAIN, f"seed={seed}"], steps) for seed in range(SEEDS)]
    results = [result for result, _ in plain]
    curves = [losses for _, losses in plain if losses is not None]
    if len(curves) < SEEDS:
        raise SystemExit(f"the plain path failed: {[result.get('failed') for result in results]}")
    first, noise = curves[0], max((gap(*pair) for pair in combinations(curves, 2)), key=lambda one: one["away"])
    print(f"plain: {first[0]:.4f} → {smoothed(first)[-1]:.4f}, {WINDOW} steps smoothed; another seed is up to ", end="")
    print(f"{noise['away']:.4f} away, at most {noise['most']:.4f}", flush=True)
    for name in chosen:
        result, losses = run(name, [*base, *PATHS[name].overrides, "seed=0"], steps)
        if losses is not None:
            result["gap"] = gap(losses, first)
            result["within_noise"] = result["gap"]["away"] <= noise["away"]
        results.append(result)
        print(line(result), flush=True)
        if file:
            write_result(file, {"steps": steps, "window": WINDOW, "model": base, "noise": noise, "paths": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--paths", help="their names, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, and the paths that exist there")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    every = [name for name, path in PATHS.items() if path.cpu or not options.tiny]
    chosen = [name.strip() for name in options.paths.split(",")] if options.paths else every
    unknown = [name for name in chosen if name not in PATHS]
    if unknown:
        parser.error(f"--paths: there is no {', '.join(unknown)}; use some of {', '.join(PATHS)}")
    if options.steps < WINDOW:
        parser.error(f"--steps {options.steps} is less than the {WINDOW} that losses are smoothed over")
    file = None if options.no_save else "loss_cpu" if options.tiny else "loss_gpu"
    compare(list(TINY if options.tiny else MODEL), chosen, options.steps, file)


def line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['path']:40} failed: {result['failed']}"
    found = result["gap"]
    verdict = "within the noise" if result["within_noise"] else "OUTSIDE the noise"
    return (
        f"{result['path']:40} mean {found['mean']:+.4f}, last {found['last']:+.4f}, away {found['away']:.4f}, most "
        f"{found['most']:.4f}: {verdict} ({result['seconds']:.0f} s)"
    )


if __name__ == "__main__":
    main()
