"""One prediction for each row of a table, never aborting at a row that cannot be predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...spec import LMWorksError
from ..case import Case
from ..flops import adapted_flops_per_token
from ..memory.reserve import oom_probability, usable
from .columns import Table
from .rows import Job, job, usual_framework

if TYPE_CHECKING:
    from ..memory.sheet import Budget
    from ..step.price import Price

    Pricing = Callable[[Case], Price]
    Budgeting = Callable[[Case], Budget]

MARGIN = 1.2  # a budget is not exact: only what misses by more than this did surely not run


def forecast_table(table: Table, price: Pricing, budget: Budgeting) -> dict[str, Any]:
    usual = usual_framework(table.rows)
    rows = [
        {"row": index, **forecast_row(cells, price, budget, usual)} for index, cells in enumerate(table.rows, start=1)
    ]
    return {
        "rows": rows,
        "unknown_columns": list(table.unknown),
        "measured_columns_not_read": list(table.results),
    }


def forecast_row(cells: Mapping[str, str], price: Pricing, budget: Budgeting, usual: str = "") -> dict[str, Any]:
    label = cells.get("label") or cells.get("model", "")
    try:
        return forecast(job(cells, usual=usual), price, budget)
    except LMWorksError as error:
        return {"label": label, "error": str(error)}
    except Exception as error:  # whatever a strange row does to the arithmetic, the other rows are answered
        return {"label": label, "error": f"could not be priced: {type(error).__name__}: {error}"}


def forecast(given: Job, price: Pricing, budget: Budgeting) -> dict[str, Any]:
    """Seconds, bytes and what they rest on. The interval holds the other answers to what the row left open."""
    found = make_fit(given, budget)
    case, answer, memory = found.case, price(found.case), budget(found.case)
    seconds = float(answer.seconds)
    low, high = interval(found, answer, price)
    tokens, world = float(case.tokens_per_step), float(case.world)
    flops = adapted_flops_per_token(case.model, case.seq, case.adapters) * tokens / (seconds * world)
    chance = float(oom_probability(memory.reserved, case.gpu, case.software.name)) if case.gpu.memory_gb else None
    return {
        "label": found.label,
        "step_s": seconds,
        "step_s_low": low,
        "step_s_high": high,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_low": tokens / high,
        "tokens_per_s_high": tokens / low,
        "tokens_per_s_per_gpu": tokens / seconds / world,
        "mfu": finite(answer.mfu),
        "hfu": finite(answer.hfu),
        "tflops_per_gpu": flops / 1e12,
        "memory": memory.to_dict(),
        "allocated_gib": float(memory.allocated) / 2**30,
        "reserved_gib": float(memory.reserved) / 2**30,
        "oom_probability": chance,
        "fits": chance < 0.5 if chance is not None else None,
        "parts": {name: float(part) for name, part in answer.parts.items()},
        "tags": {**answer.tags, "memory": "modelled"},
        "assumed": list(found.assumed),
        "unknown": list(found.unknown),
        "job": resolved_options(case),
    }


def make_fit(given: Job, budget: Budgeting) -> Job:
    """People ran what fits, and recomputed as little as that took: every fourth block, every second, all; then less
    at once. Only where the row leaves it open."""
    most = MARGIN * usable(given.case.gpu)
    if not given.case.gpu.memory_gb or float(budget(given.case).reserved) <= most:
        return given
    tried: list[tuple[str, Case, str]] = []
    if "recompute" in given.others and given.case.recompute != "full":
        some = [given.case.replace(recompute="full", recompute_every=every) for every in (4, 2, 1)]
        words = ("every fourth block", "every second block", "full")
        tried += [("recompute", case, text) for case, text in zip(some, words, strict=True)]
    tried += [("micro_batch", case, f"{case.micro_batch:g}") for case in given.others.get("micro_batch", ())]
    for column, case, text in tried:
        if float(budget(case).reserved) <= most:
            kept = tuple(said for said in given.assumed if not said.startswith(f"{column} ="))
            said = f"{column} = {text}: what was usual would not fit"
            others = {**given.others, column: (given.case, *given.others[column])}
            return replace(given, case=case, assumed=(*kept, said), others=others)
    return given


def interval(given: Job, answer: Price, price: Pricing) -> tuple[float, float]:
    """The model's own, stretched to the other answers and by what only a share can stand for."""
    seconds = float(answer.seconds)
    low, high = (float(end) / seconds for end in answer.interval)
    times = [seconds, *(float(price(case).seconds) for cases in given.others.values() for case in cases)]
    wide = 1 + given.spread
    return min(times) * low / wide, max(times) * high * wide


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(float(value)) else None


def resolved_options(case: Case) -> dict[str, Any]:
    """The job as it was understood."""
    model, names = case.model, ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "mlp")
    axes = (
        "dp_replicate",
        "dp_shard",
        "tp",
        "cp",
        "pp",
        "ep",
        "virtual",
        "micro_batch",
        "accumulation",
        "global_batch",
    )
    return {
        "model": {**{name: getattr(model, name) for name in names}, "params": model.params},
        "gpu": case.gpu.name,
        "n_gpus": int(case.world),
        "gpus_per_node": case.cluster.gpus_per_node,
        "software": case.software.name,
        "seq_len": case.seq,
        **{axis: int(getattr(case, axis)) for axis in axes},
        **{
            name: getattr(case, name)
            for name in ("zero", "sp", "schedule", "recompute", "recompute_every", "dtype", "optimizer", "offload")
        },
    }
