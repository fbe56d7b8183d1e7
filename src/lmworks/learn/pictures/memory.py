"""Pictures of memory: what training and serving keep, what sharding and recomputing save, how far away it lies."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...plan.cluster_request import ClusterRequest, run_on_cluster
from ...plan.memory.sheet import run_phases
from ...record.formatting import binary_bytes
from ...spec.hardware import catalogue
from ..drawing import Drawing
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


PICTURES: dict[str, Callable[[], Drawing]] = {
    one.__name__: one for one in (memory_anatomy, zero_stages, rlhf_memory, memory_levels, kv_paging)
}
