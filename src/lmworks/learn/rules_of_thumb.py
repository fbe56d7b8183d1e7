"""The rules of thumb of the cheat sheet, measured on this machine: ranks over gloo, number formats, recompute."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..bench.data_parallel import machine, study
from ..bench.train import time_interleaved_steps
from ..parallel.local_ranks import on_ranks
from ..parallel.memory_ledger import ACTIVATIONS
from ..plan.memory.sheet import memory
from ..plan.predict import step_flops
from ..spec import RunSpec, load_run
from ..train.rank_memory import measure_rank_memory
from .cheat_sheet import NUMBER_FORMATS, limits, ring_bytes

Report = Callable[[str], None]
Rows = list[dict[str, Any]]

DATA = ["data.path=stdlib:bytes", "cluster.device=cpu"]
# Many blocks and a small vocabulary: embedding and head, which ZeRO-3 gathers once, are a small part.
RANKS_MODEL = ["model.layers=8", "data.seq=32", "data.micro_batch=1", *DATA]
WEIGHTS = {"fp32": [], "bf16": ["precision.dtype=bf16", "precision.weights=bf16"]}
STUDIES = (("fp32", 2), ("fp32", 4), ("bf16", 4))  # format of the weights, ranks
RECOMPUTE_MODEL = ["model.layers=4", "model.hidden=256", "data.seq=128", "data.micro_batch=4", *DATA]
ROUNDS = 10  # of steps with each policy in turn


def measure(report: Report) -> dict[str, Any]:
    """Rule → its rows, and of what; a minute or two."""
    began = time.monotonic()
    ranks = [row for weights, count in STUDIES for row in rank_rows(weights, count, report)]
    report("steps with and without recompute, interleaved")
    recompute = recompute_rows(ROUNDS)
    report("fp32, bf16, fp16: largest and smallest numbers")
    small, larger = ranks_spec("fp32", 2).model.params, recompute_spec("none").model.params
    found = {
        "ddp": (f"{small:,} parameters in fp32", of_strategy(ranks, "DDP")),
        "fsdp": (f"{small:,} parameters in fp32, ZeRO-3", of_strategy(ranks, "ZeRO-3")),
        "zero": (f"{small:,} parameters; bf16: 2 + 2 + 10 bytes of each", zero_rows(ranks)),
        "precision": ("found by doubling and halving", [format_row(dtype) for dtype in NUMBER_FORMATS]),
        "recompute": (f"{larger:,} parameters in fp32, one rank, 4 × 128 tokens", recompute),
    }
    return {
        "where": machine(),
        "seconds": time.monotonic() - began,
        "rules": {rule: {"about": about, "rows": rows} for rule, (about, rows) in found.items()},
    }


# --- ranks over gloo -------------------------------------------------------------------------------------


def ranks_spec(weights: str, ranks: int) -> RunSpec:
    return load_run("tiny", [*RANKS_MODEL, *WEIGHTS[weights], f"data.global_batch={ranks}"])


def rank_rows(weights: str, ranks: int, report: Report) -> Rows:
    """A row a strategy: bytes of rank 0 just before the update, and what it sends; all ranks against the planner."""
    found = study(
        ranks_spec(weights, ranks), ranks, 1, ["zero-1", "zero-2", "zero-3"], jobs=False,
        report_progress=lambda line: report(f"{ranks} ranks, {weights} weights: {line}"),
    )  # fmt: skip
    ddp = found.outcomes[0]
    return [
        {
            "format": weights,
            "ranks": ranks,
            "strategy": one.name,
            "states": one.held[0].total,
            "planned_states": one.worked_out[0].total,
            "exact": one.exact,
            "saving": ddp.held[0].total / one.held[0].total,
            "sent": ring_bytes(one.counted, ranks),
            "sent_ratio": ring_bytes(one.counted, ranks) / ring_bytes(ddp.counted, ranks),
        }
        for one in found.outcomes
    ]


def of_strategy(rows: Rows, strategy: str) -> Rows:
    keys = ["ranks", "states", "planned_states", "exact", "sent"]
    keys += ["saving", "sent_ratio"] if strategy != "DDP" else []
    return [{key: row[key] for key in keys} for row in rows if row["strategy"] == strategy and row["format"] == "fp32"]


def zero_rows(rows: Rows) -> Rows:
    keys = ("format", "ranks", "strategy", "states", "planned_states", "exact", "saving")
    return [{key: row[key] for key in keys} for row in rows if row["strategy"] != "DDP"]


# --- number formats --------------------------------------------------------------------------------------


def format_row(name: str) -> dict[str, Any]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    one = torch.ones((), dtype=dtype)
    epsilon, smallest = one, one
    while one + epsilon / 2 > one:
        epsilon = epsilon / 2
    while smallest / 2 > 0:
        smallest = smallest / 2
    largest = 2 * one - epsilon
    while math.isfinite(largest * 2):
        largest = largest * 2
    found = {"largest": float(largest), "epsilon": float(epsilon), "smallest": float(smallest)}
    return {
        "dtype": name,
        **found,
        "as_formula": found == limits(name),
        "small_gradient": f"{float(1e-8 * one):.3g}",
        "large_value": f"{float(1e5 * one):.6g}",
        "sum": f"{float(256 * one + one):g}",
    }


# --- recompute -------------------------------------------------------------------------------------------


def recompute_spec(policy: str) -> RunSpec:
    return load_run("tiny", [*RECOMPUTE_MODEL, "data.global_batch=4", f"parallel.recompute={policy}"])


def recompute_rows(rounds: int) -> Rows:
    """Without and with, in turn, so that other load hits both alike; `slower` is the median over rounds."""
    specs = {policy: recompute_spec(policy) for policy in ("none", "full")}
    with tempfile.TemporaryDirectory(prefix="lmworks-rules-") as scratch:
        work = Path(scratch)
        peaks = {
            policy: on_ranks(1, measure_rank_memory, spec, work / policy, launched=False)[0].peak
            for policy, spec in specs.items()
        }
        (seconds,) = on_ranks(1, time_interleaved_steps, specs, work / "steps", rounds, launched=False)
    plain, flops = peaks["none"][ACTIVATIONS], step_flops(specs["none"]).hardware
    return [
        {
            "policy": policy,
            "activations": peaks[policy][ACTIVATIONS],
            "saved": 1 - peaks[policy][ACTIVATIONS] / plain,
            "peak": sum(peaks[policy].values()),
            "planned_peak": memory(spec).tensors,
            "flops": step_flops(spec).hardware / flops,
            "step_s": median(seconds[policy]),
            "slower": median(one / none for one, none in zip(seconds[policy], seconds["none"], strict=True)),
        }
        for policy, spec in specs.items()
    ]
