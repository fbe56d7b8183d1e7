"""Hold the planner's first sheet against real steps: peak memory and step time, each case in a process of its own.

    python benchmarks/plan_check.py                         the CPU presets
    python benchmarks/plan_check.py --device cuda           small models on a GPU
    python benchmarks/plan_check.py --save                  also write benchmarks/results/plan_check_DEVICE.json

Memory: on a CPU the growth of the resident set after a tiny step, on a GPU the allocator's peak. Time: the median
of the steps after three to warm up. The rates are measured in the same process; on a GPU the time that the fitted model
gives for its kind, without measuring this one, stands beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from common import write_result

from lmworks.data import Batch
from lmworks.observe.probe import probe
from lmworks.parallel.apply import lay_out
from lmworks.parallel.weights import source_of
from lmworks.plan.case import Case
from lmworks.plan.memory.reserve import reserved
from lmworks.plan.memory.sheet import memory
from lmworks.plan.step.one_device import step_time
from lmworks.plan.step.price import price
from lmworks.spec import RunSpec, load_run
from lmworks.spec.hardware import recognise
from lmworks.train.device import PeakMemory
from lmworks.train.optim import make_optimizer

BF16, COMPILE = "precision.dtype=bf16", "parallel.compile=true"
CASES: dict[str, list[list[str]]] = {
    "cpu": [
        ["cpu-3m", "data.seq=256", "data.micro_batch=8"],
        ["cpu-10m", "data.seq=256", "data.micro_batch=4"],
        ["cpu-10m", "data.seq=256", "data.micro_batch=8"],
        ["cpu-10m", "data.seq=256", "data.micro_batch=4", "data.global_batch=8"],
        ["cpu-10m", "data.seq=256", "data.micro_batch=8", "parallel.recompute=full"],
        ["cpu-10m", "data.seq=256", "data.micro_batch=8", "model.mlp=swiglu", "model.bias=false", "model.norm=rms",
         "model.positions=rope", "model.ffn=704"],
    ],
    "cuda": [
        *(["gpt2-small", "data.seq=1024", "data.micro_batch=16", BF16, f"parallel.recompute={policy}"]
          for policy in ("none", "selective", "full")),
        ["gpt2-small", "data.seq=1024", "data.micro_batch=64", BF16],
        ["gpt2-small", "data.seq=1024", "data.micro_batch=8", "precision.dtype=fp32"],
        ["gpt2-small", "data.seq=1024", "data.micro_batch=16", "precision.dtype=fp16"],
        ["gpt2-small", "data.seq=1024", "data.micro_batch=32", BF16, COMPILE],
        ["gpt2-medium", "data.seq=512", "data.micro_batch=16", BF16],
        *(["llama3-1b", "data.seq=4096", "data.micro_batch=2", BF16, f"parallel.recompute={policy}"]
          for policy in ("none", "selective", "full")),
        ["llama3-1b", "data.seq=4096", "data.micro_batch=1", BF16, "data.global_batch=4"],
        ["llama3-1b", "data.seq=16384", "data.micro_batch=1", BF16, "parallel.recompute=full"],
        ["llama3-1b", "data.seq=4096", "data.micro_batch=2", BF16, COMPILE],
        ["llama3-1b", "data.seq=4096", "data.micro_batch=4", BF16, COMPILE, "parallel.recompute=selective"],
        ["llama3-1b", "data.seq=2048", "data.micro_batch=4", BF16],
        ["qwen3-0.6b", "data.seq=2048", "data.micro_batch=4", BF16],
        ["qwen3-0.6b", "data.seq=2048", "data.micro_batch=8", BF16, COMPILE],
        ["qwen3-1.7b", "data.seq=4096", "data.micro_batch=2", BF16, "parallel.recompute=selective"],
        ["llama3-3b", "data.seq=4096", "data.micro_batch=1", BF16, "parallel.recompute=full"],
    ],
}  # fmt: skip


def train_steps(spec: RunSpec, device: torch.device, steps: int) -> tuple[int, list[float]]:
    """What the trainer does in a step: (peak bytes, seconds of each step)."""
    peak = PeakMemory(device)
    laid = lay_out(spec, None, device, source_of(spec))
    optimizer = make_optimizer(laid.shards, spec.optim)
    shape = (spec.data.micro_batch, spec.data.seq)
    tokens = torch.randint(0, spec.model.vocab, shape, device=device)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        laid.forward_backward([Batch(tokens, tokens)] * spec.accumulation, 1 / spec.tokens_per_step)
        torch.nn.utils.clip_grad_norm_([shard.leaf for shard in laid.shards], 1.0, foreach=True)
        optimizer.step()
        laid.clear()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return peak.read(), seconds


def check(case: list[str], device: str, steps: int) -> dict[str, Any]:
    spec = load_run(case[0], [*case[1:], f"cluster.device={device}"])
    where = torch.device(device)
    sheet = memory(spec, device)
    measured, seconds = train_steps(spec, where, steps)
    step = statistics.median(seconds[3:])
    result: dict[str, Any] = {"case": " ".join(case), "memory": measured, "memory_predicted": sheet.total}
    result |= {"memory_moment": sheet.moment, "step": step, "step_best": min(seconds)}
    predicted = step_time(spec, probe(where))
    result |= {"step_predicted": predicted.total, "parts": predicted.parts}
    gpu = recognise(torch.cuda.get_device_name()) if device == "cuda" else None
    if gpu is not None:  # what is said of it without it
        modelled = price(Case.of(spec, gpu))
        result |= {"reserved": torch.cuda.max_memory_reserved(), "reserved_predicted": float(reserved(sheet.total))}
        result |= {"step_modelled": float(modelled.seconds), "interval": [float(end) for end in modelled.interval]}
    return result


def modelled(result: dict[str, Any]) -> str:
    """The error of the time that is said of such a GPU without it."""
    return f"{result['step_modelled'] / result['step'] - 1:+8.1%}" if "step_modelled" in result else 8 * " "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", nargs="+", help="one case: SPEC [section.key=value …]; prints JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(check(options.one, options.device, options.steps)))
        return
    results = []
    columns = (("memory MB", 10), ("predicted", 10), ("error", 7), ("step ms", 10), ("predicted", 9), ("error", 7))
    print(*(f"{name:>{wide}}" for name, wide in (*columns, ("by model", 8))), "  case")
    for case in CASES[options.device]:
        command = [sys.executable, __file__, "--device", options.device, "--steps", str(options.steps), "--one", *case]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            print(f"failed: {' '.join(case)}\n{answer.stderr[-1500:]}")
            continue
        r = json.loads(answer.stdout.splitlines()[-1])
        results.append(r)
        memory_error = r["memory_predicted"] / r["memory"] - 1
        time_error = r["step_predicted"] / r["step"] - 1
        print(
            f"{r['memory'] / 1e6:10.1f} {r['memory_predicted'] / 1e6:10.1f} {memory_error:+7.1%}   "
            f"{r['step'] * 1e3:8.1f} {r['step_predicted'] * 1e3:9.1f} {time_error:+7.1%} {modelled(r)}   {r['case']}",
            flush=True,
        )
        if options.save:  # after each case: nothing is lost when a lent machine goes
            write_result(f"plan_check_{options.device}", {"cases": results})


if __name__ == "__main__":
    main()
