"""Errors of allocators: recognised by type or text, and final unless a step was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.record import oom
from lmworks.record.oom import OutOfMemory, as_oom, is_oom, oom_kills, requested_bytes

GIB = 2**30
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"  # noqa: E501
GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(CPU), 4 * GIB),
        (torch.OutOfMemoryError(GPU), 20 * GIB),
        (RuntimeError("std::bad_alloc"), None),
        (MemoryError(), None),
        (OSError(12, "Cannot allocate memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_errors_of_allocators_are_known(error: Exception, asked: int | None) -> None:
    assert is_oom(error) and requested_bytes(error) == asked
    cause = as_oom(error)
    assert isinstance(cause, OutOfMemory) and cause.final and cause.exit_code == 1
    assert str(cause).startswith("out of memory: ") and "\n" not in str(cause)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(28, "No space left"), ValueError("memory")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert not is_oom(error) and as_oom(error) is error


V1 = "4:memory:/job/7\n1:cpu:/job/7\n"
EVENTS, CONTROL = "low 0\nmax 9\noom 5\noom_kill 3\noom_group_kill 8\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"


@pytest.mark.parametrize(
    ("cgroups", "files", "kills"),
    [
        ("0::/pod/engine\n", {"pod/engine/memory.events": EVENTS}, 3),
        ("0::/\n", {"memory.events": EVENTS}, 3),  # in a container's own namespace
        (V1, {"memory/job/7/memory.oom_control": CONTROL, "vmstat": "oom_kill 70\n"}, 2),
        (V1 + "0::/\n", {"vmstat": "pgfault 3\noom_kill 70\n"}, 70),  # nothing of the cgroup: the machine's
        (None, {}, 0),
    ],
)
def test_kills_by_the_kernel_are_those_of_the_cgroup(
    cgroups: str | None, files: dict[str, str], kills: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in {**files, **({} if cgroups is None else {"cgroup": cgroups})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(oom, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(oom, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(oom, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == kills
