"""Calibration: measure the kernels of this machine, and collectives between its ranks, for later plans.

`lmworks plan calibrate` takes a minute or two. The first plan on a machine takes a few seconds: no collectives,
fewer sizes of the same kernels, and the result is cached. A profile that the spec names takes precedence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.encode import available_cores
from ..data.progress import Progress, silent
from ..plan.devices.machine import FORMAT, Machine
from ..plan.devices.profile import Profile, load_profile, profile_of
from ..spec import Cluster, SpecError
from ..spec.files import cache_root, check_writable, write_whole
from . import collectives
from .kernel_timing import FULL, QUICK, Sizes, device_name, digits, measure
from .link_profile import links_table

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
    if ranks is None:
        ranks = torch.cuda.device_count() if device.type == "cuda" else min(available_cores(), MAX_CPU_RANKS)
    check_ranks(device, ranks)
    seconds = seconds or (QUICK_SECONDS if quick else SECONDS[device.type])
    sizes = (QUICK if quick else FULL)[device.type]
    began, links, made = time.monotonic(), None, environment_info()
    if ranks > 1:  # first: ranks should be forked before this process has threads
        rows = collectives.measure(collective_sweep(device, ranks, sizes, seconds), ranks, progress=progress)
        links = links_table(rows, sizes.messages, device)
        made["collectives_noise"] = digits(collectives.noise(rows))
        seconds *= 1 - COLLECTIVES_SHARE
    machine = measure(device, seconds, sizes, progress)
    made["seconds"] = round(time.monotonic() - began, 1)
    return Profile(machine, links, made)


def check_ranks(device: torch.device, ranks: int) -> None:
    if device.type == "cuda":
        most, what = torch.cuda.device_count(), "one for each GPU"
    else:
        most, what = max(available_cores(), MAX_CPU_RANKS), "one for each core, or 8"
    if not 1 <= ranks <= most:
        raise SpecError(f"--ranks {ranks}: this machine takes 1 to {most}: {what}")


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


def collective_sweep(device: torch.device, ranks: int, sizes: Sizes, seconds: float) -> collectives.Sweep:
    """Every collective among 2, 4, 8 … and all ranks, in the format of gradients."""
    groups = tuple(map(str, collectives.group_sizes(ranks)))
    dtypes = (collectives.DEFAULT_DTYPE[device.type],)
    sweep = collectives.Sweep(device.type, sizes.messages, dtypes=dtypes, groups=groups, places=(True,))
    return dataclasses.replace(sweep, point_s=seconds * COLLECTIVES_SHARE / sweep.points())


def check_output_path(path: Path) -> None:
    """Checked before the measurement: an existing profile may be overwritten, any other file may not."""
    if path.is_dir():
        raise SpecError(f"--out {path} is a folder; name a file in it, e.g. {path / 'profile.toml'}")
    try:
        if path.exists() and "[machine]" not in path.read_text(encoding="utf-8", errors="replace"):
            raise SpecError(f"--out {path}: this file exists and is not a profile; choose another name")
    except OSError as error:
        raise SpecError(f"--out {path}: {error.strerror}") from None
    check_writable(path, "--out")


def save(profile: Profile, path: Path) -> None:
    """Write atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, profile.to_toml())
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None


# --- quick calibration at the first plan -----------------------------------------------------------------


VERSION = 2  # of the method: 1 did not correct for other load on the machine
MAX_AGE = timedelta(minutes=10)  # of a measurement on a busy machine


def cache_path(device: torch.device) -> Path:
    key = (platform.node(), device_name(device), torch.get_num_threads(), torch.__version__, FORMAT, VERSION)
    return cache_root() / f"probe-{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}.toml"


def local_device(cluster: Cluster) -> torch.device:
    """The device of this machine that the spec runs on."""
    if cluster.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster.device = 'cuda', but there is no CUDA device; use cluster.device = 'cpu'")
    cuda = cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def probe(device: str | torch.device = "cpu", seconds: float = QUICK_SECONDS, progress: Progress = silent) -> Machine:
    return calibrate(torch.device(device), seconds, ranks=1, quick=True, progress=progress).machine


def cached_machine(cluster: Cluster, now: datetime | None = None) -> Machine | None:
    """The cached measurement; None if there is none, if another version made it, or if the machine was busy and it is
    older than `MAX_AGE`."""
    if cluster.profile:
        return profile_machine(cluster)
    try:
        profile = load_profile(cache_path(local_device(cluster)))
    except SpecError:  # no cache, or an invalid file
        return None
    return profile.machine if profile.machine.quiet or is_fresh(profile, now or datetime.now(UTC)) else None


def is_fresh(profile: Profile, now: datetime) -> bool:
    try:
        age = now - datetime.fromisoformat((profile.made or {})["date"])
    except (KeyError, TypeError, ValueError):  # an edited file
        return False
    return timedelta(0) <= age < MAX_AGE


def profile_machine(cluster: Cluster) -> Machine:
    """The machine of the spec's profile, which must be this machine."""
    machine, here = profile_of(cluster).machine, device_name(local_device(cluster))
    if machine.name != here:
        raise SpecError(
            f"cluster.profile: {cluster.profile} was measured on {machine.name!r}, and this machine is {here!r}; "
            "measure it with `lmworks plan calibrate`, or leave cluster.profile out"
        )
    return machine


def this_machine(cluster: Cluster, *, refresh: bool = False, progress: Progress = silent) -> Machine:
    """The cached measurement, or a new one. A measurement of a busy machine does not replace a better one."""
    before = cached_machine(cluster)
    if before and not refresh:
        return before
    device = local_device(cluster)
    machine = probe(device, progress=progress)
    if machine.quiet or not (before and before.quiet):
        with suppress(SpecError):  # the cache is not writable: measured again next time
            save(Profile(machine, made=environment_info()), cache_path(device))
    return machine
