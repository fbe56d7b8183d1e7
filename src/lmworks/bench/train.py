"""Training throughput of a spec on this machine: the trainer's own steps, each figure beside its limit.

Warm-up, then the mean of some steps, from the end of one to the end of the next, so that host work between steps and
waits of the device are included. The mean and not the median: with an asynchronous host, single steps end irregularly
and only their sum is exact. The result has the roofline of the work (`roofline`) and the planner's prediction beside
it. Weights are initialised on the device: a CPU takes minutes for billions of them. Nothing is saved or evaluated. A
spike counts as any other step; a loss that is not finite is an error.

Interleaved steps of several specs on the same ranks, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from ..data.progress import Progress, silent
from ..parallel.initial_weights import Source
from ..parallel.profiler import recorder
from ..parallel.world import collective_error
from ..plan.devices.machine import Machine
from ..plan.memory.host_need import gib
from ..plan.memory.reserve import reserved
from ..plan.predict import Prediction, StepFlops, predict, step_flops
from ..record.oom import OutOfMemory
from ..spec import RunSpec, SpecError, TrainingError
from ..train import Trainer
from ..train.device import find_gpu
from ..train.health.bad_step import StepRejected
from ..train.oom import with_oom_report
from ..train.prefetcher import Prefetcher
from ..train.rank_memory import train_one_step
from .calibrate import cached_machine, probe
from .kernel_timing import device_name, memory_bytes
from .power import monitor_power
from .roofline import PeakRates, datasheet_peak_rates, measured_peak_rates, step_roofline

WARM_UP = 3  # steps: the first compiles and makes optimizer states, the second and third may compile again
PROFILE_ROWS = 60  # kernels in the table of a profile


def bench_train(
    spec: RunSpec, steps: int = 20, *, kernels: bool = False, force: bool = False, progress: Progress = silent
) -> dict[str, Any] | None:
    """Called on every rank; rank 0 gets the result.

    `kernels`: also the kernels of a profiled step. `force`: skip the check of memory.
    """
    spec = with_default_data(without_async_saves(tolerate_bad_steps(spec)))
    with tempfile.TemporaryDirectory(prefix="lmworks-bench-") as folder:
        trainer = Trainer(spec, Path(folder) / "run", quiet=True, force=force)
        device = trainer.device
        progress(f"measuring products and memory of {device_name(device)}", 0, 0)
        peak_rates = [measured_peak_rates(device, spec.precision.dtype)] if trainer.is_rank_zero else []
        try:
            measured = with_oom_report(trainer.describe_oom, lambda: time_steps(trainer, steps, kernels, progress))
        except OutOfMemory as error:
            error.args = (
                f"{error}; {device_name(device)} has {gib(memory_bytes(device))}: lower data.micro_batch, or use "
                "parallel.recompute=selective or precision.weights=bf16",
            )
            raise
        except StepRejected as refused:
            raise collective_error(
                TrainingError(
                    f"step {trainer.step + 1}: {refused.issue.what}{refused.issue.where}; a diverged run cannot "
                    "be timed: lower optim.lr, or use a wider precision.dtype"
                )
            ) from None
    gpu = find_gpu(spec.cluster, device)
    if gpu is not None:
        peak_rates.append(datasheet_peak_rates(gpu))
    return results_of(trainer, measured, peak_rates) if trainer.is_rank_zero else None


def tolerate_bad_steps(spec: RunSpec) -> RunSpec:
    """Log spikes, and report non-finite steps here: there is no run to rewind or resume."""
    actions = {"spike_loss": "log", "spike_grad": "log"}
    if spec.parallel.engine == "native":  # DeepSpeed can only stop
        actions["nonfinite"] = "skip"
    return spec.replace(health=spec.health.replace(**actions))


def without_async_saves(spec: RunSpec) -> RunSpec:
    """No host memory for staging copies: nothing is saved."""
    return spec.replace(checkpoint=spec.checkpoint.replace(asynchronous=False))


def with_default_data(spec: RunSpec) -> RunSpec:
    """The embedded corpus if the spec names no data: speed does not depend on it."""
    return spec if spec.data.named else spec.replace(data=spec.data.replace(path="stdlib:bytes"))


def time_steps(trainer: Trainer, steps: int, kernels: bool, progress: Progress = silent) -> dict[str, Any]:
    """Build, warm up, time."""
    device = trainer.device
    if not trainer.spec.checkpoint.init:
        trainer.weights = weights_on_device(device, trainer.spec.seed)
    began = time.perf_counter()
    progress(f"building {trainer.spec.model.params:,} parameters on {device_name(device)}", 0, 0)
    trainer.build()
    total = WARM_UP + steps + 1  # the last step launches no next one and ends sooner, so it is not timed
    losses, ends, waits = [], [], []
    prefetcher = Prefetcher(trainer.batches, trainer.spec.data.workers, device)
    with closing(prefetcher) as trainer.prefetcher, monitor_power(device) as power:
        for number in range(total):
            with ExitStack() as stack:
                if number == WARM_UP and device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                recorded = None
                if kernels and number == total - 1:
                    trainer.launcher.discard()  # profile exactly one step
                    recorded = stack.enter_context(start_profiler(device))
                losses.append(one_step(trainer, total - number))
            ends.append(time.perf_counter())
            if number < WARM_UP:
                progress("warm-up", number + 1, WARM_UP)
            else:
                progress("timing", number + 1 - WARM_UP, total - WARM_UP)
            waits.append(trainer.reader.waited)
    timed = ends[WARM_UP - 1 : WARM_UP + steps]
    seconds = [after - before for before, after in pairwise(timed)]
    found = {"warm_up_s": ends[WARM_UP - 1] - began, "seconds": seconds, "losses": losses}
    found["waited"] = statistics.median(waits[WARM_UP : WARM_UP + steps])
    found["power"] = power.between(timed[0], timed[-1])
    found["allocated"] = trainer.memory.read()
    found["reserved"] = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    if recorded is not None:
        found["kernels"] = kernel_table(recorded, device, statistics.mean(seconds))
    return found


def one_step(trainer: Trainer, left: int) -> float:
    """One step of the training loop, which launches the passes of the next one; returns the loss."""
    assert trainer.prefetcher is not None
    values = trainer.train_step(trainer.prefetcher.take(trainer.cursor, left))
    trainer.step += 1
    trainer.cursor += 1
    return float(values["loss"])


def weights_on_device(device: torch.device, seed: int) -> Source:
    """Initial weights of the usual scale, made on the device; equal on all ranks that hold the same weight."""
    generator = torch.Generator(device)

    def whole(name: str, shape: torch.Size) -> Tensor:
        weight = torch.empty(shape, device=device)
        if "norm" in name:
            return weight.fill_(1.0)
        return weight.normal_(0.0, 0.02, generator=generator.manual_seed(seed + zlib.crc32(name.encode())))

    return whole


# --- results --------------------------------------------------------------------------------------------


def results_of(trainer: Trainer, measured: dict[str, Any], peak_rates: list[PeakRates]) -> dict[str, Any]:
    spec, device = trainer.spec, trainer.device
    step_s = statistics.mean(measured["seconds"])
    flops = step_flops(spec)
    facts: dict[str, Any] = {
        "name": spec.name,
        "device": device_name(device),
        "ranks": spec.parallel.world,
        "dtype": spec.precision.dtype,
        "params": spec.model.params,
        "tokens_per_step": flops.tokens,
        "steps": len(measured["seconds"]),
        "step_s": step_s,
        "step_s_range": [min(measured["seconds"]), max(measured["seconds"])],
        "warm_up_s": measured["warm_up_s"],
        "host_waits": measured["waited"] / step_s if device.type == "cuda" else None,  # a share of the step
        "tokens_per_s": flops.tokens / step_s,
        "model_tflops": flops.model / step_s / spec.parallel.world / 1e12,
        **utilisation(trainer.peak_flops, flops, step_s, spec.parallel.world),
        "memory": {
            "allocated_bytes": measured["allocated"],
            "reserved_bytes": measured["reserved"],
            "device_bytes": memory_bytes(device),
        },
        "floors": {
            one.source: step_roofline(spec, one, device.type).to_dict(flops.tokens, step_s) for one in peak_rates
        },
        "power": measured["power"],  # of the first rank's card
        "predicted": compare_prediction(spec, device, step_s, measured),
        "losses": measured["losses"],
    }
    return facts | ({"kernels": measured["kernels"]} if "kernels" in measured else {})


def utilisation(peak: float | None, flops: StepFlops, step_s: float, world: int) -> dict[str, float | None]:
    """MFU and HFU: FLOPs of the model, and with recomputation, over the datasheet's peak."""
    shares = {"mfu": flops.model, "hfu": flops.hardware}
    return {name: done / step_s / world / peak if peak else None for name, done in shares.items()}


def compare_prediction(spec: RunSpec, device: torch.device, step_s: float, measured: dict[str, Any]) -> dict[str, Any]:
    """The planner's prediction and its relative error: +0.1 is 10 % too much."""
    try:
        prediction = predict_here(spec, device)
    except SpecError as error:  # no prediction for this spec
        return {"note": str(error)}
    seconds, total = prediction.time.total if prediction.time else None, prediction.memory.total
    facts: dict[str, Any] = {"step_s": seconds, "step_error": seconds / step_s - 1 if seconds else None}
    added = measured["allocated"]  # 0 on a CPU if the process had freed as much before
    facts |= {"allocated_bytes": total, "allocated_error": total / added - 1 if added else None}
    if measured["reserved"]:
        predicted_reserved = float(reserved(total))
        facts |= {"reserved_bytes": predicted_reserved, "reserved_error": predicted_reserved / measured["reserved"] - 1}
    facts |= {"interval": list(prediction.time.interval) if prediction.time else None}
    facts |= {"quiet": prediction.machine.quiet, "noise": prediction.machine.noise} if prediction.machine else {}
    by = prediction.machine.tag if prediction.machine else None
    return facts | {"by": by, "parts": prediction.time.parts if prediction.time else None}


def predict_here(spec: RunSpec, device: torch.device) -> Prediction:
    """By the fitted model of a known GPU, else by measured rates of this machine."""
    gpu = find_gpu(spec.cluster, device)
    if gpu is None:
        machine = cached_machine(spec.cluster) or probe(device)
        return predict(spec, machine)
    named = spec.replace(cluster=spec.cluster.replace(gpu=gpu.name, device="cuda"))
    return predict(named, Machine.of(gpu))


# --- a profile ------------------------------------------------------------------------------------------


def start_profiler(device: torch.device) -> profile:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # earlier launches do not belong to it
    return recorder(device)


def kernel_table(recorded: profile, device: torch.device, step_s: float) -> dict[str, Any]:
    """Kernels (on a CPU: ops) of one step by their own time, and their share of a mean step."""
    cuda = device.type == "cuda"
    rows = [
        {"name": one.key, "count": one.count, "seconds": took / 1e6}
        for one in recorded.key_averages()
        if (took := one.self_device_time_total if cuda else one.self_cpu_time_total) > 0
        and (not cuda or (one.device_type.name == "CUDA" and not one.is_user_annotation))
    ]
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    busy = sum(row["seconds"] for row in rows)
    return {"busy_s": busy, "busy_share": busy / step_s, "rows": rows[:PROFILE_ROWS]}


# --- interleaved steps -----------------------------------------------------------------------------------


def time_interleaved_steps(rank: int, specs: dict[str, RunSpec], folder: Path, rounds: int) -> dict[str, list[float]]:
    """For `on_ranks`, or one process: seconds of each spec's step in every round, measured to the slowest rank."""
    trainers = {}
    for name, spec in specs.items():
        trainers[name] = Trainer(
            spec, folder / name.replace(" ", "-"), quiet=True, force=True
        )  # the caller checks memory for all of them
        trainers[name].build()
    seconds: dict[str, list[float]] = {name: [] for name in specs}
    names = list(specs)
    for index in range(WARM_UP + rounds):
        first = index % len(names)  # rotate the order: none always follows the same one
        for name in names[first:] + names[:first]:
            synchronize(trainers[name].device)
            began = time.perf_counter()
            train_one_step(trainers[name])
            synchronize(trainers[name].device)
            if index >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
