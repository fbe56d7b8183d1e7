"""The planned half of scaling_cpu.py: steps of 8 to 4,096 GPUs, and what makes them less efficient than the fewest.

Exposed communication is priced twice, on the network as it is and on one whose rounds take no time: the difference is
latency, the rest is bandwidth (of links inside a machine with their latency, as those are measured curves).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from lmworks.plan.case import Case
from lmworks.plan.cluster_request import ClusterRequest, run_on_cluster
from lmworks.plan.devices import links
from lmworks.plan.memory.reserve import safe_bytes
from lmworks.plan.memory.sheet import budget
from lmworks.plan.step.price import Price, timeline
from lmworks.spec import RunSpec

COMMUNICATION = ("tp", "cp", "ep", "dp", "pp")
LATENCIES = ("start", "peer", "ring_inside", "ring_across", "tree_across")
SEQ = 8192
GPUS = [2**power for power in range(3, 13)]


@dataclass(frozen=True)
class Curve:
    """One model and way of scaling; `batch` is of a whole step (strong) or of each data-parallel rank (weak)."""

    name: str
    model: str
    gpu: str
    scaling: str
    batch: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 3
    shard: int = 0  # HSDP: ranks that share one copy; 0: all of them
    recompute: str = "selective"

    def spec(self, gpus: int) -> RunSpec | None:
        """None: too few GPUs for the layout. Once every rank has one sequence, tensor parallelism takes the rest."""
        tp, rest = self.tp, gpus // (self.tp * self.pp)
        if self.scaling == "strong" and rest > self.batch:
            tp, rest = tp * rest // self.batch, self.batch
        if rest < self.ep or gpus < tp * self.pp:
            return None
        batch = self.batch * (rest if self.scaling == "weak" else 1)
        more = ["parallel.compile=true", *(["parallel.schedule=1f1b"] if self.pp > 1 else [])]
        if self.shard and rest > self.shard:
            more += ["parallel.strategy=fsdp2", f"parallel.dp_replicate={rest // self.shard}"]
            more += [f"parallel.dp_shard={self.shard}"]
        degrees = {"tp": tp, "pp": self.pp, "ep": self.ep, "zero": None if self.shard else self.zero}
        request = ClusterRequest(
            cluster=f"{gpus}x{self.gpu}", seq=SEQ, micro_batch=1, global_batch=batch, recompute=self.recompute,
            **degrees,
        )  # fmt: skip
        return run_on_cluster(self.model, more, request)


CURVES = (
    Curve("8B, FSDP2", "llama3-8b", "h200", "weak", 1),
    Curve("8B, HSDP, shards of 64", "llama3-8b", "h200", "weak", 1, shard=64),
    Curve("30B-A3B MoE, FSDP2, ep 8", "qwen3-30b-a3b", "h200", "weak", 1, ep=8),
    Curve("8B, FSDP2, then tp", "llama3-8b", "h200", "strong", 512),
    Curve("70B, tp 8, pp 4, ZeRO-1", "llama3-70b", "h200", "strong", 1024, tp=8, pp=4, zero=1),
    Curve("30B-A3B MoE, FSDP2, ep 8, then tp", "qwen3-30b-a3b", "h200", "strong", 512, ep=8),
)


@contextmanager
def no_latency() -> Iterator[None]:
    table = links.read_links()
    network = dict(table["network"])
    for name in LATENCIES:
        value = network[name]
        network[name] = dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0
    with patch.object(links, "read_links", lambda: {**table, "network": network}):
        yield


def communication(price: Price) -> float:
    return sum(float(price.parts.get(axis, 0.0)) for axis in COMMUNICATION)


def point(spec: RunSpec) -> dict[str, Any]:
    """Seconds of a step by what they are spent on."""
    case = Case.of(spec)
    price = timeline(case)
    with no_latency():
        bandwidth = communication(timeline(case))
    exposed = communication(price)
    parts = {"bandwidth": bandwidth, "latency": exposed - bandwidth}
    parts |= {name: float(price.parts.get(name, 0.0)) for name in ("bubble", "stragglers")}
    parts["work"] = float(price.seconds) - sum(parts.values())
    layout = spec.parallel
    degrees = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "ep")}
    return {
        "gpus": layout.world,
        **degrees,
        "accumulation": spec.accumulation,
        "tokens": spec.tokens_per_step,
        "step_s": float(price.seconds),
        "mfu": float(price.mfu),
        "fits": bool(budget(case).reserved <= safe_bytes(case.gpu)),
        "parts_s": parts,
    }


def compared(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With efficiency beside the fewest GPUs, and the share of a step that each part costs more than there."""
    first = points[0]
    for one in points:
        scale = one["gpus"] / one["tokens"]  # GPU seconds for each token
        base = first["gpus"] / first["tokens"] / scale  # seconds there as seconds here
        one["efficiency"] = base * first["step_s"] / one["step_s"]
        one["lost"] = {
            name: (seconds - base * first["parts_s"][name]) / one["step_s"] for name, seconds in one["parts_s"].items()
        }
    return points


def planned() -> list[dict[str, Any]]:
    found = []
    for curve in CURVES:
        points = [point(spec) for gpus in GPUS if (spec := curve.spec(gpus))]
        found.append({**vars(curve), "points": compared(points)})
    return found


if __name__ == "__main__":
    for row in planned():
        print(row["name"], row["scaling"])
        for each in row["points"]:
            lost = {name: round(share, 3) for name, share in each["lost"].items()}
            print(f"  {each['gpus']:5} {each['efficiency']:.3f} mfu {each['mfu']:.3f} {each['fits']} {lost}")
