"""What is said of a card's clock and power, by an NVML whose answers are known."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmworks.bench import power
from lmworks.bench.power import NvmlDevice, NvmlError, PowerLog, Sample, monitor_power, power_text

UUID = "0c6c0b7a-ffff-0000-1111-222222222222"


class Nvml:
    """A card at its limit of power, at 1,725 of 1,980 MHz; every look at its energy costs it 35 J more."""

    def __init__(self) -> None:
        self.energy: Iterator[int] = count(6_000_000_000, 35_000)  # mJ, more than 32 bits hold
        self.wrong: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        told = {
            "nvmlInit_v2": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: {f"GPU-{UUID}".encode(): 77}[uuid],
            "nvmlDeviceGetMaxClockInfo": lambda kind: {1: 1980}[kind],
            "nvmlDeviceGetClockInfo": lambda kind: {1: 1725}[kind],
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
            "nvmlDeviceGetTemperature": lambda sensor: {0: 61}[sensor],
            "nvmlDeviceGetTotalEnergyConsumption": lambda: next(self.energy),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: 0x4,
        }[name]

        def answer(*arguments: Any) -> int:
            if code := self.wrong.get(name):
                return code
            *about, last = arguments or [None]
            if name.startswith("nvmlDeviceGet") and not name.endswith("UUID"):
                assert about.pop(0).value == 77
            if arguments:
                last._obj.value = told(*about)
            return 0

        return answer


def sample(at: float, joules: float, clock: int = 1700, celsius: int = 60, reasons: int = 0) -> Sample:
    return Sample(at, joules, clock, celsius, reasons)


def test_a_card_is_asked_for_what_it_does() -> None:
    card = NvmlDevice(Nvml(), UUID)
    assert (card.max_clock_mhz, card.limit_watts) == (1980, 700.0)
    seen = card.sample()
    assert (seen.joules, seen.clock_mhz, seen.celsius, seen.reasons) == (6e6, 1725, 61, 4)
    assert seen.at == pytest.approx(time.perf_counter(), abs=5)


def test_only_what_was_seen_meanwhile_counts() -> None:
    seen = [sample(0.0, 0), sample(1.0, 100, 1900), sample(2.0, 700, 1700, 64, 4), sample(3.0, 1300, 1740, 63, 5)]
    found = PowerLog(NvmlDevice(Nvml(), UUID), [*seen, sample(9.0, 9000)]).between(1.0, 4.0)
    assert found is not None
    assert found["watts"] == pytest.approx(600) and found["joules"] == pytest.approx(1800)
    assert found["clock_mhz"] == pytest.approx(1780) and found["celsius"] == 64
    assert found["held_back"] == {"power cap": pytest.approx(2 / 3)} and found["samples"] == 3
    assert power_text(found) == "of 1,980 MHz, at 600 of 700 W, 64 °C; held back by power cap in 67% of samples"


def test_nothing_is_said_of_what_nobody_saw() -> None:
    card = NvmlDevice(Nvml(), UUID)
    assert PowerLog(card, [sample(1.0, 0), sample(5.0, 10)]).between(0.5, 4.0) is None
    short = PowerLog(card, [sample(1.0, 0), sample(1.05, 0), sample(1.1, 70)])  # 0 W, or 1,400
    assert short.between(1.0, 1.06) is None and short.between(1.0, 2.0) is None
    with monitor_power(torch.device("cpu")) as watch:
        pass
    assert watch.card is None and watch.between(0, time.perf_counter()) is None


def on_cuda(monkeypatch: pytest.MonkeyPatch, library: Any) -> torch.device:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {power.LIBRARY: library}[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
    return torch.device("cuda", 0)


def test_looks_are_taken_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "MIN_WINDOW_S", 0.0)
    began = time.perf_counter()
    with monitor_power(on_cuda(monkeypatch, Nvml())) as watch:
        while len(watch.samples) < 3:
            time.sleep(0.01)
    taken = len(watch.samples)
    found = watch.between(began, time.perf_counter())
    assert found is not None and found["held_back"] == {"power cap": 1.0} and found["samples"] == taken
    time.sleep(2 * power.POLL_S)
    assert len(watch.samples) == taken


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    with monitor_power(on_cuda(monkeypatch, library)) as watch:
        library.wrong["nvmlDeviceGetClockInfo"] = 10  # a time-out
        time.sleep(3 * power.POLL_S)
        library.wrong.clear()
        deadline, seen = time.monotonic() + 20, len(watch.samples)
        while len(watch.samples) < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(watch.samples) >= seen + 2


@pytest.mark.parametrize("silent", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_a_card_that_does_not_tell_is_left_alone(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    library.wrong[silent] = 3  # not supported
    with monitor_power(on_cuda(monkeypatch, library)) as watch:
        assert watch.card is None
    with pytest.raises(NvmlError, match=f"{silent}: NVML's error 3"):
        NvmlDevice(library, UUID).sample()
