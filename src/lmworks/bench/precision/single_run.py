"""One training of the precision study, in its own process: memory and failures are isolated.

`python -m lmworks.bench.precision.single_run FOLDER NAME` trains FOLDER/NAME.toml in the run folder FOLDER/NAME,
resumes it if it was stopped, times steps interleaved with fp32, and writes the results to FOLDER/NAME.json.

The trainer is that of `lmworks train` with an inspection at each of `inspected_steps`: the optimizer's update is
compared with the exact one, and, on the next batch, gradients with those of the same weights in fp32. Results are lines
of looked.jsonl. The run itself is not changed: copies are inspected, and gradients are dropped again.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...data import Batch
from ...kernels.training.adamw import join_master
from ...kernels.training.float8 import has_fp8_matmul
from ...model import GPT
from ...model.moe import moe_layers
from ...parallel.parallel_model import ParallelModel
from ...record import MetricsWriter, RunFolder
from ...report.run_report import write_report
from ...spec import LMWorksError, OptimSpec, PrecisionSpec, RunSpec, load_run
from ...spec.files import write_whole
from ...train import Trainer
from ...train.device import pick_device
from ...train.health.stats import row_of
from ...train.rank_memory import read_resident
from ...train.signals import Interrupted
from ..kernel_timing import device_name
from ..train import time_interleaved_steps
from .tensor_formats import RoundingStats
from .variants import BASE, inspected_steps

INSPECTION_FILE = "looked.jsonl"
GRADIENT_SUMS = ("elements", "flushed", "nonfinite", "error", "square")  # sums over gradients; the last two: of squares


class InstrumentedTrainer(Trainer):
    def build(self) -> None:
        super().build()
        self.inspected_steps = inspected_steps(self.spec.optim.steps)
        self.seen: dict[str, Any] = {}

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        probe = UpdateProbe(self) if self.step + 1 in self.inspected_steps else None
        with probe or nullcontext():
            values = super().train_step(batches)
        self.seen = probe.found if probe else {}
        return values

    def next_batches(self) -> Sequence[Batch] | None:
        """No async step before an inspected one: gradients are inspected between two steps."""
        return None if self.step + 1 in self.inspected_steps else super().next_batches()

    def report(self, values: dict[str, Any]) -> None:
        super().report(values)
        if self.step in self.inspected_steps:
            self.seen["gradients"], self.seen["formats"] = compare_gradients(self)
            with MetricsWriter(self.folder.path / INSPECTION_FILE, self.attempt) as lines:
                lines.write(self.step, self.seen)


# --- the update -----------------------------------------------------------------------------------------


class UpdateProbe:
    """`found` after the step: bytes held before the update, and how much of the update the weights took up.

    unmoved: share of weights that should have changed and did not. kept: the actual update projected on the exact one;
    1 is all of it. Rounding to nearest loses what is below half a unit in the last place. Stochastic rounding leaves
    most weights unchanged, and still keeps 1 in the mean.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}
        self.before: list[Tensor] = []

    def __enter__(self) -> Self:
        optimizer = self.trainer.optimizer
        self.handles = (
            optimizer.register_step_pre_hook(self.compare_gradients),
            optimizer.register_step_post_hook(self.compare),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def compare_gradients(self, *_: Any) -> None:
        self.found["held"] = asdict(read_resident(self.trainer))
        self.before = [full_precision_weight(self.trainer.optimizer, leaf) for leaf in self.leaves()]

    @torch.no_grad()
    def compare(self, *_: Any) -> None:
        if self.trainer.spec.optim.optimizer != "adamw":  # SGD has no state from which to compute the update
            return
        optimizer, sums = self.trainer.optimizer, torch.zeros(4, dtype=torch.float64)
        groups = {leaf: group for group in optimizer.param_groups for leaf in group["params"]}
        for leaf, before in zip(self.leaves(), self.before, strict=True):
            made = full_precision_weight(optimizer, leaf).double() - before.double()
            due = expected_update(self.trainer.spec.optim, optimizer.state[leaf], groups[leaf], before)
            moving = due != 0
            sums += torch.stack(
                [moving.sum(), (moving & (made == 0)).sum(), (made * due).sum(), due.square().sum()]
            ).cpu()
        moving, unmoved, along, square = sums.tolist()
        if unmoved < moving:  # else the step was skipped: loss scale overflow
            self.found["update"] = {"unmoved": unmoved / moving, "kept": along / square}

    def leaves(self) -> list[Tensor]:
        return [shard.leaf for shard in self.trainer.parallel_model.shards if shard.leaf.grad is not None]


def full_precision_weight(optimizer: torch.optim.Optimizer, leaf: Tensor) -> Tensor:
    """A copy of the weight with all bits that the optimizer keeps of it."""
    low = optimizer.state[leaf].get("low") if leaf in optimizer.state else None
    return leaf.detach().to(torch.float32, copy=True) if low is None else join_master(leaf.detach(), low)


def expected_update(optim: OptimSpec, state: dict[str, Any], group: dict[str, Any], before: Tensor) -> Tensor:
    """AdamW's update from its moments after the step."""
    steps, rate = float(state["step"]), float(group["lr"])
    mean = state["exp_avg"].double() / (1 - optim.beta1**steps)
    spread = (state["exp_avg_sq"].double() / (1 - optim.beta2**steps)).sqrt()
    return -rate * (mean / (spread + optim.eps) + group["weight_decay"] * before.double())


# --- the gradients --------------------------------------------------------------------------------------


def compare_gradients(trainer: Trainer) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Gradients of the next batch in the run's precision against fp32, by part of the model; for an fp32 run, the
    rounding errors of its tensors in other formats."""
    batches, before = trainer.batches.at(trainer.cursor), trainer.batches.at(trainer.cursor - 1)
    tokens = max(1, trainer.count(batches).tokens)
    reference = in_fp32(trainer)
    if trainer.spec.precision == reference.spec.precision:
        census = RoundingStats()
        with census.largest(reference.parts[0]):
            reference.forward_backward(before, 1 / tokens)
        with census.counting(reference.parts[0]):
            reference.forward_backward(batches, 1 / tokens)
        return {}, census.to_dict()
    reference.forward_backward(batches, 1 / tokens)
    scale = trainer.loss_scale.scale
    trainer.parallel_model.forward_backward(batches, scale / tokens)
    trainer.parallel_model.finish()
    exact = {shard.name: shard.leaf.grad for shard in reference.shards}
    found: dict[str, Tensor] = {}
    for shard in trainer.parallel_model.shards:
        own, truth = shard.leaf.grad, exact[shard.name]
        if own is not None and truth is not None:
            part = row_of(shard.name)
            found[part] = found.get(part, torch.zeros(len(GRADIENT_SUMS), dtype=torch.float64)) + gradient_loss(
                own, truth, scale
            )
    trainer.parallel_model.zero_grad()
    for moe in moe_layers(trainer.model):
        moe.expert_counts = None  # routing of tokens that were not trained on
    return {part: sums.tolist() for part, sums in found.items()}, {}


def in_fp32(trainer: Trainer) -> ParallelModel:
    """The current model of the run, in fp32."""
    model = GPT(trainer.spec.model).to(trainer.device)
    model.load_state_dict(trainer.model.state_dict())  # copies into fp32
    return ParallelModel.from_model(model, trainer.spec.replace(precision=PrecisionSpec()))


@torch.no_grad()
def gradient_loss(own: Tensor, exact: Tensor, scale: float) -> Tensor:
    """GRADIENT_SUMS of one weight; `scale`: the loss scale."""
    finite = own.isfinite()
    off = torch.where(finite, own.double() / scale - exact.double(), 0.0)
    flushed = (own == 0) & (exact != 0)
    sums = own.numel(), flushed.sum(), (~finite).sum(), off.square().sum(), exact.double().square().sum()
    return torch.tensor([float(one) for one in sums], dtype=torch.float64)


# --- single run ------------------------------------------------------------------------------------------


ROUNDS = 10  # of interleaved steps


def train_one(folder: Path, name: str, force: bool = False) -> None:
    """The result or error goes to NAME.json. An interrupt stops the whole study."""
    spec, result = load_run(str(folder / f"{name}.toml")), folder / f"{name}.json"
    try:
        train(folder / name, spec, force)
        found = {**facts(spec), "seconds": interleaved_seconds(folder, name, spec)}
    except Interrupted:
        raise
    except LMWorksError as error:
        found = {"error": str(error)}
    except (
        RuntimeError,
        ImportError,
        NotImplementedError,
    ) as error:  # the format is not supported by this device or torch
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    write_whole(result, json.dumps(found, indent=2))


def train(folder: Path, spec: RunSpec, force: bool = False) -> None:
    begun = RunFolder(folder).spec_path.exists()
    trainer = (
        InstrumentedTrainer.resume(folder, force=force) if begun else InstrumentedTrainer(spec, folder, force=force)
    )
    trainer.run()
    write_report(trainer.folder)


def facts(spec: RunSpec) -> dict[str, Any]:
    """Device, threads and versions."""
    device = pick_device(spec.cluster)
    name = device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "device": f"{name}, PyTorch {torch.__version__}",
        "kind": device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "emulated": spec.precision.dtype == "fp8" and not has_fp8_matmul(device),  # same rounding, but slow
    }


def interleaved_seconds(folder: Path, name: str, spec: RunSpec) -> dict[str, list[float]]:
    """Seconds of interleaved steps of this variant and fp32; {} for fp32 itself."""
    if name == BASE.name:
        return {}
    base = load_run(str(folder / f"{BASE.name}.toml"))
    with tempfile.TemporaryDirectory(prefix="lmworks-study-") as scratch:
        return time_interleaved_steps(0, {BASE.name: base, name: spec}, Path(scratch), ROUNDS)


if __name__ == "__main__":
    folder, name, *force = sys.argv[1:]
    try:
        train_one(Path(folder), name, force == ["--force"])
    except LMWorksError as error:
        print(f"lmworks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
