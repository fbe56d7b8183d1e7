"""Clock, power and energy of a GPU while something runs, by NVML, the library behind `nvidia-smi`.

A card that reaches its limit of power lowers its clock, and with it everything that was measured at a higher one. So a
benchmark says beside its figure how fast the card was allowed to go, and what held it back.
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
EVERY_S = 0.05
LEAST_S = 0.5  # from the first look to the last: a card counts its energy in steps of up to a tenth of a second
SM, TEMPERATURE = 1, 0  # NVML's numbers of a clock, and of a thermometer
REASONS = {0x4: "power cap", 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


class NvmlError(Exception):
    """NVML does not answer, or not that."""


class Sample(NamedTuple):
    at: float  # as time.perf_counter tells it
    joules: float  # since the driver was loaded
    clock_mhz: int
    celsius: int
    reasons: int  # bits: what keeps the clock below its highest


class Card:
    """One GPU, as NVML knows it."""

    def __init__(self, library: Any, uuid: str) -> None:
        self.library, self.handle = library, c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), byref(self.handle))
        self.max_clock_mhz = self.ask("nvmlDeviceGetMaxClockInfo", SM)
        self.limit_watts = self.ask("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise NvmlError(f"{name}: NVML's error {code}")

    def ask(self, name: str, *about: int, kind: type[c_uint | c_uint64] = c_uint) -> int:
        answer = kind()
        self.call(name, self.handle, *about, byref(answer))
        return answer.value

    def sample(self) -> Sample:
        return Sample(
            time.perf_counter(),
            self.ask("nvmlDeviceGetTotalEnergyConsumption", kind=c_uint64) / 1e3,
            self.ask("nvmlDeviceGetClockInfo", SM),
            self.ask("nvmlDeviceGetTemperature", TEMPERATURE),
            self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", kind=c_uint64),
        )


@dataclass(frozen=True)
class Watch:
    """What was seen of a card so far."""

    card: Card | None
    samples: list[Sample]

    def between(self, begin: float, end: float) -> dict[str, Any] | None:
        """Of the time between two moments; None where nobody could look, or it was too short to."""
        seen = [sample for sample in self.samples if begin <= sample.at <= end]
        if self.card is None or not seen or seen[-1].at - seen[0].at < LEAST_S:
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
            "held_back": {what: share for what, share in held.items() if share},  # by what, in which share of looks
            "samples": len(seen),
        }


def find_card(device: torch.device) -> Card | None:
    """None for a CPU, and where NVML is missing or does not tell all that is asked."""
    if device.type != "cuda":
        return None
    try:
        card = Card(ctypes.CDLL(LIBRARY), str(torch.cuda.get_device_properties(device).uuid))
        card.sample()
    except (OSError, AttributeError, NvmlError):
        return None
    return card


@contextmanager
def watched_power(device: torch.device) -> Iterator[Watch]:
    """Twenty looks a second at the device, beside whatever runs."""
    card, over = find_card(device), threading.Event()
    watch = Watch(card, [])
    if card is None:
        yield watch
        return

    def look() -> None:
        while not over.wait(EVERY_S):
            with suppress(NvmlError):  # the next look tells the energy of both
                watch.samples.append(card.sample())

    looking = threading.Thread(target=look, name="power", daemon=True)
    looking.start()
    try:
        yield watch
    finally:
        over.set()
        looking.join()


def power_words(power: dict[str, Any]) -> str:
    """What held a card back, in a line."""
    reasons = ", ".join(f"{what} in {share:.0%} of looks" for what, share in power["held_back"].items())
    return (
        f"of {power['max_clock_mhz']:,} MHz, at {power['watts']:.0f} of {power['limit_watts']:.0f} W, "
        f"{power['celsius']} °C; held back by {reasons or 'nothing'}"
    )
