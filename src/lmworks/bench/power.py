"""Clock, power and energy of a GPU during a benchmark, by NVML, the library behind `nvidia-smi`.

A GPU at its power cap lowers its clock. So benchmarks report the clock beside their figures, and the reasons of
throttling.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
POLL_S = 0.05
MIN_WINDOW_S = 0.5  # from first to last sample: the energy counter is updated up to ten times a second
SM, TEMPERATURE = 1, 0  # NVML's constants
REASONS = {0x4: "power cap", 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


class NvmlError(Exception):
    """An NVML call failed."""


class Sample(NamedTuple):
    at: float  # of time.perf_counter
    joules: float  # since the driver was loaded
    clock_mhz: int
    celsius: int
    reasons: int  # bit mask of throttle reasons


class NvmlDevice:
    """One GPU in NVML."""

    def __init__(self, library: Any, uuid: str) -> None:
        self.library, self.handle = library, c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), byref(self.handle))
        self.max_clock_mhz = self.query("nvmlDeviceGetMaxClockInfo", SM)
        self.limit_watts = self.query("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise NvmlError(f"{name}: NVML's error {code}")

    def query(self, name: str, *about: int, kind: type[c_uint | c_uint64] = c_uint) -> int:
        answer = kind()
        self.call(name, self.handle, *about, byref(answer))
        return answer.value

    def sample(self) -> Sample:
        return Sample(
            time.perf_counter(),
            self.query("nvmlDeviceGetTotalEnergyConsumption", kind=c_uint64) / 1e3,
            self.query("nvmlDeviceGetClockInfo", SM),
            self.query("nvmlDeviceGetTemperature", TEMPERATURE),
            self.query("nvmlDeviceGetCurrentClocksThrottleReasons", kind=c_uint64),
        )


@dataclass(frozen=True)
class PowerLog:
    """Samples of a GPU so far."""

    card: NvmlDevice | None
    samples: list[Sample]

    def between(self, begin: float, end: float) -> dict[str, Any] | None:
        """Means of the samples in an interval; None without NVML or for a short interval."""
        seen = [sample for sample in self.samples if begin <= sample.at <= end]
        if self.card is None or not seen or seen[-1].at - seen[0].at < MIN_WINDOW_S:
            return None
        spent = seen[-1].joules - seen[0].joules
        held = {what: sum(bool(one.reasons & bit) for one in seen) / len(seen) for bit, what in REASONS.items()}
        watts = spent / (seen[-1].at - seen[0].at)
        return {
            "watts": watts,
            "limit_watts": self.card.limit_watts,
            "joules": watts * (end - begin),
            "clock_mhz": statistics.mean(one.clock_mhz for one in seen),
            "max_clock_mhz": self.card.max_clock_mhz,
            "celsius": max(one.celsius for one in seen),
            "held_back": {what: share for what, share in held.items() if share},  # reason → share of samples
            "samples": len(seen),
        }


def find_nvml_device(device: torch.device) -> NvmlDevice | None:
    """None for a CPU, and where NVML is missing or lacks a query."""
    if device.type != "cuda":
        return None
    try:
        card = NvmlDevice(ctypes.CDLL(LIBRARY), str(torch.cuda.get_device_properties(device).uuid))
        card.sample()
    except (OSError, AttributeError, NvmlError):
        return None
    return card


@contextmanager
def monitor_power(device: torch.device) -> Iterator[PowerLog]:
    """Sample the device twenty times a second in a thread."""
    card, stop = find_nvml_device(device), threading.Event()
    watch = PowerLog(card, [])
    if card is None:
        yield watch
        return

    def poll() -> None:
        while not stop.wait(POLL_S):
            with suppress(NvmlError):  # the next sample covers the energy of both
                watch.samples.append(card.sample())

    poller = threading.Thread(target=poll, name="power", daemon=True)
    poller.start()
    try:
        yield watch
    finally:
        stop.set()
        poller.join()


def power_text(power: dict[str, Any]) -> str:
    """Clock, power and throttle reasons in one line."""
    reasons = ", ".join(f"{what} in {share:.0%} of samples" for what, share in power["held_back"].items())
    return (
        f"of {power['max_clock_mhz']:,} MHz, at {power['watts']:.0f} of {power['limit_watts']:.0f} W, "
        f"{power['celsius']} °C; held back by {reasons or 'nothing'}"
    )
