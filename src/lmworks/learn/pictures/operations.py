"""Pictures of operations: checkpoints, faults, debugging, clusters, serving."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...plan.cluster_request import ClusterRequest, run_on_cluster
from ...plan.devices.machine import Machine
from ...plan.memory.sheet import run_budget
from ...plan.pipelines.schedule import actions, durations, idle_shares, simulate, stage_times, total
from ...plan.predict import time_of
from ...plan.reliability import RATES, Recovery, Storage, best_every, ettr, mtbf
from ...record.formatting import binary_bytes
from ...tune.rungs import halving, rung_steps
from ..drawing import Drawing

MEMORY = (("parameters", "blue"), ("gradients", "green"), ("optimizer", "orange"), ("activations", "red"),
          ("buffers", "grey"))  # fmt: skip
# Name → a spec of configs/reference and its layout in words.
LAYOUTS = (
    ("7B on 8", "7b-8-h100", "ZeRO-3"),
    ("70B on 64", "70b-64-h100", "TP 8 × PP 2 × ZeRO-3"),
    ("70B on 256", "70b-256-h100", "TP 4 × PP 4 × HSDP 2×8"),
    ("405B on 1,024", "405b-1024-h100", "TP 8 × PP 8 × HSDP 2×8"),
)


def megascale_layouts() -> Drawing:
    """The fullest rank of reference configurations, by the planner."""
    picture, rows = Drawing(640, 160), []
    for name, spec, layout in LAYOUTS:
        sheet = run_budget(run_on_cluster(f"configs/reference/{spec}.toml", (), ClusterRequest()))
        parts = [(float(getattr(sheet, part)), shade) for part, shade in MEMORY]
        rows.append((f"{name}: {layout}", parts, binary_bytes(float(sheet.reserved))))
    picture.bars(10, 10, 620, rows, label=285)
    picture.legend(60, 150, MEMORY)
    return picture


SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zbv", 2))  # with the stages of a rank
KINDS = {"F": "blue", "B": "orange", "I": "orange", "W": "green"}
RANKS, MICRO_BATCHES = 4, 8


def schedules_and_bubbles() -> Drawing:
    """Simulated with equal stages; a rank has as much work in each schedule."""
    picture = Drawing(640, 268)
    for number, (name, virtual) in enumerate(SCHEDULES):
        costs = [1 / virtual] * (RANKS * virtual)
        spans = simulate(actions(name, RANKS, virtual, MICRO_BATCHES), stage_times(durations(), costs))
        top, scale = 8 + number * 80, 14.6
        picture.text(10, top + 22, f"{name}\nidle {max(idle_shares(spans)):.0%}", anchor="start")
        picture.text(10, top + 56, f"{total(spans):g} forwards", anchor="start", size=11)
        for rank in range(RANKS):
            picture.line((110, top + 8 + rank * 16), (110 + total(spans) * scale, top + 8 + rank * 16), dashed=True)
        for span in spans:
            wide = (span.end - span.begin) * scale
            if wide:
                picture.box(110 + span.begin * scale, top + span.rank * 16, wide, 13, shade=KINDS[span.kind])
    picture.legend(110, 260, [("forward", "blue"), ("backward, or its half for inputs", "orange"),
                              ("its half for weights", "green")])  # fmt: skip
    return picture


def successive_halving() -> Drawing:
    """A line a trial: how far it is trained."""
    trials, eta = 16, 4
    steps = rung_steps(25, 400, eta)
    bracket = halving(trials, steps, eta)
    picture, left, scale = Drawing(640, 250), 60.0, 1.0
    for rung in bracket.rungs:
        x = left + rung.step * scale
        picture.line((x, 34), (x, 204), dashed=True)
        picture.text(x, 220, f"{rung.step}")
    for trial in range(trials):
        reached = [rung.step for rung in bracket.rungs if trial < rung.trials]
        picture.box(left, 40 + trial * 10, reached[-1] * scale, 6, shade="green" if len(reached) == 3 else "blue")
    picture.text(left, 220, "0")
    picture.text(left + 200, 220, "steps of training")
    picture.text(left + 30, 24, f"{bracket.rungs[0].trials} trials start", anchor="start")
    picture.text(left + 170, 24, f"{bracket.rungs[1].trials} go on", anchor="start")
    picture.text(left + 400, 24, f"{bracket.rungs[2].trials} is trained whole")
    picture.text(10, 243, f"{bracket.steps:,} steps in all; {trials} whole runs are {trials * steps[-1]:,}.",
                 anchor="start")  # fmt: skip
    return picture


GPUS = 16_384


def checkpoint_interval() -> Drawing:
    """Share of the time that trains for good against the seconds between two saves, by the formula of the planner."""
    picture = Drawing(640, 280)
    left, top, wide, high = 60, 20, 560, 200
    first, last, least = 4.0, 4000.0, 0.80

    def at(seconds: float, share: float) -> tuple[float, float]:
        return left + wide * np.log(seconds / first) / np.log(last / first), top + high * (1 - share) / (1 - least)

    stall, write = Storage().seconds(405e9 * 12 / GPUS, GPUS)
    saved = Recovery(float(mtbf(GPUS, RATES["llama3"])), float(stall), float(write), 300 + float(write), 30)
    for share in (0.80, 0.85, 0.90, 0.95, 1.0):
        y = at(first, share)[1]
        picture.line((left, y), (left + wide, y), dashed=True)
        picture.text(left - 8, y + 5, f"{share:.0%}", anchor="end")
    for seconds in (10, 100, 1000):
        picture.text(at(seconds, least)[0], top + high + 18, f"{seconds} s")
    for recovery, words in ((saved, "asynchronous"), (saved.synchronous(), "synchronous")):
        every = np.geomspace(first, last, 60)
        shares = [float(ettr(seconds, recovery)) for seconds in every]
        points = [at(seconds, share) for seconds, share in zip(every, shares, strict=True) if share >= least]
        picture.line(*points)
        best = float(best_every(recovery))
        x, y = at(best, float(ettr(best, recovery)))
        picture.box(x - 4, y - 4, 8, 8, shade="green")
        picture.text(x, y - 10 if words == "asynchronous" else y + 24, f"{words}: best every {best:.0f} s", size=12)
    picture.text(left + wide / 2, 272, "seconds of training between two saves")
    return picture


def loss_spike_triage() -> Drawing:
    picture = Drawing(640, 330)
    picture.box(210, 10, 220, 44, "loss spikes, or is NaN:\nwhat does the batch look like?", "grey")
    columns = (
        (10, "data", "orange", "entropy, duplicates,\nlanguage of each sample", "skip or rewind,\nmend the source"),
        (220, "numbers", "blue", "statistics by block,\nfirst module with NaN,\nloss scale",
         "clip, lower rate,\nlonger warm-up, bf16"),
        (430, "machine", "red", "same step again,\nreplicas compared,\none rank alone",
         "resume elsewhere,\ntake the node out"),
    )  # fmt: skip
    tests = ("unusual samples", "the same when rerun", "differs when rerun")
    for (x, name, shade, look, mend), test in zip(columns, tests, strict=True):
        middle = x + 90
        picture.arrow((320, 54), (320, 72), (middle, 72), (middle, 104))
        picture.text(middle + 6, 92, test, size=11, anchor="start")
        picture.box(x, 104, 200, 26, name, shade)
        picture.arrow((middle, 130), (middle, 148))
        picture.box(x, 148, 200, 66, look, "white")
        picture.arrow((middle, 214), (middle, 232))
        picture.box(x, 232, 200, 48, mend, "green")
    picture.text(320, 312, "Then run it again from the checkpoint before the spike: is it gone?")
    return picture


def serving_architecture() -> Drawing:
    picture = Drawing(640, 320)
    picture.box(10, 40, 90, 44, "tenant A\ngold", "white")
    picture.box(10, 120, 90, 44, "tenant B\nbatch", "white")
    picture.box(170, 40, 130, 124, "gateway:\nkeys, limits,\nqueue, retries,\nrouting", "purple")
    picture.arrow((100, 62), (170, 62))
    picture.arrow((100, 142), (170, 142))
    servers = (
        (20, "server: 8B, stable\nversion, 90%", "blue"),
        (84, "server: 8B, next\nversion, 10%", "orange"),
        (148, "server: 70B, TP 4", "blue"),
    )
    devices = ("GPU 0", "MIG slice 3/7", "GPUs 4 to 7")
    for (y, words, shade), device in zip(servers, devices, strict=True):
        picture.arrow((300, 102), (340, 102), (340, y + 24), (370, y + 24))
        picture.box(370, y, 155, 48, words, shade, size=12)
        picture.arrow((525, y + 24), (545, y + 24))
        picture.box(545, y, 85, 48, device, "green", size=11)
    picture.line((235, 164), (235, 214), dashed=True)
    picture.line((448, 196), (448, 214), dashed=True)
    picture.line((235, 214), (448, 214), dashed=True)
    picture.arrow((340, 214), (340, 236), dashed=True)
    picture.box(170, 236, 355, 34, "metrics, traces, events: alerts, dashboard", "grey")
    picture.line((170, 253), (135, 253), dashed=True)
    picture.arrow((135, 253), (135, 190), (200, 190), (200, 164), dashed=True)
    picture.text(320, 292, "Autoscaler and rollout gate act on metrics:\nmore servers, or back to the stable version.")
    return picture


def weak_scaling() -> Drawing:
    """Llama 3 1B on H100s, four sequences of 8,192 tokens a GPU, ZeRO-3 over all, by the planner."""
    picture, rows, one = Drawing(640, 190), [], 0.0
    for gpus in (1, 8, 64, 512, 1024):
        asked = ClusterRequest(
            cluster=f"{gpus}xh100", seq=8192, micro_batch=1, global_batch=4 * gpus, zero=3, recompute="selective"
        )
        run = run_on_cluster("llama3-1b", (), asked)
        gpu = run.cluster.accelerator
        assert gpu is not None
        time = time_of(run, Machine.of(gpu))
        assert time is not None
        each = time.tokens_per_s / gpus
        one = one or each
        lost = time.parts.get("dp", 0.0) + time.parts.get("stragglers", 0.0)
        rows.append(
            (
                "1 GPU" if gpus == 1 else f"{gpus:,} GPUs",
                [(each, "blue")],
                f"{each / one:.0%}, {lost / time.total:.0%} waiting",
            )
        )
    picture.bars(10, 12, 620, rows, label=90)
    words = "Tokens/s of one GPU. Waiting: sends of data parallelism that are not hidden, and stragglers."
    picture.text(10, 180, words, anchor="start", size=12)
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "megascale_layouts": megascale_layouts,
    "schedules_and_bubbles": schedules_and_bubbles,
    "successive_halving": successive_halving,
    "checkpoint_interval": checkpoint_interval,
    "loss_spike_triage": loss_spike_triage,
    "serving_architecture": serving_architecture,
    "weak_scaling": weak_scaling,
}
