"""Quick calibration of this machine at its first plan, without collectives, cached for later plans.

A profile that the spec names takes precedence.
"""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from ..data.progress import Progress, silent
from ..plan.devices.machine import FORMAT, Machine
from ..plan.devices.profile import Profile, load_profile, profile_of
from ..spec import Cluster, SpecError
from ..spec.files import cache_root
from .calibrate import QUICK_SECONDS, calibrate, environment_info, save
from .kernel_timing import device_name

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
