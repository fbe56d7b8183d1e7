"""A serving plan as figures for programs, each with what it rests on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .batching import Point
from .inference import read_constants
from .plans import Plan, Times, tag


def sheet(plans: list[Plan], engine: str) -> dict[str, Any]:
    """The chosen plan first among `candidates`; bytes are of one accelerator, seconds of one request."""
    best = plans[0]
    demand, deployment = best.demand, best.deployment
    objectives = {key: value for key, value in asdict(demand.slo).items() if value != float("inf")}
    return {
        "model": deployment.served.name,
        "parameters": round(deployment.served.params),
        "gpu": deployment.gpu.name,
        "engine": engine,
        "weights": deployment.weights,
        "computed_in": deployment.compute,
        "kv": deployment.kv,
        "input": demand.lengths.input,
        "output": demand.lengths.output,
        "rate": demand.rate,
        "slo": objectives,
        "chosen": figures(best),
        "candidates": [figures(plan) for plan in plans],
        "tags": tags(best),
        "median_error": read_constants()["errors"],
    }


def figures(plan: Plan) -> dict[str, Any]:
    space, deployment = plan.serving_memory, plan.deployment
    found: dict[str, Any] = {
        "tp": deployment.tp,
        "ep": deployment.ep,
        "refused": plan.refused,
        "memory": {
            "total": round(space.memory),
            "usable": round(space.usable),
            "weights": round(space.weights),
            "workspace": round(space.workspace),
            "context": round(space.context),
            "cache": round(space.cache),
            "cache_per_token": round(deployment.cache.token_bytes),
        },
        "max_batch": plan.max_batch,
        "max_context": plan.max_context,
        "idle": seconds(plan.idle),
    }
    if plan.full:
        found["throughput"] = throughput(plan, plan.full)
    if plan.point and plan.times:
        prompt, answer, both = plan.dollars_per_million()
        context = plan.demand.lengths.mean_context
        parts = deployment.parts(max(1.0, float(plan.point.batch)), context)
        found |= {
            "replicas": plan.replicas,
            "gpus": plan.gpus,
            "batch": float(plan.point.batch),
            "replica_rate": float(plan.point.rate),
            "rate": plan.rate,
            **seconds(plan.times),
            "output_tokens_per_s": plan.rate * plan.demand.lengths.output,
            "prefill_share": float(plan.point.prefill_share),
            "decode_step": {part: float(seconds) for part, seconds in parts.items()},
            "dollars_hour": plan.dollars_hour,
            "dollars_per_million": {"input": prompt, "output": answer, "all": both},
        }
    return found


def seconds(times: Times) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(times).items()}


def throughput(plan: Plan, point: Point) -> dict[str, float | bool]:
    """Of one replica with as many sequences as fit, whatever the SLO."""
    lengths, rate = plan.demand.lengths, float(point.rate)
    return {
        "batch": float(point.batch),
        "requests_per_s": rate,
        "input_tokens_per_s": rate * lengths.input,
        "output_tokens_per_s": rate * lengths.output,
        "tpot": float(point.tpot),
        "host_bound": bool(point.host_bound),
    }


def tags(plan: Plan) -> dict[str, str]:
    """Figure → 'fitted' (constants of measured engines) or 'modelled' (arithmetic, datasheet or reasoning)."""
    time = tag(plan.deployment.gpu)
    return {
        "memory": "modelled",
        "max_batch": "modelled",
        "max_context": "modelled",
        "tpot": time,
        "decode_step": time,
        "throughput": time,
        "ttft": time,
        "ttft_quantile": "modelled",
        "tpot_quantile": "modelled",
        "e2e": time,
        "e2e_quantile": "modelled",
        "batch": time,
        "replicas": "modelled",
        "dollars_hour": "modelled",
        "dollars_per_million": "modelled",
    }
