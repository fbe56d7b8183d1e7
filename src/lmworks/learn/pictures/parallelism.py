"""Pictures of parallelism: how a model and its batch are laid over devices."""

from __future__ import annotations

from collections.abc import Callable

from ...plan.cluster_request import ClusterRequest, run_on_cluster
from ...plan.devices.machine import Machine
from ...plan.memory.sheet import run_budget
from ...plan.pipelines.schedule import actions, durations, simulate, total
from ...plan.predict import time_of
from ...plan.step.one_device import StepTime
from ...record.formatting import binary_bytes
from ..drawing import Drawing

PASSES = {"F": "blue", "B": "green", "I": "green", "W": "orange"}


def tensor_parallel_mlp() -> Drawing:
    picture = Drawing(640, 250)
    picture.box(10, 95, 70, 60, "X\ntokens ×\nwidth", "grey", 12)
    for rank, y in enumerate((20, 150)):
        picture.text(135, y - 4 if rank == 0 else y + 88, f"rank {rank}", bold=True)
        picture.box(120, y, 90, 70, f"A{'₁₂'[rank]}: half\nof the\ncolumns", "blue", 12)
        picture.arrow((80, 125), (120, y + 35))
        picture.box(245, y + 10, 80, 50, f"f(X·A{'₁₂'[rank]})", "white")
        picture.arrow((210, y + 35), (245, y + 35))
        picture.box(360, y, 90, 70, f"B{'₁₂'[rank]}: half\nof the\nrows", "orange", 12)
        picture.arrow((325, y + 35), (360, y + 35))
        picture.arrow((450, y + 35), (500, 110 if rank == 0 else 140))
    picture.box(500, 95, 60, 60, "+\nall-reduce", "red", 11)
    picture.box(585, 95, 45, 60, "Y", "grey")
    picture.arrow((560, 125), (585, 125))
    return picture


def pipeline_schedules() -> Drawing:
    """Each stage's work, simulated; a forward pass takes one unit of time."""
    ranks, micro_batches, left, unit, height = 4, 8, 62, 16.0, 20
    picture, y = Drawing(640, 400), 18.0
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("zbv", 2)):
        times = durations()
        stages = [{kind: seconds / virtual for kind, seconds in times.items()}] * (ranks * virtual)
        spans = simulate(actions(schedule, ranks, virtual, micro_batches), stages)
        busy = sum(span.end - span.begin for span in spans) / ranks
        idle = 1 - busy / total(spans)
        picture.text(left, y, f"{schedule}: {total(spans):g} units of time, {idle:.0%} idle", anchor="start")
        for rank in range(ranks):
            picture.text(left - 8, y + 22 + rank * (height + 2), f"rank {rank}", anchor="end", size=12)
        for span in spans:
            wide = (span.end - span.begin) * unit
            words = f"{span.micro_batch}" if wide >= 12 else ""
            at = left + span.begin * unit
            picture.box(at, y + 8 + span.rank * (height + 2), wide, height, words, PASSES[span.kind], 11)
        y += ranks * (height + 2) + 36
    names = (("forward", "blue"), ("backward, or its half for the inputs", "green"), ("half for the weights", "orange"))
    picture.legend(left, y - 4, names)
    return picture


def planned(model: str, request: ClusterRequest) -> tuple[StepTime, str]:
    """A step, and the memory of a rank in words."""
    run = run_on_cluster(model, (), request)
    gpu = run.cluster.accelerator
    assert gpu is not None
    time = time_of(run, Machine.of(gpu))
    assert time is not None
    return time, binary_bytes(float(run_budget(run).reserved))


def what_layouts_wait_for() -> Drawing:
    """One batch of OPT-30B on 64 GPUs by layout; the rest of a step is computing."""
    layouts = {
        "dp 64, ZeRO-3": (3, 1, 1, 8), "tp 8, dp 8": (1, 8, 1, 8), "pp 8, dp 8": (1, 1, 8, 2),
        "tp 2, pp 4, dp 8": (1, 2, 4, 2), "tp 4, pp 4, dp 4": (1, 4, 4, 2),
    }  # fmt: skip
    waits = (("dp", "red"), ("tp", "orange"), ("bubble", "grey"))
    rows = []
    for name, (zero, tp, pp, micro_batch) in layouts.items():
        request = ClusterRequest("64xh100", 2048, micro_batch, 512, zero=zero, tp=tp, pp=pp, recompute="full")
        time, memory = planned("opt-30b", request)
        parts = [(time.parts[part], shade) for part, shade in waits]
        computing = time.total - sum(seconds for seconds, _ in parts)
        rows.append((name, [(computing, "blue"), *parts], f"{time.total:.1f} s, {memory}"))
    picture = Drawing(640, 40 + 30 * len(rows))
    picture.bars(10, 10, 620, rows, label=130)
    names = (("computing", "blue"), ("data parallelism", "red"), ("tensor parallelism", "orange"), ("bubble", "grey"))
    picture.legend(80, 30 + 30 * len(rows), names)
    return picture


def scaling_stalls() -> Drawing:
    """GPU-seconds of one step of Llama 3 8B: with linear scaling all bars were as long as the first."""
    rows, first = [], 0.0
    for gpus in (8, 32, 128, 512, 1024):
        time, _ = planned("llama3-8b", ClusterRequest(f"{gpus}xh100", 2048, 1, 1024, zero=3))
        waits = [(gpus * time.parts[part], shade) for part, shade in (("dp", "red"), ("stragglers", "orange"))]
        whole = gpus * time.total
        first = first or whole
        computing = whole - sum(seconds for seconds, _ in waits)
        words = f"{time.total:.3g} s, {first / whole:.0%}"
        rows.append((f"{gpus:,} GPUs", [(computing, "blue"), *waits], words))
    picture = Drawing(640, 40 + 30 * len(rows))
    picture.bars(10, 10, 620, rows, label=100)
    names = (("computing", "blue"), ("exposed communication", "red"), ("the slowest rank", "orange"))
    picture.legend(108, 30 + 30 * len(rows), names)
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    one.__name__: one for one in (tensor_parallel_mlp, pipeline_schedules, what_layouts_wait_for, scaling_stalls)
}
