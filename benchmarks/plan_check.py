"""Hold the planner's sheets against real steps: peak memory and step time.

    python benchmarks/plan_check.py                         the CPU presets
    python benchmarks/plan_check.py --device cuda           small models on a GPU
    python benchmarks/plan_check.py --save                  also write benchmarks/results/plan_check_DEVICE.json
    python benchmarks/plan_check.py --again RESULTS.json    predict the same measurements again, and publish them

Memory: on a CPU the growth of the resident set after a tiny step, so each case has a process of its own; on a GPU the
allocator's peak, one case after another in one process. Time: the median of the steps after three to warm up. The rates
are measured in the same process; on a GPU the time that the fitted model gives for its kind, without measuring this
one, stands beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from common import write_result
from torch import Tensor

from lmworks.data import Batch
from lmworks.observe.probe import probe
from lmworks.parallel.apply import lay_out
from lmworks.parallel.weights import Source, source_of
from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine
from lmworks.plan.devices.profile import Profile
from lmworks.plan.memory.reserve import reserved
from lmworks.plan.memory.sheet import memory
from lmworks.plan.step.constants import USUAL_LAUNCH
from lmworks.plan.step.one_device import step_time
from lmworks.plan.step.price import price
from lmworks.plan.tables.sources import PUBLISHED
from lmworks.spec import RunSpec, load_run
from lmworks.spec.hardware import recognise
from lmworks.train.device import PeakMemory
from lmworks.train.optim import make_optimizer

OWN_GPU = "H200-SXM-141GB"  # whose runs are a source
TAKEN_LAUNCH = 12e-6  # seconds of a bare op on its host, where no probe was kept: a profile shows 8 to 23 µs
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
        ["gpt2-medium", "data.seq=512", "data.micro_batch=16", BF16],
        *(["llama3-1b", "data.seq=4096", "data.micro_batch=2", BF16, f"parallel.recompute={policy}"]
          for policy in ("none", "selective", "full")),
        ["llama3-1b", "data.seq=4096", "data.micro_batch=1", BF16, "data.global_batch=4"],
        ["llama3-1b", "data.seq=16384", "data.micro_batch=1", BF16, "parallel.recompute=full"],
        ["llama3-1b", "data.seq=2048", "data.micro_batch=4", BF16],
        ["qwen3-0.6b", "data.seq=2048", "data.micro_batch=4", BF16],
        ["qwen3-1.7b", "data.seq=4096", "data.micro_batch=2", BF16, "parallel.recompute=selective"],
        ["llama3-3b", "data.seq=4096", "data.micro_batch=1", BF16, "parallel.recompute=full"],
        # Compiling takes longer than all of these.
        ["gpt2-small", "data.seq=1024", "data.micro_batch=32", BF16, COMPILE],
        ["llama3-1b", "data.seq=4096", "data.micro_batch=2", BF16, COMPILE],
        ["llama3-1b", "data.seq=4096", "data.micro_batch=4", BF16, COMPILE, "parallel.recompute=selective"],
        ["qwen3-0.6b", "data.seq=2048", "data.micro_batch=8", BF16, COMPILE],
    ],
}  # fmt: skip


def on_device(device: torch.device) -> Source:
    """Weights drawn where they stay: their values do not matter here, and a CPU takes half a minute for a billion."""

    def whole(name: str, shape: torch.Size) -> Tensor:
        weight = torch.empty(shape, device=device)
        return weight.fill_(1.0) if "norm" in name else weight.normal_(0.0, 0.02)

    return whole


def train_steps(spec: RunSpec, device: torch.device, steps: int) -> tuple[int, list[float]]:
    """What the trainer does in a step: (peak bytes, seconds of each step)."""
    peak = PeakMemory(device)
    laid = lay_out(spec, None, device, on_device(device) if device.type == "cuda" else source_of(spec))
    optimizer = make_optimizer(laid.shards, spec.optim, spec.precision, spec.seed)
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


def measure(case: list[str], device: str, steps: int) -> dict[str, Any]:
    before = torch.cuda.memory_allocated() if device == "cuda" else 0  # cuBLAS's workspaces, from the second case on
    measured, seconds = train_steps(spec_of(case, device), torch.device(device), steps)
    found: dict[str, Any] = {"case": " ".join(case), "memory": measured, "memory_before": before}
    if device == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved()
    return found | {"step": statistics.median(seconds[3:]), "step_best": min(seconds)}


def predict(measured: dict[str, Any], device: str, machine: Machine | None, gpu: str) -> dict[str, Any]:
    """What the planner says of the case; `machine` is what was measured of this one, `gpu` its name."""
    spec = spec_of(measured["case"].split(), device)
    sheet = memory(spec, device)
    found = {key: value for key, value in measured.items() if key not in ("step_predicted", "parts")}
    found |= {"memory_predicted": sheet.total, "memory_moment": sheet.moment}
    if machine is not None:
        predicted = step_time(spec, machine)
        found |= {"step_predicted": predicted.total, "parts": predicted.parts}
    kind = recognise(gpu) if device == "cuda" else None
    if kind is not None:  # what is said of it without it
        host = (machine.launch_s if machine else TAKEN_LAUNCH) / USUAL_LAUNCH
        modelled = price(Case.of(spec, kind).replace(host=host))
        found |= {"reserved_predicted": float(reserved(sheet.total)), "step_modelled": float(modelled.seconds)}
        found |= {"parts_modelled": {part: float(s) for part, s in modelled.parts.items() if np.any(s)}}
        found |= {"interval": [float(end) for end in modelled.interval]}
    return found


def spec_of(case: list[str], device: str) -> RunSpec:
    return load_run(case[0], [*case[1:], f"cluster.device={device}"])


def one_process(cases: list[list[str]], steps: int) -> Iterator[dict[str, Any]]:
    """Every case on the GPU in turn; nothing of one is left for the next."""
    for case in cases:
        try:
            yield measure(case, "cuda", steps)
        except torch.OutOfMemoryError as error:
            print(f"failed: {' '.join(case)}\n{error}")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def own_processes(cases: list[list[str]], steps: int) -> Iterator[dict[str, Any]]:
    for case in cases:
        command = [sys.executable, __file__, "--steps", str(steps), "--one", *case]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            print(f"failed: {' '.join(case)}\n{answer.stderr[-1500:]}")
            continue
        yield json.loads(answer.stdout.splitlines()[-1])


def error(found: dict[str, Any], predicted: str, measured: str) -> str:
    return f"{found[predicted] / found[measured] - 1:+8.1%}" if predicted in found else 8 * " "


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['memory'] / 1e6:10.1f} {error(found, 'memory_predicted', 'memory')} {found['step'] * 1e3:8.1f} "
        f"{error(found, 'step_predicted', 'step')} {error(found, 'step_modelled', 'step')}   {found['case']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--again", type=Path, help="a file of results whose cases are predicted again, and rewritten")
    parser.add_argument("--one", nargs="+", help="one case: SPEC [section.key=value …]; prints JSON")
    options = parser.parse_args()
    if options.again:
        repeat(options.again, options.device)
        return
    device, name = options.device, torch.cuda.get_device_name() if options.device == "cuda" else ""
    if options.one:
        measured = measure(options.one, device, options.steps)
        print(json.dumps(predict(measured, device, probe(torch.device(device)), name)))
        return
    print(f"{'memory MB':>10} {'error':>8} {'step ms':>8} {'error':>8} {'by model':>8}   case")
    results = []
    cases = CASES[device]
    machine = probe(torch.device(device)) if device == "cuda" else None
    for measured in one_process(cases, options.steps) if device == "cuda" else own_processes(cases, options.steps):
        found = predict(measured, device, machine, name) if device == "cuda" else measured
        show(found)
        results.append(found)
        if options.save:  # after each case: nothing is lost when a lent machine goes
            probed = {"probe": Profile(machine).to_dict()} if machine else {}
            write_result(f"plan_check_{device}", {"cases": results, **probed})


def repeat(path: Path, device: str) -> None:
    """Measurements stay, and so does what the machine was measured to do; only the planner is asked again."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    machine = Profile.from_dict(kept["probe"]).machine if "probe" in kept else None
    kept["cases"] = [predict(case, device, machine, kept["machine"]["gpu"] or "") for case in kept["cases"]]
    for found in kept["cases"]:
        show(found)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kind = recognise(kept["machine"]["gpu"] or "")
    if device == "cuda" and kind is not None and kind.name == OWN_GPU:
        launch_s = kept["probe"]["machine"]["launch_s"] if "probe" in kept else TAKEN_LAUNCH
        publish(kept["cases"], kind.name, 1e6 * launch_s, f"torch {kept['machine']['torch']}")


def publish(cases: list[dict[str, Any]], gpu: str, launch_us: float, torch_version: str) -> None:
    """The measurements as a source of `lmworks plan validate` and of fit_time.py; `launch_us` tells of the host.

    What a case lists as outdated was measured before the code changed, and is left out.
    """
    lines = ["run,gpu,launch_us,step_s,allocated_bytes,note"]
    for case in cases:
        old = case.get("outdated", ())
        if len(old) == 2:
            continue
        step, memory = "" if "step" in old else f"{case['step']:.6f}", "" if "memory" in old else case["memory"]
        lines.append(f"{case['case']},{gpu},{launch_us:.2f},{step},{memory},{torch_version}")
    (PUBLISHED / "lmworks_h200.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
