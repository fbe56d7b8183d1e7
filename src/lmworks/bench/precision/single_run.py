"""One training of the precision study, in its own process: memory and failures are isolated.

`python -m lmworks.bench.precision FOLDER NAME` trains FOLDER/NAME.toml in the run folder FOLDER/NAME, resumes it if it
was stopped, times steps interleaved with fp32, and writes the results to FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from ...kernels.training.float8 import has_products
from ...record import RunFolder
from ...report.run_report import write_report
from ...spec import LMWorksError, RunSpec, load_run
from ...spec.files import write_whole
from ...train.device import pick_device
from ...train.signals import Interrupted
from ..interleaved_steps import time_interleaved_steps
from ..kernel_timing import device_name
from .instrumented_run import InstrumentedTrainer
from .variants import BASE

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
        "emulated": spec.precision.dtype == "fp8" and not has_products(device),  # same rounding, but slow
    }


def interleaved_seconds(folder: Path, name: str, spec: RunSpec) -> dict[str, list[float]]:
    """Seconds of interleaved steps of this variant and fp32; {} for fp32 itself."""
    if name == BASE.name:
        return {}
    base = load_run(str(folder / f"{BASE.name}.toml"))
    with tempfile.TemporaryDirectory(prefix="lmworks-study-") as scratch:
        return time_interleaved_steps(0, {BASE.name: base, name: spec}, Path(scratch), ROUNDS)
