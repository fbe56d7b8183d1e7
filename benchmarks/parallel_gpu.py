"""One GPU, one rank: the plain step beside the same step under DDP and FSDP2.

    torchrun --nproc-per-node 1 benchmarks/parallel_gpu.py [--save]

A strategy over one rank has nothing to exchange, and the trainer then runs the plain loop whatever the strategy is
called. Aim: within 2% of each other's tokens/s. "hooks" are PyTorch's DDP and FSDP2 put over the one rank all the same:
what their hooks and copies cost where nothing is gained by them. Strategies take turns within one process, so that
clocks and temperature hit all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from common import write_result
from plan_check import on_device

from lmworks.data import Batch
from lmworks.parallel import parallelize
from lmworks.parallel.world import init_distributed, shutdown
from lmworks.spec import load_run
from lmworks.train.optim import make_optimizer

ROUNDS, STEPS = 6, 5
STRATEGIES = ("plain", "ddp", "fsdp2", "ddp hooks", "fsdp2 hooks")
CASE = ["precision.dtype=bf16", "parallel.compile=true", "cluster.device=cuda"]
MODELS = {
    "gpt2-small": ["data.seq=1024", "data.micro_batch=16"],
    "llama3-1b": ["data.seq=2048", "data.micro_batch=4"],
}


def stepper(model: str, strategy: str) -> Any:
    """A function that takes one optimizer step."""
    name, _, hooks = strategy.replace("plain", "ddp").partition(" ")
    spec = load_run(model, [*MODELS[model], *CASE, f"parallel.strategy={name}"])
    device = torch.device("cuda", 0)
    mesh = None if strategy == "plain" else init_distributed(spec.parallel, device)
    with mock.patch.object(
        parallelize, "has_no_replicas", (lambda *_: False) if hooks else parallelize.has_no_replicas
    ):
        parallel_model = parallelize.parallelize(spec, mesh, device, on_device(device))
    optimizer = make_optimizer(parallel_model.shards, spec.model, spec.optim, spec.precision, spec.seed)
    tokens = torch.randint(0, spec.model.vocab, (spec.data.micro_batch, spec.data.seq), device=device)
    batch = Batch(tokens, tokens)

    def step() -> None:
        parallel_model.forward_backward([batch], 1 / spec.tokens_per_step)
        parallel_model.finish()
        optimizer.step()
        parallel_model.after_step()
        parallel_model.zero_grad()

    return step, spec.tokens_per_step


def measure(model: str) -> list[dict[str, Any]]:
    steppers = {name: stepper(model, name) for name in STRATEGIES}
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for round_ in range(ROUNDS + 1):
        for name, (step, _) in steppers.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
            if round_:
                seconds[name].append((time.perf_counter() - began) / STEPS)
    plain = statistics.median(seconds["plain"])
    return [
        {
            "model": model,
            "strategy": name,
            "step_s": statistics.median(times),
            "tokens_per_s": steppers[name][1] / statistics.median(times),
            "ratio_to_plain": plain / statistics.median(times),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/parallel_gpu.json")
    arguments = parser.parse_args()
    rows = []
    for model in MODELS:
        rows += measure(model)
        torch.cuda.empty_cache()
    for row in rows:
        print(
            f"{row['model']:12} {row['strategy']:12} {row['tokens_per_s']:12,.0f} tokens/s  {row['ratio_to_plain']:.3f}"
        )
    if arguments.save:
        print(write_result("parallel_gpu", {"aim": "within 2% of plain", "rows": rows}))
    shutdown()


if __name__ == "__main__":
    main()
