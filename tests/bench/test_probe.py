"""The probe: every kind of kernel gets a rate, and a measurement is made once."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from lmworks.bench import calibrate as probing
from lmworks.data.progress import Progress
from lmworks.plan.devices.machine import Machine
from lmworks.plan.network import network, optimizer
from lmworks.plan.ops import Workload
from lmworks.plan.step.one_device import step_time
from lmworks.spec import PRESETS, Cluster, ModelSpec, RunSpec, SpecError


@pytest.fixture(scope="module")
def machine() -> Machine:
    return dataclasses.replace(probing.probe("cpu", seconds=0.1), noise=1.0)


def test_every_kernel_of_every_preset_has_a_rate(machine: Machine) -> None:
    for name in PRESETS:
        net = network(Workload(ModelSpec.from_preset(name), batch=1, seq=128))
        for op in (*net.stem, *net.block, *net.loss, *optimizer(net.load.model.params, net.load.software, states=8)):
            for kernel in (*op.forward, *op.backward):
                assert machine.seconds(dataclasses.replace(kernel, count=1), "fp32") > 0


def test_rates_are_of_this_world(machine: Machine) -> None:
    for kind, points in machine.rates.items():
        for point in points:
            assert 1e6 < point.rate < 1e15, kind
    assert 1e-8 < machine.launch_s < 1e-2
    assert machine.memory_bytes > 2**28
    assert step_time(RunSpec(), machine).total > 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Machine) -> list[torch.device]:
    """An empty cache, and a probe that measures nothing but how often it is asked."""
    asked: list[torch.device] = []

    def pretend(device: torch.device, progress: Progress) -> Machine:
        asked.append(device)
        return machine

    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "probe", pretend)
    return asked


CPU = Cluster(device="cpu")


def test_a_machine_is_measured_once(calls: list[torch.device], machine: Machine) -> None:
    assert probing.cached_machine(CPU) is None
    assert probing.this_machine(CPU) == probing.this_machine(CPU) == probing.cached_machine(CPU) == machine
    assert len(calls) == 1
    probing.this_machine(CPU, refresh=True)
    assert len(calls) == 2


def test_what_a_busy_machine_showed_is_believed_for_minutes(
    calls: list[torch.device], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = dataclasses.replace(machine, noise=2.0)
    monkeypatch.setattr(probing, "probe", lambda _device, progress: busy)
    before = datetime.now(UTC) - timedelta(seconds=1)
    assert probing.this_machine(CPU) == busy == probing.cached_machine(CPU)
    later = datetime.now(UTC) + probing.MAX_AGE
    assert probing.cached_machine(CPU, later - timedelta(minutes=1)) == busy
    assert probing.cached_machine(CPU, later) is None
    assert probing.cached_machine(CPU, before - timedelta(hours=1)) is None  # a clock that was set back
    monkeypatch.setattr(probing, "probe", lambda _device, progress: machine)
    assert probing.this_machine(CPU, refresh=True) == machine
    assert probing.cached_machine(CPU, later + timedelta(days=900)) == machine


def test_a_busy_machine_does_not_replace_what_a_quiet_one_showed(
    calls: list[torch.device], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probing.this_machine(CPU) == machine
    busy = dataclasses.replace(machine, noise=2.0)
    monkeypatch.setattr(probing, "probe", lambda _device, progress: busy)
    assert probing.this_machine(CPU, refresh=True) == busy
    assert probing.cached_machine(CPU) == machine


def test_a_cache_without_a_date_is_not_believed(
    calls: list[torch.device], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "environment_info", lambda: {"date": "lately"})
    monkeypatch.setattr(probing, "probe", lambda _device, progress: dataclasses.replace(machine, noise=2.0))
    probing.this_machine(CPU)
    assert probing.cached_machine(CPU) is None


@pytest.mark.parametrize("text", ["", "{}", '{"format": 0}', "[1]", '{"format": 3, "rates": {}}'])
def test_a_cache_that_cannot_be_read_is_measured_again(calls: list[torch.device], text: str, machine: Machine) -> None:
    path = probing.cache_path(torch.device("cpu"))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert probing.this_machine(CPU) == machine
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_does_not_matter(
    calls: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "file" / "below"))
    assert probing.this_machine(CPU)


def test_the_number_of_threads_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = probing.cache_path(torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert probing.cache_path(torch.device("cpu")) != before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SpecError, match=r"cluster\.device = 'cuda', but there is no CUDA device"):
        probing.this_machine(Cluster(device="cuda"))
