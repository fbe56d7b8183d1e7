"""What this machine can do, measured in a few seconds at the first plan and kept for the next ones.

The quick form of `calibrate`, without collectives. A profile that the spec names is used instead.
"""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from pathlib import Path

import torch

from ..plan.devices.machine import FORMAT, Machine
from ..plan.devices.profile import Profile, load_profile, profile_of
from ..spec import Cluster, SpecError
from ..spec.files import cache_root
from .calibrate import QUICK_SECONDS, about, calibrate, save
from .measure import device_name

BUSY = 1.3  # noise above which a measurement is not kept: it would say the machine is slower than it is


def cache_path(device: torch.device) -> Path:
    key = (platform.node(), device_name(device), torch.get_num_threads(), torch.__version__, FORMAT)
    return cache_root() / f"probe-{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}.toml"


def pick(cluster: Cluster) -> torch.device:
    """The device of this machine that the spec would run on."""
    if cluster.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster.device = 'cuda', but no CUDA device is here; use cluster.device = 'cpu'")
    cuda = cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def probe(device: str | torch.device = "cpu", seconds: float = QUICK_SECONDS) -> Machine:
    return calibrate(torch.device(device), seconds, ranks=1, quick=True).machine


def cached_machine(cluster: Cluster) -> Machine | None:
    """What was measured earlier about this machine; None where nothing was, or not by this version."""
    if cluster.profile:
        return profiled(cluster)
    path = cache_path(pick(cluster))
    try:
        return load_profile(path).machine
    except SpecError:  # no cache, or not one of ours: measured again when asked
        return None


def profiled(cluster: Cluster) -> Machine:
    """The machine of the spec's profile, which must be this one: a run here is predicted with it."""
    machine, here = profile_of(cluster).machine, device_name(pick(cluster))
    if machine.name != here:
        raise SpecError(
            f"cluster.profile: {cluster.profile} was measured on {machine.name!r}, and this machine is {here!r}; "
            "measure it with `lmworks plan calibrate`, or leave cluster.profile out"
        )
    return machine


def this_machine(cluster: Cluster, *, refresh: bool = False) -> Machine:
    """The cached measurement, or a new one, kept unless the machine was busy or the folder cannot be written."""
    machine = None if refresh else cached_machine(cluster)
    if machine is None:
        device = pick(cluster)
        machine = probe(device)
        if machine.noise <= BUSY:
            with suppress(SpecError):  # else measured again next time
                save(Profile(machine, made=about()), cache_path(device))
    return machine
