"""Calibration: measure the kernels of this machine, and collectives between its ranks, for later plans.

`lmworks plan calibrate` takes a minute or two. The first plan on a machine takes a few seconds: no collectives, fewer
sizes of the same kernels (`bench/probe.py` caches the result).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.progress import Progress, silent
from ..plan.devices.curves import wire_share
from ..plan.devices.profile import Profile
from ..spec import SpecError, recognise
from ..spec.files import refuse_unwritable, write_whole
from .calibration_sizes import FULL, QUICK
from .collectives import group_sizes, measure_collectives
from .kernel_timing import device_name, digits, measure

SECONDS = {"cpu": 60.0, "cuda": 90.0}  # total, approximate; a slow or busy machine may take twice as long
QUICK_SECONDS = 5.0
COLLECTIVES_SHARE = 0.25  # of the time
MAX_CPU_RANKS = 8  # or as many as there are cores


def calibrate(
    device: torch.device,
    seconds: float | None = None,
    ranks: int | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> Profile:
    """`ranks`: of the collectives, by default one per GPU, or one per core up to 8; 1: no collectives."""
    ranks = default_ranks(device) if ranks is None else ranks
    check_ranks(device, ranks)
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS[device.type])
    sizes = (QUICK if quick else FULL)[device.type]
    began, links, made = time.monotonic(), None, environment_info()
    if ranks > 1:  # first: ranks should be forked before this process has threads
        times = measure_collectives(device.type, ranks, sizes.messages, seconds * COLLECTIVES_SHARE, progress)
        links = links_table(device, ranks, sizes.messages, times.us)
        made["collectives_noise"] = digits(times.noise)
        seconds *= 1 - COLLECTIVES_SHARE
    machine = measure(device, seconds, sizes, progress)
    made["seconds"] = round(time.monotonic() - began, 1)
    return Profile(machine, links, made)


def default_ranks(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else min(cores(), MAX_CPU_RANKS)


def check_ranks(device: torch.device, ranks: int) -> None:
    if device.type == "cuda":
        most, what = torch.cuda.device_count(), "one for each GPU"
    else:
        most, what = max(cores(), MAX_CPU_RANKS), "one for each core, or 8"
    if not 1 <= ranks <= most:
        raise SpecError(f"--ranks {ranks}: this machine takes 1 to {most}: {what}")


def cores() -> int:
    """Cores available to this process: a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_info() -> dict[str, Any]:
    made: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "lmworks": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.version.cuda:
        made["cuda"] = torch.version.cuda
    return made


def links_table(
    device: torch.device, ranks: int, messages: tuple[int, ...], us: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, Any]:
    """For `Curve.from_dict`. The link speed is the bandwidth of the largest all-reduce over all ranks."""
    gpu = recognise(device_name(device)) if device.type == "cuda" else None
    most = str(group_sizes(ranks)[-1])
    reached = messages[-1] * float(wire_share("all-reduce", ranks)) / us["all-reduce"][most][-1] / 1e3
    return {
        "gpus": [gpu.name if gpu else device_name(device)],
        "fabric": gpu.fabric if gpu else "pcie",
        "link_gbs": digits(reached),
        "sizes": list(messages),
        "tag": "measured",
        **us,
    }


def check_output_path(path: Path) -> None:
    """Checked before the measurement: an existing profile may be overwritten, any other file may not."""
    if path.is_dir():
        raise SpecError(f"--out {path} is a folder; name a file in it, e.g. {path / 'profile.toml'}")
    try:
        if path.exists() and "[machine]" not in path.read_text(encoding="utf-8", errors="replace"):
            raise SpecError(f"--out {path}: this file exists and is not a profile; choose another name")
    except OSError as error:
        raise SpecError(f"--out {path}: {error.strerror}") from None
    refuse_unwritable(path, "--out")


def save(profile: Profile, path: Path) -> None:
    """Write atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, profile.to_toml())
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None
