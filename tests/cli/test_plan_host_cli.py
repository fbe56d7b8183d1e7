"""Host memory as `lmworks plan` and `lmworks plan memory` tell of it: of a rank, of its machine, and what for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from typed import lmworks

SHARDED = ["parallel.dp=8", "parallel.strategy=fsdp2", "cluster.gpu=h100", "cluster.gpus_per_node=8"]
RUN = ["plan", "llama3-8b", *SHARDED, "precision.dtype=bf16", "data.seq=2048", "--no-probe"]
WEIGHTS = 8_030_261_248


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = lmworks(capsys, *args, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_copies_of_saves(capsys: pytest.CaptureFixture[str]) -> None:
    """12 bytes a weight in all: itself and two moments; and counts of steps and random states, of which one is kept."""
    told = answer(capsys, *RUN, "checkpoint.asynchronous=true")
    counts = 4 * (2 + 1 + 32 * 9)
    assert 0 <= told["host_bytes_per_machine"] - (12 * WEIGHTS + counts + 15_088) < 8
    parts = {"states": 0, "activations": 0, "staging": told["host_bytes_per_machine"], "resting": 0}
    assert told["host_per_machine_parts"] == parts
    assert told["host_parts"]["staging"] == told["host_bytes"]
    sheet = answer(capsys, "plan", "memory", *RUN[1:-1], "checkpoint.asynchronous=true")
    assert (sheet["host"], sheet["host_per_machine"]) == (told["host_bytes"], told["host_bytes_per_machine"])
    assert sheet["host_per_machine_parts"] == told["host_per_machine_parts"]


def test_states_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    """16 bytes a weight, of which 8 are pinned in powers of two: rows of 4,096 and 14,336 in eighths, and more."""
    words = (*RUN, "checkpoint.asynchronous=true", "parallel.offload=optimizer")
    told = answer(capsys, *words)
    parts = told["host_per_machine_parts"]
    assert 16 * WEIGHTS < parts["states"] < 20 * WEIGHTS
    _, out, _ = lmworks(capsys, *words)
    states, staging, whole = (
        size / 2**30 for size in (parts["states"], parts["staging"], told["host_bytes_per_machine"])
    )
    assert f" GiB a rank, {whole:.1f} GiB for the 8 of a machine; what a machine has is not in the catalogue" in out
    assert f"of a machine: states {states:.1f} GiB, staging {staging:.1f} GiB\n" in out


def test_what_nobody_knows_has_no_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an optimizer that is priced, and not run, states alone."""
    priced = ["plan", "memory", "llama3-8b", "--cluster", "8xh100", "--zero", "3", "--optimizer", "muon"]
    sheet = answer(capsys, *priced, "parallel.offload=optimizer")
    assert sheet["host_per_machine_parts"] is None
    assert sheet["host_per_machine"] == 8 * sheet["host"] > 0
