"""Checkpoints beside what the disk and the memory can do, in one run and in turns.

Saving: our committed, hashed, synced checkpoint, with either hash, beside a plain sequential write of the same bytes
and one fsync. Loading: ours, verified, into tensors that are there, beside a plain sequential read into one buffer; the
page cache is dropped before each. Both for one rank, and for two that hold half each (the plain side stays one process
and one file).
Asynchronous: the time for which training stands still beside one memcpy of the same bytes into a buffer made before.
Each side takes its turn in every round; figures are medians of the rounds' ratios.

    python benchmarks/checkpoint_cpu.py --save       # 2 GiB, 7 rounds: some minutes on an idle machine
    python benchmarks/checkpoint_cpu.py --gib 0.25 --rounds 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from common import write_result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lmworks import checkpoint
from lmworks.checkpoint.async_save import AsyncSaver
from lmworks.checkpoint.format.folders import RetentionPolicy
from lmworks.parallel.local_ranks import on_ranks

TENSORS = 48  # of equal size: those of a small transformer and its moments
BLOCK = 16 * 2**20
RANDOM = os.urandom(BLOCK)
HASHES = ("sha256", "xxh3")
LIMITS = {f"{what} {hash}": 0.8 for what in ("save", "load") for hash in HASHES} | {"stall": 1.2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/checkpoint_cpu.json")
    options = parser.parse_args()
    rows = int(options.gib * 2**30 / TENSORS / 4 / 1024)
    results = {}
    with tempfile.TemporaryDirectory(prefix=".checkpoint-bench-", dir=options.folder) as folder:
        for world in (1, 2):
            results[f"{world} rank{'s' * (world > 1)}"] = on_ranks(
                world, measure, Path(folder), rows // world * world, options.rounds, timeout=3600
            )[0]
    speeds = hashes()
    print(json.dumps({"results": results, "hashes": speeds}, indent=1))
    for name, figures in results.items():
        for what, limit in LIMITS.items():
            found = figures[what]["ratio"]
            met = found <= limit if what == "stall" else found >= limit
            print(f"{name:8} {what:11} {found:.3f} (limit {limit}) {'met' if met else 'MISSED'}")
    if options.save:
        print(
            write_result("checkpoint_cpu", {"gib": options.gib, "limits": LIMITS, "results": results, "hashes": speeds})
        )


def hashes() -> dict[str, float]:
    """GiB/s of one core, of its own time: the best of some tries over 16 MiB."""
    speeds = {}
    kinds = {name: partial(hashlib.new, name) for name in ("sha256", "sha512", "blake2b", "md5")}
    for name, digest in {**kinds, "xxh3": xxhash.xxh3_128}.items():
        tries = []
        for _ in range(5):
            began = time.thread_time()
            digest(RANDOM)
            tries.append(BLOCK / 2**30 / (time.thread_time() - began))
        speeds[name] = round(max(tries), 2)
    return speeds


def measure(rank: int, folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    state = state_of(rows)
    figures = {}
    for hash in HASHES:
        root = folder / hash
        ours = partial(save, root, state, hash)
        figures[f"save {hash}"] = paired(rounds, lambda: plain_write(folder, rows), ours, rows)
        figures[f"load {hash}"] = load_figures(folder, root, state, rows, rounds)
        if dist.get_rank() == 0:
            shutil.rmtree(root)
    return {**figures, "stall": stall_figures(folder / "async", state, rounds)}


def state_of(rows: int) -> dict[str, Any]:
    """Random bits, so that nothing on the way can shrink them; over two ranks each holds half of every tensor."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    draw = torch.Generator().manual_seed(rank)
    weights = {}
    for index in range(TENSORS):
        local = torch.randint(-(2**31), 2**31, (rows // world, 1024), dtype=torch.int32, generator=draw)
        whole = local.view(torch.float32)
        weights[f"layer{index}"] = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False) if world > 1 else whole
    return {"model": weights}


# --- disk ---------------------------------------------------------------------------------------------


def paired(rounds: int, plain: Callable[[], None], ours: Callable[[], None], rows: int) -> dict[str, Any]:
    """plain/ours, so that 1 is the speed of the disk."""
    size = rows * 1024 * 4 * TENSORS
    times = [(timed(plain), timed(ours)) for _ in range(rounds + 1)][1:]  # the first warms both
    return {
        "ratio": statistics.median(plain / ours for plain, ours in times),
        "plain_gib_s": size / 2**30 / statistics.median(plain for plain, _ in times),
        "ours_gib_s": size / 2**30 / statistics.median(ours for _, ours in times),
    }


def timed(work: Callable[[], None]) -> float:
    if dist.get_rank() == 0:
        os.sync()  # what others left to be written is not our time
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def plain_write(folder: Path, rows: int) -> None:
    """One rank writes as much as all of ours do."""
    if dist.get_rank():
        return
    block = memoryview(RANDOM)
    left = rows * 1024 * 4 * TENSORS
    path = folder / "plain"
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        while left:
            left -= file.write(block[:left])
        os.fsync(file.fileno())


def save(root: Path, state: dict[str, Any], hash: str) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    checkpoint.save(root, 1, state, {}, hash=hash)


def load_figures(folder: Path, root: Path, state: dict[str, Any], rows: int, rounds: int) -> dict[str, Any]:
    files = [folder / "plain", *(root / "step-000001").iterdir()]

    def plain() -> None:
        if dist.get_rank() == 0:
            buffer = bytearray(BLOCK)
            with (folder / "plain").open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def ours() -> None:
        found = checkpoint.load(root, dict(state), refused=lambda path, why: print(path, why))
        if found is None:
            raise SystemExit("the checkpoint was refused")

    def cold(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            work()
            forget(files)  # for the next, and so in both sides' time: dropping clean pages is quick

        return run

    forget(files)
    return paired(rounds, cold(plain), cold(ours), rows)


def forget(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- memory -------------------------------------------------------------------------------------------


def stall_figures(root: Path, state: dict[str, Any], rounds: int) -> dict[str, Any]:
    """ours/memcpy. The writer is waited for between rounds: a stall is not the wait for a save that came too soon."""
    parts = [value.to_local() if isinstance(value, DTensor) else value for value in state["model"].values()]
    room = [torch.zeros_like(part) for part in parts]
    saves = AsyncSaver(root, RetentionPolicy(newest=1), state, torch.device("cpu"))
    times = []
    for step in range(1, rounds + 2):
        dist.barrier()
        began = time.perf_counter()
        for target, part in zip(room, parts, strict=True):
            target.copy_(part)
        copied = time.perf_counter()
        saves.save(step, state, {})
        times.append((copied - began, time.perf_counter() - copied))
        saves.wait()
        dist.barrier()
    saves.close()
    size = sum(part.nbytes for part in parts) / 2**30
    times = times[1:]
    return {
        "ratio": statistics.median(ours / memcpy for memcpy, ours in times),
        "memcpy_gib_s": size / statistics.median(memcpy for memcpy, _ in times),
        "stall_s": statistics.median(ours for _, ours in times),
    }


if __name__ == "__main__":
    main()
