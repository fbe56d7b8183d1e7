"""One set of files, any layout: fewer ranks, more ranks, and from one way of cutting to another and another again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from layouts import Job, do, layout
from lmworks import checkpoint
from lmworks.parallel.local_ranks import on_ranks
from tiny import curve, differences, saved
from variations import with_slow

LAYOUTS = {
    "ddp2": ("parallel.dp=2",),
    "fsdp2": ("parallel.dp=2", "parallel.strategy=fsdp2"),
    "tp2pp2": ("parallel.tp=2", "parallel.pp=2"),
    "four": ("parallel.dp=4", "parallel.strategy=fsdp2"),
    "tp2dp2": ("parallel.tp=2", "parallel.dp=2", "parallel.strategy=fsdp2"),
}
# name: (layout, the run whose checkpoint it takes up and saves again before it goes on)
CHAIN = {
    "ddp2-fsdp2": ("fsdp2", "ddp2"),
    "ddp2-fsdp2-tp2pp2": ("tp2pp2", "ddp2-fsdp2"),
    "ddp2-fsdp2-tp2pp2-ddp2": ("ddp2", "ddp2-fsdp2-tp2pp2"),
    "4-2": ("fsdp2", "four"),
    "4-2-4": ("tp2dp2", "4-2"),
}
SLOW = ("4-2", "4-2-4")  # fewer ranks, and more again: tests/train/test_restart.py has four and then two


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    root = tmp_path_factory.mktemp("chain")
    specs = {name: layout(dataset, *keys) for name, keys in LAYOUTS.items()}
    do([Job(root / name, specs[name]) for name in ("ddp2", "four")])
    for names in (("ddp2-fsdp2", "4-2"), ("ddp2-fsdp2-tp2pp2", "4-2-4"), ("ddp2-fsdp2-tp2pp2-ddp2",)):
        do(
            [
                Job(root / name, specs[CHAIN[name][0]], root / CHAIN[name][1], 2, True)
                for name in names
                if name in asked or name not in SLOW
            ]
        )
    return root


@pytest.mark.parametrize("name", with_slow(CHAIN, SLOW))
def test_state_arrives_exactly(runs: Path, name: str) -> None:
    """Weights, moments, step counts and generators of step 2, after every change of layout on the way."""
    first = name.split("-")[0].replace("4", "four")
    assert differences(saved(runs / first, 2), saved(runs / name, 2)) == []
    assert curve(runs / name)[2][1] == pytest.approx(curve(runs / first)[2][1], rel=1e-6)
    written = {path.name for path in (runs / name / "checkpoints" / "step-000002").glob("rank-*")}
    ranks = 4 if CHAIN[name][0] in ("tp2pp2", "tp2dp2") else 2
    assert written == {f"rank-0000{rank}.safetensors" for rank in range(ranks)}


def test_every_byte_is_read_once_by_who_needs_it(runs: Path) -> None:
    """Hashed in passing, not in a pass of its own; four ranks that each want all of it read it once each."""
    root = runs / "four" / "checkpoints"
    total = sum(path.stat().st_size for path in (root / "step-000003").glob("rank-*"))
    assert on_ranks(4, count_reads, root) == [total] * 4
    assert on_ranks(1, count_reads, root) == [total]


def count_reads(rank: int, root: Path) -> int:
    read, real = 0, os.preadv

    def counting(descriptor: int, parts: Any, position: int) -> int:
        nonlocal read
        got = real(descriptor, parts, position)
        if "safetensors" in os.readlink(f"/proc/self/fd/{descriptor}"):
            read += got
        return got

    os.preadv = counting
    state: dict[str, Any] = {"model": None, "optim": None, "rng": None}
    assert checkpoint.load(root, state, refused=lambda folder, why: pytest.fail(why))
    return read


def save_two(rank: int, root: Path) -> None:
    for step in (1, 2):
        checkpoint.save(root, step, {"model": {"a": torch.full((9,), step), "b": torch.full((9,), -step)}}, {})


def unreadable(rank: int, root: Path) -> tuple[int, list[str], list[int]]:
    """Rank 1's disk fails on the newest checkpoint's files."""
    real = os.preadv

    def failing(descriptor: int, parts: Any, position: int) -> int:
        if "step-000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, parts, position)

    if rank == 1:
        os.preadv = failing
    refused: list[str] = []
    state: dict[str, Any] = {"model": None}
    found = checkpoint.load(root, state, refused=lambda folder, why: refused.append(why))
    assert found is not None
    return found.step, refused, [int(value[0]) for value in state["model"].values()]


def test_a_file_that_one_rank_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    on_ranks(2, save_two, tmp_path)
    first, second = on_ranks(2, unreadable, tmp_path)
    assert (first[0], first[2]) == (second[0], second[2]) == (1, [1, -1])
    (reason,) = first[1]
    assert "Input/output error, as rank 1 found" in reason and "step-000002/rank-" in reason and not second[1]
