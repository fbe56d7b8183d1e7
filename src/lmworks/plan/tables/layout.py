"""How the ranks of a row are laid out, and how its batch is cut: from whichever columns say something about it."""

from __future__ import annotations

import math
import re
from typing import Any

from ...spec import Gpu, ModelSpec, SpecError
from ..case import Case
from ..memory.reserve import capacity
from ..software import Software, under_bf16_optimizer
from .columns import Row
from .names import schedule_named

MOST_GPUS = 10_000_000
USUAL_ZERO = {"torchtitan": 3, "llm-foundry": 3, "maxtext": 3, "megatron": 1, "megatron-bridge": 1, "deepspeed": 2}


def degrees_of(row: Row, gpu: Gpu, model: ModelSpec, software: Software) -> dict[str, int]:
    """Ranks of each axis. The number of GPUs is what all of them make; what is missing is data parallel."""
    degrees = {axis: row.whole(axis) or 1 for axis in ("tp", "pp", "cp", "ep")}
    together = re.search(r"model[- ]parallel size (\d+)", row.text("note"))
    if together and not row.text("tp") and not row.text("pp"):
        degrees["tp"] = min(8, int(together[1]))
        degrees["pp"] = max(1, int(together[1]) // degrees["tp"])
        row.assumed.append(f"tp = {degrees['tp']} and pp = {degrees['pp']}, of model-parallel size {together[1]}")
    per_node, nodes = row.whole("gpus_per_node"), row.whole("nodes")
    gpus = row.whole("n_gpus") or (nodes * (per_node or gpu.per_node) if nodes else None)
    if gpus and gpus > MOST_GPUS:
        raise SpecError(f"n_gpus = {gpus} is more than any cluster has; at most {MOST_GPUS:,} are priced")
    dp = data_ranks(row)
    silent = not any(row.text(column) for column in ("tp", "pp", "dp", "zero", "fsdp", "sharding")) and not together
    if gpus and silent and software.name.startswith("megatron"):
        split_by_size(row, degrees, gpus, model, gpu)
    held = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if gpus is None:
        gpus = held * (dp or 1)
        row.assume("n_gpus", f"n_gpus = {gpus}: what the degrees make")
    if gpus % held:
        raise SpecError(f"n_gpus = {gpus} is not divisible by tp × pp × cp = {held}")
    degrees["dp"] = gpus // held
    if dp and dp != degrees["dp"]:
        # Some count cp or ep among the data-parallel ranks, some give the sharding degree of several copies.
        whole = {dp * n for n in (1, degrees["ep"])} | {dp // degrees["cp"]}
        if degrees["dp"] not in whole and degrees["dp"] % dp:
            raise SpecError(f"n_gpus = {gpus} is not dp × tp × pp × cp = {dp} × {held}; dp = {degrees['dp']} would be")
        row.assumed.append(f"dp = {degrees['dp']}: what {gpus} GPUs leave (the row says {dp})")
    degrees["per_node"] = per_node or min(gpus, gpu.per_node)
    return degrees


def split_by_size(row: Row, degrees: dict[str, int], gpus: int, model: ModelSpec, gpu: Gpu) -> None:
    """No layout is given: a model whose whole states (18 bytes a parameter) fit no GPU is split over a node first."""
    room, need = 0.6 * capacity(gpu), 18 * model.params
    if not room or need <= room or re.search(r"zero|fsdp|shard", row.hints.lower()):
        return
    if model.experts and not row.text("ep"):
        deal_experts(row, degrees, gpus, model, room)
        return
    tp = math.gcd(gpus, 8)
    stages = range(1, min(model.layers, gpus // tp) + 1)
    fitting = [pp for pp in stages if (gpus // tp) % pp == 0 and need / (tp * pp) <= room]
    even = [pp for pp in fitting if model.layers % pp == 0] or fitting
    if even:
        degrees.update(tp=tp, pp=even[0])
        row.assume("tp", f"tp = {tp} and pp = {even[0]}: the smallest split that holds the model")


def deal_experts(row: Row, degrees: dict[str, int], gpus: int, model: ModelSpec, room: float) -> None:
    """Experts go to as many ranks as they divide among, 64 at most, and what is left of a model to a pipeline."""
    experts = model.expert_layers * model.routed_params
    for pp in range(1, min(model.layers, gpus) + 1):
        if gpus % pp:
            continue
        ep = max(n for n in range(1, min(64, model.experts) + 1) if model.experts % n == 0 and gpus // pp % n == 0)
        if 18 * (model.params - experts + experts / ep) / pp <= room:
            degrees.update(pp=pp, ep=ep)
            row.assume("ep", f"pp = {pp} and ep = {ep}: the smallest split that holds the model")
            return


def data_ranks(row: Row) -> int | None:
    if row.text("dp"):
        return row.whole("dp")
    shard = row.whole("dp_shard") or (row.whole("fsdp") if row.flag("fsdp") is None else None)
    if shard or row.text("dp_replicate"):
        return (shard or 1) * (row.whole("dp_replicate") or 1)
    return None


def sharding_of(
    row: Row, software: Software, degrees: dict[str, int], model: ModelSpec, gpu: Gpu, dtype: str
) -> dict[str, Any]:
    zero, reshard = zero_of(row, software, degrees, model, gpu, dtype), True
    dp, said = degrees["dp"], row.text("sharding").lower().replace("-", "_")
    copies = row.whole("dp_replicate") or 1
    shard = row.whole("dp_shard")
    if shard and dp % shard == 0:
        copies = dp // shard
    if re.search(r"hybrid|hsdp", said or row.hints.lower()) and copies == 1:
        copies = max(1, dp * degrees["tp"] // degrees["per_node"])
    if "grad_op" in said:
        reshard = False
    if dp % copies:
        raise SpecError(f"dp_replicate = {copies} does not divide the {dp} data-parallel ranks")
    if zero == 0:
        copies = dp
    return {"zero": zero, "reshard": reshard, "dp_replicate": copies, "dp_shard": dp // copies}


def zero_of(row: Row, software: Software, degrees: dict[str, int], model: ModelSpec, gpu: Gpu, dtype: str) -> int:
    """DeepSpeed's bf16 optimizer wants ZeRO to be off, and shards states as stage 1 does."""
    stage = said_zero(row, software, degrees, model, gpu)
    if stage or not under_bf16_optimizer(software, dtype):
        return stage
    row.assumed[:] = [said for said in row.assumed if not said.startswith("zero =")]
    row.assumed.append(f"zero = 1: what the bf16 optimizer of {software.name} does by itself")
    return 1


def said_zero(row: Row, software: Software, degrees: dict[str, int], model: ModelSpec, gpu: Gpu) -> int:
    if row.text("zero"):
        stage = re.search(r"[0-3]", row.text("zero"))
        if not stage:
            raise SpecError(f"zero = {row.text('zero')!r} is not a stage; use 0, 1, 2 or 3")
        return int(stage[0])
    if row.text("dp_shard") or (row.text("fsdp") and row.flag("fsdp") is not False):
        return 3
    for text in (row.text("sharding"), row.hints):
        said = text.lower().replace("-", "_")
        if stage := re.search(r"zero_?\s?([123])", said):
            return int(stage[1])
        for pattern, found in (
            (r"no_shard|\bddp", 0),
            (r"full_shard|grad_op|hybrid|hsdp|fsdp", 3),
            (r"distributed.?optim", 1),
        ):
            if re.search(pattern, said):
                return found
    if row.flag("sharding"):
        return 1
    family = software.name.removesuffix("-compile")
    usual = USUAL_ZERO.get(family, 0)
    held = model.params * 16 / (degrees["tp"] * degrees["pp"] * degrees["ep"])
    if usual in (0, 2) and degrees["pp"] == 1 and held > 0.9 * capacity(gpu) > 0:
        usual = 3
    if degrees["dp"] > 1:
        row.assume("zero", f"zero = {usual}: usual for {software.name}" if usual else "zero = 0: whole copies")
    return usual


def pipeline_of(row: Row, model: ModelSpec, pp: int) -> dict[str, Any]:
    virtual, schedule = (
        row.whole("interleave") or 0,
        schedule_named(row.text("schedule")) or schedule_named(row.text("note")),
    )
    if pp == 1:
        return {"schedule": "1f1b", "virtual": 1}
    if not schedule or (schedule == "1f1b" and virtual > 1):
        if not virtual:
            row.assume("schedule", "schedule = 1f1b")
        schedule = "interleaved" if virtual > 1 else "1f1b"
    if schedule in ("zbv", "dualpipev"):
        return {"schedule": schedule, "virtual": 2}
    if schedule in ("1f1b", "gpipe"):
        return {"schedule": schedule, "virtual": 1}
    if not virtual:
        each = -(-model.layers // pp)
        virtual = next((n for n in range(2, each + 1) if each % n == 0), 1)
        row.assume("interleave", f"interleave = {virtual}")
    return {"schedule": schedule if virtual > 1 else "1f1b", "virtual": virtual}


def sp_of(row: Row, software: Software, tp: int) -> bool:
    said = row.flag("sp")
    if tp == 1:
        return False
    if "scatter" in row.text("sp").lower() or "all_reduce" in row.text("sp").lower():
        return "scatter" in row.text("sp").lower()
    if said is None:
        said = software.name not in ("megatron-2021", "megatron-deepspeed")
        row.assume("sp", f"sp = {str(said).lower()}: usual for {software.name}")
    return said


def batch_of(row: Row, case: Case) -> dict[str, int]:
    """Micro-batch and how many of them, from whichever of the batch columns are there."""
    dp, pp = int(case.dp), int(case.pp)
    micro, steps, total = row.whole("micro_batch"), row.whole("accumulation"), row.whole("global_batch")
    local, tokens, loose = row.whole("local_batch"), row.whole("global_batch_tokens"), row.whole("batch")
    said = re.search(r"\bmbs\s*=\s*(\d+)", row.hints)
    micro = micro or (int(said[1]) if said else None)
    if not total and tokens and tokens >= case.seq:
        binary = row.whole("global_batch_tokens", kilo=1024) or tokens  # 4M is 4 × 2²⁰ where that divides evenly
        total = round((binary if binary % (case.seq * dp) == 0 else tokens) / case.seq)
    if not total and not local and not (micro and steps) and loose:
        total = loose if loose >= dp and loose % dp == 0 else loose * dp
        row.assumed.append(f"batch = {loose}: taken as {'the global batch' if total == loose else 'of each rank'}")
    if total and not (micro and steps):
        local = max(1, round(total / dp))
        if local * dp != total:
            row.assumed.append(f"global_batch = {local * dp}: {total} sequences do not divide among {dp} ranks")
    if row.text("local_batch") and local and not micro and not steps and pp == 1:
        micro = row.whole("local_batch")  # all of it at once
    if total and micro and steps and micro * steps * dp != total and total % (micro * dp) == 0:
        written, steps = steps, total // (micro * dp)
        row.assumed.append(f"accumulation = {steps}: what the global batch takes (the row says {written})")
    if local and micro and not steps:
        steps = max(1, round(local / micro))
    if local and steps and not micro:
        micro = max(1, round(local / steps))
    if not micro:
        micro = usual_micro_batch(case, local)
        row.assume("micro_batch", f"micro_batch = {micro}")
    if not steps:
        steps = max(1, local // micro) if local else 4 * pp if pp > 1 else 1
        if not local:
            row.assume("accumulation", f"accumulation = {steps}: no global batch is given")
    return {"micro_batch": micro, "accumulation": steps}


def usual_micro_batch(case: Case, local: int | None) -> int:
    """torchtitan cuts the local batch into as many micro-batches as stages; else one sequence, or 8k tokens."""
    if case.pp > 1:
        titan = case.software.name.startswith("torchtitan") and local and local % int(case.pp) == 0
        return local // int(case.pp) if titan and local else 1
    most = max(1, 8192 // case.seq)
    if local is None:
        return most
    return max(n for n in range(1, local + 1) if local % n == 0 and n <= most)
