"""Steps of LoRA and QLoRA against those that train all weights, turn about in one process, beside the planner's.

    python benchmarks/lora_cpu.py                # prints; --save also writes benchmarks/results/lora_cpu.json

A ratio of two steps depends less on who else is busy than either step, and the processor's time of one thread less than
the clock's. Steps are those of the trainer on one CPU device in fp32; the planner has rates that are measured in the
same process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import write_result

from lmworks.bench.calibrate import probe
from lmworks.data import Batch
from lmworks.parallel.initial_weights import source_of
from lmworks.parallel.parallelize import parallelize
from lmworks.plan.flops import run_flops_per_token
from lmworks.plan.step.one_device import step_time
from lmworks.spec import RunSpec, load_run
from lmworks.train.optim import make_optimizer
from lmworks.train.step_scalars import squared_norm

SHAPE = ["model.layers=2", "model.hidden=384", "model.heads=6", "model.kv_heads=2", "model.ffn=1024",
         "model.vocab=1024", "model.context=128", "data.seq=128", "cluster.device=cpu"]  # fmt: skip
EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=384"]
WAYS: dict[str, list[str]] = {
    "all weights": [],
    "rank 16, all layers": ["lora.rank=16"],
    "rank 16, attention": ["lora.rank=16", 'lora.targets=["attention"]'],
    "rank 16, DoRA": ["lora.rank=16", "lora.dora=true"],
    "rank 16 over nf4": ["lora.rank=16", "lora.base=nf4"],
    "rank 16 over int8": ["lora.rank=16", "lora.base=int8"],
}
MODELS = {"dense": [*SHAPE, "data.micro_batch=4"], "experts": [*SHAPE, *EXPERTS, "data.micro_batch=4"]}


def stepper(spec: RunSpec) -> Callable[[], float]:
    """Processor seconds of one step of the trainer."""
    device = torch.device("cpu")
    parallel_model = parallelize(spec, None, device, source_of(spec))
    optimizer = make_optimizer(parallel_model.shards, spec.model, spec.optim, spec.precision, spec.seed)
    tokens = torch.randint(0, spec.model.vocab, (spec.data.micro_batch, spec.data.seq))

    def step() -> float:
        began = time.process_time()
        parallel_model.forward_backward([Batch(tokens, tokens)] * spec.accumulation, 1 / spec.tokens_per_step)
        norm = squared_norm(parallel_model.shards, parallel_model.replicas).sqrt()
        optimizer.grad_scale = norm.clamp(min=1.0)  # type: ignore[attr-defined]  # as the trainer clips
        optimizer.step()
        parallel_model.zero_grad()
        return time.process_time() - began

    return step


def measure(words: list[str], rounds: int) -> dict[str, dict[str, float]]:
    specs = {way: load_run("tiny", [*words, *more]) for way, more in WAYS.items()}
    steps = {way: stepper(spec) for way, spec in specs.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        for way, step in steps.items():
            spent = step()
            if number >= 2:  # the first warm up
                seconds[way].append(spent)
    machine = probe(torch.device("cpu"))
    planned = {way: step_time(spec, machine).total for way, spec in specs.items()}
    base = "all weights"
    ratios = {way: statistics.median(a / b for a, b in zip(seconds[way], seconds[base], strict=True)) for way in WAYS}
    return {
        way: {
            "step_s": statistics.median(seconds[way]),
            "planned_s": planned[way],
            "ratio": ratios[way],
            "planned_ratio": planned[way] / planned[base],
            "flops_ratio": run_flops_per_token(specs[way]) / run_flops_per_token(specs[base]),
        }
        for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, words in MODELS.items():
        found[name] = measure(words, options.rounds)
        for way, figures in found[name].items():
            print(
                f"{name:8} {way:20} {1e3 * figures['step_s']:8.1f} ms, planned {1e3 * figures['planned_s']:8.1f}; "
                f"of all weights {figures['ratio']:.3f}, planned {figures['planned_ratio']:.3f}, "
                f"FLOPs {figures['flops_ratio']:.3f}",
                flush=True,
            )
    if options.save:
        write_result("lora_cpu", {"rounds": options.rounds, "models": found})


if __name__ == "__main__":
    main()
