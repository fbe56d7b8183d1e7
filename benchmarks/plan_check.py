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
import csv
import gc
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from common import RESULTS, write_result
from torch import Tensor

from lmworks.bench.calibrate import probe
from lmworks.data import Batch
from lmworks.kernels.dispatch import nearest
from lmworks.parallel.initial_weights import Source, source_of
from lmworks.parallel.parallelize import parallelize
from lmworks.plan import software
from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine
from lmworks.plan.devices.profile import Profile
from lmworks.plan.memory.reserve import reserved
from lmworks.plan.memory.sheet import memory
from lmworks.plan.policies import policies
from lmworks.plan.software import as_measured, software_of
from lmworks.plan.step.constants import REFERENCE_LAUNCH_S
from lmworks.plan.step.one_device import step_time
from lmworks.plan.step.price import price
from lmworks.spec import RunSpec, load_run
from lmworks.spec.hardware import recognise
from lmworks.train.device import PeakMemory
from lmworks.train.optim import make_optimizer
from lmworks.train.step_scalars import squared_norm

sys.path.insert(0, str(Path(__file__).parents[1] / "validation"))
from lmworks_validation.sources import PUBLISHED

OWN_GPU = "H200-SXM-141GB"  # whose runs are a source
OWN_RUNS = PUBLISHED / "lmworks_h200.csv"
WHOLE = "lmworks bench train"  # runs of the trainer, not of bare steps
BEFORE = {"loss": "torch", "clips": 3}  # what cases were run with that do not say it
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
    parallel_model = parallelize(spec, None, device, on_device(device) if device.type == "cuda" else source_of(spec))
    optimizer = make_optimizer(parallel_model.shards, spec.model, spec.optim, spec.precision, spec.seed)
    shape = (spec.data.micro_batch, spec.data.seq)
    tokens = torch.randint(0, spec.model.vocab, shape, device=device)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        parallel_model.forward_backward([Batch(tokens, tokens)] * spec.accumulation, 1 / spec.tokens_per_step)
        norm = squared_norm(parallel_model.shards, parallel_model.replicas).sqrt()
        optimizer.grad_scale = norm.clamp(min=1.0)  # type: ignore[attr-defined]  # as the trainer clips
        optimizer.step()
        parallel_model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return peak.read(), seconds


def measure(case: list[str], device: str, steps: int) -> dict[str, Any]:
    before = torch.cuda.memory_allocated() if device == "cuda" else 0  # cuBLAS's workspaces, from the second case on
    spec = spec_of(case, device)
    measured, seconds = train_steps(spec, torch.device(device), steps)
    found: dict[str, Any] = {"case": " ".join(case), "memory": measured, "memory_before": before}
    found |= {"loss": loss_of(spec, torch.cuda.get_device_name() if device == "cuda" else device)}
    found |= {"clips": software_of(spec).clip_passes}
    if device == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved()
    return found | {"step": statistics.median(seconds[3:]), "step_best": min(seconds)}


def loss_of(spec: RunSpec, name: str) -> str:
    """Whose loss a device of this name runs, "torch" or "triton"."""
    shape = {"hidden": spec.model.hidden, "tokens": spec.data.micro_batch * spec.data.seq, "vocab": spec.model.vocab}
    return nearest("linear_cross_entropy", name, tuple(sorted(shape.items())))


@contextmanager
def planned_with(loss: str) -> Iterator[None]:
    """The planner as when our trainer had this loss: runs that were measured before are priced as they ran."""
    now = software.IN_PLACE
    software.IN_PLACE = loss == "triton"
    try:
        yield
    finally:
        software.IN_PLACE = now


def predict(measured: dict[str, Any], device: str, machine: Machine | None, gpu: str) -> dict[str, Any]:
    """What the planner says of the case; `machine` is what was measured of this one, `gpu` its name."""
    spec, ran = spec_of(measured["case"].split(), device), BEFORE | measured
    with planned_with(ran["loss"]):
        sheet = memory(spec, device)
        predicted = step_time(spec, machine) if machine is not None else None
    found = {key: value for key, value in measured.items() if key not in ("step_predicted", "parts")}
    found |= {"memory_predicted": sheet.total, "memory_moment": sheet.moment}
    if predicted is not None:
        found |= {"step_predicted": predicted.total, "parts": predicted.parts}
    kind = recognise(gpu) if device == "cuda" else None
    if kind is not None:  # what is said of it without it
        host = (machine.launch_s if machine else TAKEN_LAUNCH) / REFERENCE_LAUNCH_S
        case = Case.of(spec, kind).replace(host=host)
        modelled = price(case.replace(software=as_measured(case.software, ran["loss"], ran["clips"])))
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
        cases = [case_line(case, launch_s, f"torch {kept['machine']['torch']}") for case in kept["cases"]]
        publish([*filter(None, cases), *train_lines(RESULTS / "train_gpu.json")])


COLUMNS = ("run", "gpu", "launch_us", "loss", "clips", "blocks", "step_s", "allocated_bytes", "note")


def publish(lines: Iterable[dict[str, Any]]) -> None:
    """The measurements as a source of `lmworks plan validate` and of fit_time.py; `launch_us` tells of the host."""
    text = [",".join(COLUMNS), *(",".join(str(line[name]) for name in COLUMNS) for line in lines)]
    OWN_RUNS.write_text("\n".join(text) + "\n", encoding="utf-8")


def case_line(case: dict[str, Any], launch_s: float, note: str) -> dict[str, Any] | None:
    """What a case lists as outdated was measured before the code changed, and is left out."""
    old, ran = case.get("outdated", ()), BEFORE | case
    if len(old) == 2:
        return None
    step, held = "" if "step" in old else f"{case['step']:.6f}", "" if "memory" in old else case["memory"]
    found = {"run": case["case"], "gpu": OWN_GPU, "launch_us": f"{1e6 * launch_s:.2f}", "note": note}
    return found | {"loss": ran["loss"], "clips": ran["clips"], "blocks": "", "step_s": step, "allocated_bytes": held}


def train_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole runs of the trainer, as train_gpu.py keeps them, after those that are published already.

    These stay as they were written, also where they were measured again since: what a budget asked of the blocks, or
    which loss was faster, may be another today.
    """
    with OWN_RUNS.open(encoding="utf-8", newline="") as lines:
        written = [line for line in csv.DictReader(lines) if line["note"].endswith(WHOLE)]
    yield from written
    known = {(line["run"], line["step_s"]) for line in written}
    kept = json.loads(path.read_text(encoding="utf-8"))
    for row in kept["rows"]:
        if "spec" not in row or "step_s" not in row:  # a peer's, or one that failed
            continue
        spec = load_run(row["spec"][0], [*row["spec"][1:], f"cluster.gpu={OWN_GPU}"])
        chosen = Counter(policies(spec, range(spec.model.layers))) if spec.parallel.recompute == "budget" else {}
        blocks = " ".join(f"{policy}={count}" for policy, count in chosen.items() if policy != "none")
        found = {"run": " ".join(row["spec"]), "gpu": OWN_GPU, "launch_us": f"{1e6 * TAKEN_LAUNCH:.2f}"}
        found |= {"loss": loss_of(spec, row["device"]), "clips": software_of(spec).clip_passes, "blocks": blocks}
        found |= {"step_s": f"{row['step_s']:.6f}", "allocated_bytes": row["memory"]["allocated_bytes"]}
        if (found["run"], found["step_s"]) not in known:
            yield found | {"note": f"torch {kept['machine']['torch']} {WHOLE}"}


if __name__ == "__main__":
    main()
