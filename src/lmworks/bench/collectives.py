"""Times of collectives between ranks of this machine: gloo between processes, or NCCL with one GPU each.

Every rank runs the same list. A point is several rounds of the same call back to back, as in nccl-tests; the median
round of the slowest rank counts. Bytes are those of the full buffer, gathered or not yet reduced.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..data.progress import Progress, silent
from ..spec import TrainingError

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
ROUNDS, MAX_CALLS = 5, 100
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of gradients in training on that device


@dataclass(frozen=True)
class CollectiveTimes:
    """µs of each message size, by collective and number of ranks; `noise`: median round over fastest round."""

    us: dict[str, dict[str, list[float]]]
    noise: float


def group_sizes(ranks: int) -> list[int]:
    """2, 4, 8 … and all."""
    powers = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return [*powers, ranks] if ranks > 1 else []


def measure_collectives(
    device: str, ranks: int, messages: tuple[int, ...], seconds: float, progress: Progress = silent
) -> CollectiveTimes:
    points = len(messages) * ((len(KINDS) - 1) * len(group_sizes(ranks)) + 1)
    updates: list[Any] = []
    with TemporaryDirectory(prefix="lmworks-calibrate-") as folder:
        start = "fork" if device == "cpu" else "spawn"  # a fork starts at once; CUDA cannot be forked
        queue = mp.get_context(start).SimpleQueue()
        share = seconds / points
        arguments = (device, ranks, messages, share, str(Path(folder) / "store"), queue)
        with running_ranks(run_rank, arguments, ranks, start) as processes:
            while not join_ranks(processes):
                while not queue.empty():
                    updates.append(queue.get())
                    progress("collectives", min(len(updates), points), points)
        while not queue.empty():
            updates.append(queue.get())
    return updates[-1]


@contextmanager
def running_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, start: str) -> Iterator[Any]:
    """Start the ranks; kill them when the block ends."""
    context = start_processes(work, arguments, nprocs=ranks, join=False, daemon=True, start_method=start)
    try:
        yield context
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def join_ranks(processes: Any) -> bool:
    try:
        return processes.join(timeout=0.05)
    except (ProcessRaisedException, ProcessExitedException) as error:
        last = str(error).strip().splitlines()[-1]
        raise TrainingError(f"a rank failed while collectives were measured: {last}") from None


# --- on every rank ------------------------------------------------------------------------------------------


def run_rank(
    rank: int, device: str, ranks: int, messages: tuple[int, ...], share: float, store: str, queue: Any
) -> None:
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(1)
    # Newer versions rename collectives; the oldest supported version has the old names only.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{store}", rank=rank, world_size=ranks)
    us: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    noise: list[float] = []
    for members in group_sizes(ranks):
        group = dist.new_group(list(range(members)))
        for kind in KINDS if members == 2 else KINDS[:-1]:  # point-to-point: two ranks only
            times = []
            for size in messages if rank < members else ():
                elements = max(1, size // DTYPES[device].itemsize // members) * members
                call, calls = make_call(kind, rank, members, elements, place, group)
                median, fastest = time_rounds(call, share, place, group)
                times.append(1e6 * median / calls)
                noise.append(median / fastest)
                if rank == 0:
                    queue.put(kind)
            us[kind][str(members)] = monotone(times)
        dist.barrier()
    if rank == 0:
        queue.put(CollectiveTimes(us, statistics.median(noise)))
    dist.barrier()
    dist.destroy_process_group()


def make_call(
    kind: str, rank: int, members: int, elements: int, device: torch.device, group: Any
) -> tuple[Callable[[], object], int]:
    """The call, and the number of sequential messages in it."""
    whole, other = (torch.zeros(elements, device=device, dtype=DTYPES[device.type]) for _ in range(2))
    part = whole[: elements // members].clone()
    if kind == "send":

        def ping_pong() -> None:
            for sender in (0, 1):
                if rank == sender:
                    dist.send(whole, 1 - rank, group=group)
                else:
                    dist.recv(whole, 1 - rank, group=group)

        return ping_pong, 2
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[kind], 1


def time_rounds(call: Callable[[], object], share: float, device: torch.device, group: Any) -> tuple[float, float]:
    """Seconds of one call: the median round and the fastest, of the slowest rank."""
    once = max(time_round(call, 1, device, group) for _ in range(2))
    calls = max(1, min(MAX_CALLS, int(share / ROUNDS / max_over_ranks([once], device, group)[0])))
    times = [time_round(call, calls, device, group) for _ in range(ROUNDS)]
    median, fastest = max_over_ranks([statistics.median(times), min(times)], device, group)
    return median, fastest


def time_round(call: Callable[[], object], calls: int, device: torch.device, group: Any) -> float:
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def max_over_ranks(seconds: list[float], device: torch.device, group: Any) -> list[float]:
    values = torch.tensor(seconds, device=device, dtype=torch.float32)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values.tolist()


def monotone(times: list[float]) -> list[float]:
    """Times made non-decreasing in size: a smaller message takes longer only because of noise."""
    return [float(f"{us:.5g}") for us in np.minimum.accumulate(times[::-1])[::-1]] if times else []
