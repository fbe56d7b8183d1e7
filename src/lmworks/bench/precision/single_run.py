"""One training of the study, in a process of its own: its memory is then its own, and so is its failure.

`python -m lmworks.bench.precision FOLDER NAME` trains FOLDER/NAME.toml in the run folder FOLDER/NAME, goes on with it
where it was stopped, takes steps in turns with fp32, and leaves what it learnt in FOLDER/NAME.json.
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
from ..interleaved_steps import take_turns
from ..kernel_timing import device_name
from .instrumented_run import Watched
from .variants import BASE

ROUNDS = 10  # of steps in turns


def train_one(folder: Path, name: str, force: bool = False) -> None:
    """What came of it is in NAME.json, the reason of a failure too. Whoever stops it stops the study."""
    spec, result = load_run(str(folder / f"{name}.toml")), folder / f"{name}.json"
    try:
        train(folder / name, spec, force)
        found = {**facts(spec), "seconds": pace(folder, name, spec)}
    except Interrupted:
        raise
    except LMWorksError as error:
        found = {"error": str(error)}
    except (RuntimeError, ImportError, NotImplementedError) as error:  # a format that this device or torch has not
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    write_whole(result, json.dumps(found, indent=2))


def train(folder: Path, spec: RunSpec, force: bool = False) -> None:
    begun = RunFolder(folder).spec_path.exists()
    trainer = Watched.resume(folder, force=force) if begun else Watched(spec, folder, force=force)
    trainer.run()
    write_report(trainer.folder)


def facts(spec: RunSpec) -> dict[str, Any]:
    """Where it ran."""
    device = pick_device(spec.cluster)
    name = device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    return {
        "device": f"{name}, PyTorch {torch.__version__}",
        "kind": device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "emulated": spec.precision.dtype == "fp8" and not has_products(device),  # rounded as it would be, and slow
    }


def pace(folder: Path, name: str, spec: RunSpec) -> dict[str, list[float]]:
    """Seconds of steps that this precision and fp32 took in turns; {} for fp32 itself."""
    if name == BASE.name:
        return {}
    base = load_run(str(folder / f"{BASE.name}.toml"))
    with tempfile.TemporaryDirectory(prefix="lmworks-study-") as scratch:
        return take_turns(0, {BASE.name: base, name: spec}, Path(scratch), ROUNDS)
