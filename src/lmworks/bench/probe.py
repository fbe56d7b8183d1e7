"""What this machine can do, measured in a few seconds at the first plan and kept for the next ones.

The quick form of `calibrate`, without collectives. A profile that the spec names is used instead.
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
from .calibrate import QUICK_SECONDS, about, calibrate, save
from .kernel_timing import device_name

VERSION = 2  # of how it is measured: 1 took what a machine did under a steady load for all it can do
FRESH = timedelta(minutes=10)  # how long a measurement of a busy machine is believed


def cache_path(device: torch.device) -> Path:
    key = (platform.node(), device_name(device), torch.get_num_threads(), torch.__version__, FORMAT, VERSION)
    return cache_root() / f"probe-{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}.toml"


def pick(cluster: Cluster) -> torch.device:
    """The device of this machine that the spec would run on."""
    if cluster.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster.device = 'cuda', but no CUDA device is here; use cluster.device = 'cpu'")
    cuda = cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def probe(device: str | torch.device = "cpu", seconds: float = QUICK_SECONDS, progress: Progress = silent) -> Machine:
    return calibrate(torch.device(device), seconds, ranks=1, quick=True, progress=progress).machine


def cached_machine(cluster: Cluster, now: datetime | None = None) -> Machine | None:
    """What was measured earlier about this machine; None where nothing was, not by this version, or some time ago while
    others used it."""
    if cluster.profile:
        return profiled(cluster)
    try:
        profile = load_profile(cache_path(pick(cluster)))
    except SpecError:  # no cache, or not one of ours: measured again when asked
        return None
    return profile.machine if profile.machine.quiet or fresh(profile, now or datetime.now(UTC)) else None


def fresh(profile: Profile, now: datetime) -> bool:
    try:
        age = now - datetime.fromisoformat((profile.made or {})["date"])
    except (KeyError, TypeError, ValueError):  # a file that somebody edited
        return False
    return timedelta(0) <= age < FRESH


def profiled(cluster: Cluster) -> Machine:
    """The machine of the spec's profile, which must be this one: a run here is predicted with it."""
    machine, here = profile_of(cluster).machine, device_name(pick(cluster))
    if machine.name != here:
        raise SpecError(
            f"cluster.profile: {cluster.profile} was measured on {machine.name!r}, and this machine is {here!r}; "
            "measure it with `lmworks plan calibrate`, or leave cluster.profile out"
        )
    return machine


def this_machine(cluster: Cluster, *, refresh: bool = False, progress: Progress = silent) -> Machine:
    """The cached measurement, or a new one. That of a busy machine is kept for some minutes, but not in the place of a
    better one."""
    before = cached_machine(cluster)
    if before and not refresh:
        return before
    device = pick(cluster)
    machine = probe(device, progress=progress)
    if machine.quiet or not (before and before.quiet):
        with suppress(SpecError):  # where nothing can be written: measured again next time
            save(Profile(machine, made=about()), cache_path(device))
    return machine
