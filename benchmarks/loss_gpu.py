"""Does what makes training fast change what is learnt? The first 200 losses of every fast path against the plain one.

    python benchmarks/loss_gpu.py                                   all paths, each in a process, some side by side
    python benchmarks/loss_gpu.py --paths compile,"fp8 rowwise"     some of them
    python benchmarks/loss_gpu.py --seeds 0,1,2                     each path with more than one seed
    python benchmarks/loss_gpu.py --tiny --steps 40                 on a CPU, the paths that exist there

The plain path: eager, attention and loss as PyTorch has them, bf16 autocast over fp32 weights. Every path trains
the same model from the same weights on the same batches as the plain run of its seed. The gap is that of losses
smoothed over a window of steps; the yardstick is the widest gap between any two of four plain runs that differ in
nothing but the seed, which is what chance does. fp8 is not expected to stay within it, and its gap is stated.
results/loss_gpu.json is written after each path; those that are not run keep what they had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import RESULTS, commit, write_result

from lmworks.bench.train import one_step
from lmworks.kernels import dispatch
from lmworks.spec import RunSpec, load_run
from lmworks.train import Trainer
from lmworks.train.prefetcher import Prefetcher

WINDOW = 20  # steps
PLAIN_RUN = "plain"
SEEDS = range(4)
SIDE_BY_SIDE = 8  # processes: most of their time they compile
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
    "fp8 tensorwise + fp8 head + stochastic": Fast((*CHANCE, *FP8, "precision.fp8_head=true")),  # as 8B is measured
}


def losses_of(spec: RunSpec, steps: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="lmworks-losses-") as folder:
        trainer = Trainer(spec, Path(folder) / "run", quiet=True)
        trainer.build()
        with closing(Prefetcher(trainer.batches, 0, trainer.device)) as trainer.prefetcher:
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


def run(name: str, seed: int, steps: int, tiny: bool) -> dict[str, Any]:
    """One path, in this process."""
    began = time.perf_counter()
    base, overrides = TINY if tiny else MODEL, PLAIN if name == PLAIN_RUN else PATHS[name].overrides
    spec = load_run(base[0], [*base[1:], *overrides, f"seed={seed}", f"optim.steps={steps}"])
    plain = (
        mock.patch.object(dispatch, "fastest", lambda *_, **__: dispatch.TORCH) if name == PLAIN_RUN else nullcontext()
    )
    with plain:
        losses = losses_of(spec, steps)
    return {"path": name, "seed": seed, "seconds": time.perf_counter() - began, "losses": losses}


def run_apart(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One path, in a process of its own: one that fails must not cost the others."""
    command = [sys.executable, __file__, "--one", name, "--seeds", str(seed), "--steps", str(options.steps)]
    done = subprocess.run([*command, *["--tiny"] * options.tiny], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"path": name, "seed": seed, "failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:500]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(chosen: list[str], seeds: list[int], options: argparse.Namespace, file: str | None) -> None:
    with ThreadPoolExecutor(1 if options.tiny else SIDE_BY_SIDE) as pool:
        asked = [*((PLAIN_RUN, seed) for seed in SEEDS), *((name, seed) for seed in seeds for name in chosen)]
        running = {one: pool.submit(run_apart, *one, options) for one in asked}
        plain = [running[PLAIN_RUN, seed].result() for seed in SEEDS]
        if failed := [result["failed"] for result in plain if "failed" in result]:
            raise SystemExit(f"the plain path failed: {failed}")
        curves = [result["losses"] for result in plain]
        first = curves[0]
        noise = max((gap(*pair) for pair in combinations(curves, 2)), key=lambda one: one["away"])
        print(
            f"plain: {first[0]:.4f} → {smoothed(first)[-1]:.4f}, {WINDOW} steps smoothed; another seed is up to ",
            end="",
        )
        print(f"{noise['away']:.4f} away, at most {noise['most']:.4f}", flush=True)
        results = plain
        for one in asked[len(SEEDS) :]:
            result = running[one].result()
            if "losses" in result:
                result["gap"] = gap(result["losses"], curves[result["seed"]])
                result["within_noise"] = result["gap"]["away"] <= noise["away"]
            results.append({**result, "commit": commit()})
            print(line(result), flush=True)
            if file:
                facts = {"steps": options.steps, "window": WINDOW, "model": list(TINY if options.tiny else MODEL)}
                done = {(one["path"], one["seed"]) for one in results}
                others = [one for one in before(file, facts) if (one["path"], one["seed"]) not in done]
                write_result(file, {**facts, "noise": noise, "paths": [*results, *others]})


def before(file: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Paths of earlier runs of the same model, with the gaps that they had to the plain runs of theirs."""
    path = RESULTS / f"{file}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return kept.get("paths", []) if all(kept.get(key) == value for key, value in facts.items()) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--paths", help="their names, with commas between them")
    parser.add_argument("--seeds", default="0", help=f"of the paths, from 0 to {SEEDS[-1]}, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, and the paths that exist there")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--one", help="a single path in this process; prints JSON")
    options = parser.parse_args()
    try:
        seeds = [SEEDS.index(int(seed)) for seed in options.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {options.seeds}: numbers from 0 to {SEEDS[-1]} are expected, with commas between them")
    if options.one:
        print(json.dumps(run(options.one, seeds[0], options.steps, options.tiny)))
        return
    every = [name for name, path in PATHS.items() if path.cpu or not options.tiny]
    chosen = [name.strip() for name in options.paths.split(",")] if options.paths else every
    unknown = [name for name in chosen if name not in PATHS]
    if unknown:
        parser.error(f"--paths: there is no {', '.join(unknown)}; use some of {', '.join(PATHS)}")
    if options.steps < WINDOW:
        parser.error(f"--steps {options.steps} is less than the {WINDOW} that losses are smoothed over")
    file = None if options.no_save else "loss_cpu" if options.tiny else "loss_gpu"
    compare(chosen, seeds, options, file)


def line(result: dict[str, Any]) -> str:
    path = f"{result['path']}, seed {result['seed']}"
    if "failed" in result:
        return f"{path:40} failed: {result['failed']}"
    found = result["gap"]
    verdict = "within the noise" if result["within_noise"] else "OUTSIDE the noise"
    return (
        f"{path:40} mean {found['mean']:+.4f}, last {found['last']:+.4f}, away {found['away']:.4f}, most "
        f"{found['most']:.4f}: {verdict} ({result['seconds']:.0f} s)"
    )


if __name__ == "__main__":
    main()
