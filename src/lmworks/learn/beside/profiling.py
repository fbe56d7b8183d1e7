"""Traces beside what LMWorks reads in them."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row


def exposed_seconds(module: ModuleType) -> list[Row]:
    """Of both steps of rank 0, in the jobs that wait for messages and for the host."""
    from ...trace.breakdown import Activity
    from ..checks.profiling import as_traces
    from ..planted_traces import WORKSPACE_SEED, planted_jobs

    rows = []
    for letter, planted, job in planted_jobs(WORKSPACE_SEED):
        if planted not in ("comm_bound", "sync_bound"):
            continue
        rank, trace = module.read_rank(job[0]), as_traces(job)[0]
        yours = module.step_seconds(rank.events, rank.start, rank.end)
        edges = (round(1e9 * edge) - trace.origin_ns for edge in (rank.start, rank.end))
        parts = Activity(trace).breakdown(*edges)
        ours = {"busy": parts.window - parts.idle, "exposed": parts.exposed_comm, "idle": parts.idle}
        rows += [Row(f"traces/{letter}, rank 0: {part}, ms", round(1e3 * yours[part], 3), round(ours[part] / 1e6, 3))
                 for part in ours]  # fmt: skip
    return rows


def bottleneck(module: ModuleType) -> list[Row]:
    from ...diagnose.verdict import judge
    from ...trace.summary import summarise
    from ..checks.profiling import as_traces
    from ..planted_traces import WORKSPACE_SEED, planted_jobs

    rows = []
    for letter, _, job in planted_jobs(WORKSPACE_SEED):
        traces = as_traces(job)
        yours = module.name_bottleneck([module.read_rank(document) for document in job])
        rows.append(Row(f"traces/{letter}", yours, judge(traces, summarise(traces)).verdict))
    return rows


BESIDE: dict[str, Beside] = {
    "exposed_seconds": exposed_seconds,
    "bottleneck": bottleneck,
}
