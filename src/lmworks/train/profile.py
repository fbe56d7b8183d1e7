"""Profiler traces of chosen steps on chosen ranks: by `log.profile`, or asked for while the run is under way.

A request is a file in the run folder (`record.profile_request`). Rank 0 looks for it in every step, and signals the
others with the scalars that all ranks exchange anyway (step.py): so after step n all of them know that there is one.
Passes of step n + 1 may be launched by then (async_step.py), so all begin with step n + 2. Before it rank 0 broadcasts
what is asked for.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile, record_function

from ..parallel.parallel_model import ParallelModel
from ..parallel.profiler import recorder, write_trace
from ..parallel.world import run_on_rank_zero
from ..record import RunFolder
from ..record.jsonl import without_nan
from ..record.profile_request import TRACE_SUFFIX, read_request, remove_request, request_path, trace_path, withdraw
from ..spec import RunSpec, SpecError
from .spans import Range, Spans


@dataclass(frozen=True)
class Window:
    """Steps that are recorded, and the ranks that record them (None: all)."""

    first: int
    last: int
    ranks: list[int] | None = None
    stacks: bool = False

    def overlaps(self, first: int, last: int) -> bool:
        return self.first <= last and first <= self.last


class Profiler:
    """Called at the beginning of every step; records only those that were asked for.

    Writes traces/rank0-steps-10-12.json.gz (Chrome's and Perfetto's format) and, on a GPU, a .pickle beside it with the
    history of its memory. On a CPU the trace itself holds every allocation.
    """

    def __init__(self, spec: RunSpec, folder: RunFolder, device: torch.device, model: ParallelModel) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.spec, self.folder, self.device, self.model = spec, folder, device, model
        log = spec.log
        self.planned = (
            Window(log.profile[0], log.profile[1], log.profile_ranks, log.profile_stacks) if log.profile else None
        )
        self.window: Window | None = None  # of all ranks; `recording` on those that were chosen
        self.due = 0  # the step before which all ranks read the request that rank 0 has found
        self.started = False
        self.recording: profile | None = None
        self.spans: Spans | None = None  # of the trace
        self.nvtx = Spans(nvtx_ranges(device), model) if log.nvtx else None
        if self.nvtx is not None:
            self.nvtx.install()
        self.request = request_path(folder)
        if self.rank == 0:
            remove_request(folder)  # of an attempt that was killed

    # --- requests -----------------------------------------------------------------------------------------

    def finds_request(self) -> bool:
        """In every step, on rank 0: one stat of a file, a few microseconds."""
        return self.rank == 0 and os.path.exists(self.request)

    def announce(self, step: int) -> None:
        """All ranks know after `step` that there is a request."""
        if not self.due and self.window is None:
            self.due = step + 2

    def take_request(self, step: int) -> None:
        """On all ranks, before `step`. A request that was withdrawn meanwhile is none."""
        self.due = 0
        request = run_on_rank_zero(lambda: read_request(self.folder))
        if request is None:
            if self.rank == 0:
                remove_request(self.folder)  # a file that is no request
            return
        last = min(step + request.steps - 1, self.spec.optim.steps)
        if self.planned is not None and self.planned.overlaps(step, last):
            self.due = self.planned.last + 1
            return
        self.window = Window(step, last, request.ranks, request.stacks)
        if self.rank == 0:
            ranks = request.ranks if request.ranks is not None else list(range(self.spec.parallel.world))
            self.folder.event("profile", step - 1, id=request.id, first=step, last=last, ranks=ranks)
            withdraw(self.folder, request)  # after the event: `profile attach` takes a request without either for lost

    # --- steps --------------------------------------------------------------------------------------------

    def is_edge(self, step: int) -> bool:
        """Whether the passes after `step` wait until it is over: recording begins or ends between the two."""
        edges = [edge for window in (self.planned, self.window) if window for edge in (window.first - 1, window.last)]
        return step in edges or step + 1 == self.due

    def begin_step(self, number: int) -> None:
        if self.window is not None and number > self.window.last:
            self.close()
        if number == self.due:
            self.take_request(number)
        planned = self.planned
        if self.window is None and planned is not None and planned.first <= number <= planned.last:
            self.window = planned
        if self.window is not None and not self.started and self.is_chosen(self.window):
            self.started = True
            self.start(self.window)
        self.name_step(number)

    def name_step(self, number: int) -> None:
        """What is launched from here on belongs to this step."""
        for spans in (self.nvtx, self.spans):
            if spans is not None:
                spans.begin_step(number)

    def is_chosen(self, window: Window) -> bool:
        return window.ranks is None or self.rank in window.ranks

    def start(self, window: Window) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels of the step before do not belong to it
        if under_nsys():
            torch.cuda.profiler.start()
            torch.cuda.nvtx.mark(f"rank {self.rank} of {self.spec.parallel.world}")
            return
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        with suppress(OSError):  # else it would pass for the new one
            trace_path(self.folder, self.rank, window.first, window.last).unlink(missing_ok=True)
        self.recording = recorder(self.device, profile_memory=True, record_shapes=True, with_stack=window.stacks)
        self.recording.start()
        self.recording.add_metadata_json("lmworks", json.dumps(without_nan(self.facts(window))))
        self.spans = Spans(record_function, self.model, modules=True)
        self.spans.install()

    def facts(self, window: Window) -> dict[str, Any]:
        """What the trace says of the run, for its analysis."""
        facts = {"rank": self.rank, "steps": [window.first, window.last], "spec": self.spec.to_dict()}
        with suppress(OSError, ValueError):  # a run without a prediction
            prediction = json.loads(self.folder.prediction_path.read_text(encoding="utf-8"))
            facts |= {key: prediction.get(key) for key in ("step_ops", "machine_rates")}
        return facts

    def close(self) -> None:
        """Write what was recorded; a run that ends early still leaves its trace."""
        recording, self.recording, self.started = self.recording, None, False
        window, self.window = self.window, None
        if window is self.planned:
            self.planned = None
        if window is None or not self.is_chosen(window):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # within the last step: its kernels belong to it
        if under_nsys():
            torch.cuda.profiler.stop()
        if recording is None:
            return
        if self.spans is not None:
            self.spans.remove()
            self.spans = None
        recording.stop()
        try:
            self.write(recording, window)
        except OSError as error:  # training goes on
            where = f"{error.filename or self.folder.traces}: {error.strerror}"
            print(f"lmworks: rank {self.rank}: the trace was not written: {where}", file=sys.stderr, flush=True)

    def write(self, recording: profile, window: Window) -> None:
        path = trace_path(self.folder, self.rank, window.first, window.last)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.device.type == "cuda":
            try:
                torch.cuda.memory._dump_snapshot(str(path).removesuffix(TRACE_SUFFIX) + ".pickle")
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        write_trace(recording, path)

    def end_run(self) -> None:
        self.close()
        if self.nvtx is not None:
            self.nvtx.remove()
            self.nvtx = None
        if self.rank == 0:
            remove_request(self.folder)  # that came too late


def under_nsys() -> bool:
    """Whether Nsight Systems records this process; PyTorch's profiler cannot at the same time."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


def nvtx_ranges(device: torch.device) -> Range:
    """Ranges that Nsight Systems shows. NCCL names its collectives there itself."""
    if device.type != "cuda":
        raise SpecError("log.nvtx = true: Nsight Systems records GPUs, and this run is on the CPU; leave it out")
    make_range: Range = torch.cuda.nvtx.range
    return make_range
