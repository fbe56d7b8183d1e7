"""Pictures of memory: what training and serving keep, what sharding and recomputing save, how far away it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...plan.cluster_request import ClusterRequest, run_on_cluster
from ...plan.memory.sheet import run_phases
from ...record.formatting import binary_bytes
from ...spec.hardware import catalogue
from ..drawing import Drawing
from ..planted_traces import planted_traces
from ..what_if import Setting, answer

PARTS = (("weights", "blue"), ("gradients", "green"), ("optimizer", "orange"), ("activations", "red"))


def states_and_activations(settings: dict[str, Setting]) -> Drawing:
    """By the planner; what else the allocator reserves is left out."""
    picture, rows = Drawing(640, 40 + 30 * len(settings)), []
    for name, setting in settings.items():
        found = answer(setting)
        parts = [(float(getattr(found, part)), shade) for part, shade in PARTS]
        rows.append((name, parts, binary_bytes(sum(value for value, _ in parts))))
    picture.bars(10, 10, 620, rows, label=150)
    picture.legend(160, 30 + 30 * len(settings), PARTS)
    return picture


def memory_anatomy() -> Drawing:
    kinds = ("none", "selective", "full")
    one = Setting(ranks="64", zero="3", micro_batch="4", micro_batches="1")
    return states_and_activations({f"recompute {kind}": one.but(recompute=kind) for kind in kinds})


def zero_stages() -> Drawing:
    one = Setting(ranks="8", micro_batches="1")
    return states_and_activations({f"ZeRO-{stage}": one.but(zero=str(stage)) for stage in range(4)})


def rlhf_memory() -> Drawing:
    rows, request = [], ClusterRequest(cluster="64xh100", zero=3)
    shades = ("blue", "green", "red")
    for method in ("ppo", "grpo"):
        run = run_on_cluster("llama3-8b", (f"align.method={method}", 'align.rewards=["exact"]'), request)
        for phase in run_phases(run, run.cluster.accelerator).phases:
            sizes = (phase.resting, phase.gradients, phase.working)
            parts = list(zip(map(float, sizes), shades, strict=True))
            name = phase.phase.replace("update of the critic", "critic's update")
            rows.append((f"{method.upper()}: {name}", parts, binary_bytes(phase.peak)))
    picture = Drawing(640, 40 + 30 * len(rows))
    picture.bars(10, 10, 620, rows, label=170)
    names = ("weights, states and cache", "gradients", "activations and buffers")
    picture.legend(40, 30 + 30 * len(rows), list(zip(names, shades, strict=True)))
    return picture


def memory_levels() -> Drawing:
    """Registers and SRAM are left out: the catalogue has no bandwidth of them."""
    gpu = catalogue()["H100-SXM-80GB"]
    rows = (
        ("HBM", gpu.bandwidth_gbs, f"{gpu.memory_gb:g} GB", "weights, activations, cache"),
        ("NVLink", gpu.link_gbs, f"{gpu.per_node} GPUs", "tensor parallelism"),
        ("PCIe", gpu.host_gbs, "host memory", "offloaded states"),
        ("network", gpu.nic_gbs, "all machines", "data and pipeline parallelism"),
    )
    picture, left, scale = Drawing(640, 160), 90, 62
    for number, (name, rate, reach, use) in enumerate(rows):
        y = 12 + 32 * number
        picture.text(left - 8, y + 16, name, anchor="end")
        picture.box(left, y, scale * math.log10(rate), 24, f"{rate:,.0f} GB/s", "blue")
        picture.text(left + scale * 3.6 + 10, y + 16, f"{reach}: {use}", anchor="start")
    picture.text(left, 152, "length: the logarithm of GB/s, one direction", anchor="start", size=12)
    return picture


def kv_paging() -> Drawing:
    """Three sequences of 10, 7 and 12 tokens, of which the first 4 are the same prompt for two; blocks of 4."""
    picture, size = Drawing(640, 268), 24
    picture.text(10, 20, "paged: blocks of 4 tokens, the prompt of A and B is shared", anchor="start")
    tables = {"A": (0, 1, 2), "B": (0, 3), "C": (4, 5, 6)}
    filled = {0: 4, 1: 4, 2: 2, 3: 3, 4: 4, 5: 4, 6: 4}
    for number, (name, blocks) in enumerate(tables.items()):
        words = ", ".join(map(str, blocks))
        picture.box(10, 32 + number * 32, 140, 26, f"{name}: blocks {words}", "grey")
    shades = {0: "purple", 1: "blue", 2: "blue", 3: "green", 4: "orange", 5: "orange", 6: "orange"}
    for block in range(8):
        x, y = 170 + (block % 4) * (4 * size + 16), 40 + (block // 4) * 50
        for slot in range(4):
            picture.box(x + slot * size, y, size, size, shade=shades[block] if slot < filled.get(block, 0) else "white")
        picture.text(x + 2 * size, y + size + 14, f"block {block}" if block in filled else "free", size=12)
    picture.text(10, 166, "reserved for the longest answer of 20 tokens", anchor="start")
    for number, (name, tokens, shade) in enumerate((("A", 10, "blue"), ("B", 7, "green"), ("C", 12, "orange"))):
        y = 176 + number * 30
        picture.text(150, y + 17, name, anchor="end")
        for slot in range(20):
            picture.box(170 + slot * 22, y, 22, 22, shade=shade if slot < tokens else "white")
    return picture


def states_of_30b() -> Drawing:
    """2 + 2 + 12 bytes a parameter, by what each stage of ZeRO shards over 64 ranks."""
    parameters, ranks = 30e9, 64
    parts = ((2, "blue", 3), (2, "green", 2), (12, "orange", 1))  # bytes, shade, sharded from this stage on
    rows = []
    for stage in range(4):
        sizes = [(size * parameters / (ranks if stage >= first else 1), shade) for size, shade, first in parts]
        rows.append((f"ZeRO-{stage}", sizes, f"{sum(size for size, _ in sizes) / 1e9:.1f} GB"))
    gpu = catalogue()["H100-SXM-80GB"]
    rows.append(("one H100", [(gpu.memory_gb * 1e9, "grey")], f"{gpu.memory_gb:g} GB"))
    picture = Drawing(640, 40 + 30 * len(rows))
    picture.bars(10, 10, 620, rows)
    names = (("weights", "blue"), ("gradients", "green"), ("optimizer, with the fp32 copy", "orange"))
    picture.legend(120, 30 + 30 * len(rows), names)
    return picture


def hbm_round_trips() -> Drawing:
    """Each arrow is a tensor of 8,192 tokens × 4,096 in bf16; attention has 32 heads."""
    rate = catalogue()["H100-SXM-80GB"].bandwidth_gbs * 1e9
    tokens, width, heads = 8192, 4096, 32
    tensor, scores = 2 * tokens * width, 2 * heads * tokens**2

    def moved(size: float) -> str:
        return f"{binary_bytes(size)}, {size / rate * 1e6:,.0f} µs"

    picture = Drawing(640, 250)
    for left, wide, kernels in ((10, 380, ("+ bias", "GELU", "× scale")), (430, 200, ("all three",))):
        picture.box(left, 110, wide, 28, "HBM", "grey")
        step = wide / len(kernels)
        for number, kernel in enumerate(kernels):
            x = left + number * step + step / 2
            picture.box(x - 45, 36, 90, 34, kernel, "blue")
            picture.arrow((x - 20, 110), (x - 20, 70))
            picture.arrow((x + 20, 70), (x + 20, 110))
        name = f"{len(kernels)} kernels" if len(kernels) > 1 else "fused"
        picture.text(left + wide / 2, 22, f"{name}: {moved(2 * len(kernels) * tensor)}")
    picture.text(10, 172, "attention: bytes from and to HBM", anchor="start")
    rows = []
    for name, stored in (("scores stored", 4 * scores), ("FlashAttention", 0)):
        parts = [(float(4 * tensor), "blue"), (float(stored), "red")]
        rows.append((name, parts, moved(4 * tensor + stored)))
    picture.bars(10, 182, 620, rows, label=115)
    return picture


def four_timelines() -> Drawing:
    """One step of rank 0 from the simulated traces of the course, other ones than a workspace has."""
    causes = {
        "input_bound": "CPU bound: the loader is late", "comm_bound": "comm bound: all-reduces are exposed",
        "host_bound": "launch overhead: kernels are shorter than a launch",
        "memory_bound": "memory bound: element-wise kernels, no gaps",
    }  # fmt: skip
    picture, left, wide, y = Drawing(640, 468), 68, 560, 18.0
    for name, words in causes.items():
        events = planted_traces(name, 1)[0]["traceEvents"]
        step = next(event for event in events if event["name"].startswith("ProfilerStep"))
        scale = wide / step["dur"]
        picture.text(left, y, words, anchor="start")
        for lane, title in enumerate(("host", "compute", "NCCL")):
            picture.text(left - 8, y + 22 + 26 * lane, title, anchor="end", size=12)
        for lane, start, end, shade in merged(events, step["ts"], step["ts"] + step["dur"]):
            at = left + (start - step["ts"]) * scale
            picture.box(at, y + 8 + 26 * lane, max((end - start) * scale, 0.6), 20, shade=shade)
        y += 110
    names = (("launches", "purple"), ("loader", "orange"), ("products, attention", "blue"),
             ("element-wise", "green"), ("all-reduce", "red"))  # fmt: skip
    picture.legend(20, y + 4, names)
    return picture


def merged(events: list[dict[str, Any]], begin: float, end: float) -> list[tuple[int, float, float, str]]:
    """(lane, from, until, shade) of what lies between; neighbours of one shade, up to 2 µs apart, are one."""
    found: list[tuple[int, float, float, str]] = []
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: float(one["ts"])):
        start, until = event["ts"], event["ts"] + event["dur"]
        place = lane_of(event)
        if place is None or until <= begin or start >= end:
            continue
        lane, shade = place
        last = next((number for number in reversed(range(len(found))) if found[number][0] == lane), None)
        if last is not None and found[last][3] == shade and start <= found[last][2] + 2:
            found[last] = (lane, found[last][1], max(found[last][2], until), shade)
        else:
            found.append((lane, max(start, begin), until, shade))
    return [(lane, start, min(until, end), shade) for lane, start, until, shade in found]


def lane_of(event: dict[str, Any]) -> tuple[int, str] | None:
    """Its lane and its shade."""
    if event["cat"] == "kernel":
        if "nccl" in event["name"]:
            return 2, "red"
        return 1, "green" if "elementwise" in event["name"] else "blue"
    if event["cat"] == "cpu_op" and event["name"] != "aten::item":
        return 0, "purple"
    return (0, "orange") if "DataLoader" in event["name"] else None


PICTURES: dict[str, Callable[[], Drawing]] = {
    one.__name__: one
    for one in (
        memory_anatomy, zero_stages, rlhf_memory, memory_levels, kv_paging, states_of_30b, hbm_round_trips,
        four_timelines,
    )
}  # fmt: skip
