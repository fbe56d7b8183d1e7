"""Times of collectives between ranks: gloo between processes, or NCCL with one GPU each.

Every rank runs the same list. A round of a point is the same call several times back to back, as in nccl-tests; of each
round the slowest rank counts, and of the rounds the median. Every result is checked, before and after it is timed.
Groups of one kind (`intra`, `inter`) run at once, as they do in training.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from ..data.progress import Progress, silent
from ..plan.devices.links import wire_share
from ..spec import TrainingError
from .collective_ops import OPS, OUT_OF_PLACE_ONLY, Call, Group, group_layout, make_call

ROUNDS, MAX_CALLS = 5, 100
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DEFAULT_DTYPE = {"cpu": "fp32", "cuda": "bf16"}  # of gradients in training on that device
TIMEOUT = timedelta(minutes=10)  # of one collective


@dataclass(frozen=True)
class Sweep:
    """What is measured. `groups` are names that `group_layout` knows."""

    device: str
    sizes: tuple[int, ...]
    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("fp32",)
    places: tuple[bool, ...] = (True, False)  # in place
    groups: tuple[str, ...] = ("all",)
    rounds: int = ROUNDS
    point_s: float = 0.1  # about how long one point takes

    def points(self) -> int:
        return len(self.groups) * len(self.dtypes) * len(self.sizes) * sum(len(self.variants(op)) for op in self.ops)

    def variants(self, op: str) -> tuple[bool, ...]:
        return (False,) if op in OUT_OF_PLACE_ONLY else self.places


@dataclass(frozen=True)
class Row:
    """One point, by nccl-tests' definitions; GB = 1e9 bytes."""

    op: str
    group: str
    ranks: int
    dtype: str
    in_place: bool
    bytes: int
    time_us: float  # median round
    time_us_low: float  # quartiles of the rounds
    time_us_high: float
    fastest_us: float
    wrong: int  # elements, on all ranks

    @property
    def algbw(self) -> float:
        """GB/s: bytes over time."""
        return self.bytes / self.time_us / 1e3

    @property
    def busbw(self) -> float:
        """GB/s: algbw times what a rank sends for each byte on a ring, so that it compares with the link's speed."""
        return self.algbw * float(wire_share(self.op, self.ranks))

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"algbw": self.algbw, "busbw": self.busbw}
        return {name: float(f"{value:.5g}") if type(value) is float else value for name, value in found.items()}


def group_sizes(ranks: int) -> list[int]:
    """2, 4, 8 … and all."""
    powers = [2**power for power in range(1, ranks.bit_length()) if 2**power < ranks]
    return [*powers, ranks] if ranks > 1 else []


# --- ranks that this process starts ----------------------------------------------------------------------


def measure(
    sweep: Sweep,
    ranks: int,
    nodes: int = 1,
    enter: Callable[[int], None] | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """`enter` is called on every rank with its node, before it joins: it may change its network namespace."""
    rows: list[Row] = []
    with TemporaryDirectory(prefix="lmworks-collectives-") as folder:
        start = "fork" if sweep.device == "cpu" else "spawn"  # a fork starts at once; CUDA cannot be forked
        queue = mp.get_context(start).SimpleQueue()
        arguments = (sweep, ranks, nodes, enter, str(Path(folder) / "store"), queue)
        with running_ranks(run_started_rank, arguments, ranks, start) as processes:
            while not join_ranks(processes):
                drain(queue, rows, sweep, progress)
        drain(queue, rows, sweep, progress)
    return rows


def drain(queue: Any, rows: list[Row], sweep: Sweep, progress: Progress) -> None:
    while not queue.empty():
        rows.append(queue.get())
        progress("collectives", len(rows), sweep.points())


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
        time.sleep(0.1)  # the peers of a dead rank fail too: it is the cause
        for rank, process in enumerate(processes.processes):
            # `join` has sent SIGTERM to those that were left
            if (code := process.exitcode or 0) < 0 and code != -signal.SIGTERM:
                name = signal.Signals(-code).name
                raise TrainingError(f"rank {rank} was ended by {name} while collectives were measured") from None
        last = str(error).strip().splitlines()[-1]
        raise TrainingError(f"a rank failed while collectives were measured: {last}") from None


# --- on every rank ---------------------------------------------------------------------------------------


def run_started_rank(
    rank: int,
    sweep: Sweep,
    ranks: int,
    nodes: int,
    enter: Callable[[int], None] | None,
    store: str,
    queue: Any,
) -> None:
    per_node = ranks // nodes
    if enter is not None:
        enter(rank // per_node)
    place = rank_device(sweep.device, rank % per_node)
    dist.init_process_group(
        BACKENDS[sweep.device], init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    run_sweep(sweep, per_node, place, queue.put)
    dist.destroy_process_group()


def run_under_torchrun(sweep: Sweep, progress: Progress = silent) -> list[Row]:
    """As one of the ranks that torchrun started; only rank 0 gets rows."""
    place = rank_device(sweep.device, int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(BACKENDS[sweep.device], timeout=TIMEOUT)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        progress("collectives", len(rows), sweep.points())

    try:
        run_sweep(sweep, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())), place, add)
    except RuntimeError as error:  # gloo's and NCCL's, when another rank has died
        last = str(error).strip().splitlines()[0]
        raise TrainingError(f"rank {dist.get_rank()}: another rank has ended: {last}") from None
    dist.destroy_process_group()
    return rows


def rank_device(device: str, local_rank: int) -> torch.device:
    # Newer versions rename collectives; the oldest supported version has the old names only.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device(device, local_rank)
    torch.set_num_threads(1)
    return torch.device(device)


def run_sweep(sweep: Sweep, per_node: int, device: torch.device, report: Callable[[Row], object]) -> None:
    """All points; rank 0 reports them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in sweep.groups:
        layout = group_layout(name, ranks, per_node)
        handles = [dist.new_group(list(members)) for members in layout]
        own = [(handle, members) for handle, members in zip(handles, layout, strict=True) if rank in members]
        team = dist.new_group(sorted(member for members in layout for member in members))
        if own:
            handle, members = own[0]
            group = Group(handle, members, members.index(rank))
            for op in sweep.ops:
                for dtype in sweep.dtypes:
                    for in_place in sweep.variants(op):
                        for row in measure_series(sweep, op, name, dtype, in_place, device, group, team):
                            if rank == 0:
                                report(row)
        dist.barrier()


def measure_series(
    sweep: Sweep, op: str, name: str, dtype: str, in_place: bool, device: torch.device, group: Group, team: Any
) -> list[Row]:
    """All sizes of one op, round by round, so that a busy moment of the machine does not hit one size alone.

    `team`: all ranks that are at work, in this group and in those beside it.
    """
    calls = [make_call(op, in_place, size, dtype, device, group) for size in sweep.sizes]
    before = [wrong_elements(call, device) for call in calls]
    repeats = [repeats_of(call, sweep, device, team) for call in calls]
    timed = [
        [time_round(call.run, times, device, team) for call, times in zip(calls, repeats, strict=True)]
        for _ in range(sweep.rounds)
    ]
    after = [wrong_elements(call, device) for call in calls]
    rows = []
    for number, call in enumerate(calls):
        times = over_ranks([one[number] for one in timed], dist.ReduceOp.MAX, device, team)
        (wrong,) = over_ranks([float(max(before[number], after[number]))], dist.ReduceOp.SUM, device, team)
        each = [1e6 * seconds / call.messages for seconds in times]
        low, median, high = (float(np.quantile(each, share)) for share in (0.25, 0.5, 0.75))
        members = 2 if op == "send" else group.size
        rows.append(Row(op, name, members, dtype, in_place, call.nbytes, median, low, high, min(each), int(wrong)))
    return rows


def wrong_elements(call: Call, device: torch.device) -> int:
    call.fill()
    call.run()
    synchronise(device)
    return call.wrong()


def repeats_of(call: Call, sweep: Sweep, device: torch.device, team: Any) -> int:
    """Calls of a round, the same on all ranks."""
    once = over_ranks([time_round(call.run, 1, device, team)], dist.ReduceOp.MAX, device, team)[0]
    return max(1, min(MAX_CALLS, int(sweep.point_s / sweep.rounds / once)))


def time_round(call: Callable[[], object], calls: int, device: torch.device, team: Any) -> float:
    dist.barrier(group=team)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def over_ranks(values: list[float], how: Any, device: torch.device, team: Any) -> list[float]:
    reduced = torch.tensor(values, device=device, dtype=torch.float64)
    dist.all_reduce(reduced, op=how, group=team)
    return reduced.tolist()


# --- for profiles ----------------------------------------------------------------------------------------


def noise(rows: list[Row]) -> float:
    """Median round over the fastest, the median of all points."""
    return statistics.median(row.time_us / row.fastest_us for row in rows)


def monotone(times: list[float]) -> list[float]:
    """Times made non-decreasing in size: a smaller message takes longer only because of noise."""
    return [float(f"{us:.5g}") for us in np.minimum.accumulate(times[::-1])[::-1]] if times else []
