"""A run on a cluster, from the few words people say about it: "8 H100, ZeRO-3, 8192 tokens, one sequence at a time".

What is said replaces the spec's own; what is left open is filled in: data parallelism takes the GPUs that the other
degrees leave, and shards everything (ZeRO-3) unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import Cluster, Gpu, RunSpec, SpecError
from ..spec.hardware import parse_cluster
from ..spec.load import apply_overrides, read_source
from ..spec.presets import PRESETS
from ..spec.schema import merge

DEFAULT_SEQ = 8192  # tokens of a sequence where nobody says, and the model is made for as many


@dataclass(frozen=True)
class ClusterRequest:
    """None: not said."""

    cluster: str | None = None
    seq: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    zero: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    recompute: str | None = None
    dtype: str | None = None


def run_on_cluster(source: str, overrides: Iterable[str], request: ClusterRequest) -> RunSpec:
    """The spec, with the request laid over it and the overrides over both."""
    data = read_source(source)
    data.setdefault("name", source if source in PRESETS else Path(source).stem)
    overrides = list(overrides)
    data_keys = merge(apply_overrides(data, overrides), given_keys(request))
    if request.cluster:
        own = data_keys.get("cluster", {}).get("catalogue", "")
        data_keys = merge(data_keys, cluster_defaults(data_keys, parse_cluster(request.cluster, own), request))
    data_keys = with_default_seq(data_keys)
    return RunSpec.from_dict(apply_overrides(data_keys, overrides))


def cluster_and_gpu(own: Cluster, typed: str) -> tuple[Cluster, Gpu]:
    """The cluster that is typed, joined and paid as the spec's own; or that one, if it names its accelerator."""
    machines = own
    if typed:
        kept = {key: getattr(own, key) for key in ("fabric", "domain", "network", "nic_gbs", "price_hour", "profile")}
        machines = parse_cluster(typed, own.catalogue).replace(**kept)
    gpu = machines.accelerator
    if gpu is None:
        raise SpecError("what does it run on? Give --cluster, e.g. --cluster 8xh100, or cluster.gpu in the spec")
    return machines, gpu


def given_keys(request: ClusterRequest) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {"data": {}, "parallel": {}, "precision": {}}
    places = {"data": ("seq", "micro_batch", "global_batch"), "parallel": ("tp", "cp", "pp", "ep", "recompute")}
    for table, keys in {**places, "precision": ("dtype",)}.items():
        tables[table] |= {key: getattr(request, key) for key in keys if getattr(request, key) is not None}
    return tables


def cluster_defaults(data_keys: dict[str, Any], cluster: Cluster, request: ClusterRequest) -> dict[str, Any]:
    """One rank a GPU; bf16 products; a small micro-batch; everything where the spec does not say it itself."""
    layout = data_keys.get("parallel", {})
    world = cluster.nodes * cluster.gpus_per_node
    inner = 1
    for axis in ("tp", "cp", "pp"):
        inner *= layout.get(axis, 1)
    if world % inner:
        fitting = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise SpecError(f"tp × cp × pp = {inner} does not divide the {world} GPUs of {request.cluster}; {fitting} do")
    over_cp = layout.get("cp", 1) > 1
    parallel = (
        shard_over(world // inner, request.zero, over_cp) if not sharding(layout) or request.zero is not None else {}
    )
    if layout.get("tp", 1) > 1 and "sp" not in layout:
        parallel["sp"] = True
    machines = {"gpu": cluster.gpu, "nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}
    filled: dict[str, Any] = {"cluster": machines, "parallel": parallel}
    if "dtype" not in data_keys.get("precision", {}):
        filled["precision"] = {"dtype": "bf16"}
    if "micro_batch" not in data_keys.get("data", {}):
        filled["data"] = {"micro_batch": 1}
    return filled


def sharding(layout: dict[str, Any]) -> bool:
    return any(key in layout for key in ("dp", "dp_replicate", "dp_shard", "strategy"))


def shard_over(dp: int, zero: int | None, over_cp: bool) -> dict[str, Any]:
    """FSDP2 shards over context-parallel ranks too, so it has a meaning without data-parallel ones."""
    if zero == 0 or (dp == 1 and not (over_cp and zero in (None, 3))):
        return {"strategy": "ddp", "zero": 0, "dp_replicate": dp, "dp_shard": 1}
    if zero in (None, 3):
        return {"strategy": "fsdp2", "zero": 0, "dp_replicate": 1, "dp_shard": dp}
    return {"strategy": "zero", "zero": zero, "dp_replicate": 1, "dp_shard": dp}


def with_default_seq(data_keys: dict[str, Any]) -> dict[str, Any]:
    """A preset is stretched to the sequence that is asked of it, and asked for a usual one if for none."""
    model, seq = data_keys.get("model", {}), data_keys.get("data", {}).get("seq", 0)
    context = PRESETS.get(model.get("preset", ""), {}).get("context", 0)
    if not context or "context" in model:
        return data_keys
    if not seq:
        return merge(data_keys, {"data": {"seq": min(context, DEFAULT_SEQ)}})
    return merge(data_keys, {"model": {"context": seq}}) if seq > context else data_keys
