"""`/health` (liveness: all engines run and take steps) and `/ready` (readiness)."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from .backend import State
from .serving import Serving


class EngineHealth(TypedDict):
    """One model. The numbers are those of the engine's last report, at most a second old while it works."""

    healthy: bool
    alive: bool
    ready: bool
    stalled_seconds: float
    restarts: int
    requests: int  # under way
    running: int  # answers
    waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float
    generated_tokens: int


class Health(TypedDict):
    status: Literal["ok", "unhealthy", "draining"]
    models: dict[str, EngineHealth]


def health(serving: Serving, trusted: bool) -> Health:
    """Addresses of upstreams are shown only to requests with a valid key."""
    states = {model.backend.name: model.backend.state for model in serving.local_models}
    for number, upstream in enumerate(serving.upstreams, start=1):
        states[upstream.url if trusted else f"upstream-{number}"] = upstream.state
    healthy = all(state.healthy for state in states.values())
    status: Literal["ok", "unhealthy", "draining"] = (
        "draining" if serving.draining else "ok" if healthy else "unhealthy"
    )
    return {"status": status, "models": {name: of_engine(state) for name, state in states.items()}}


def of_engine(state: State) -> EngineHealth:
    found = state.metrics
    queries = found.get("prefix_cache_queries", 0)
    return {
        "healthy": state.healthy,
        "alive": state.alive,
        "ready": state.ready,
        "stalled_seconds": round(state.stalled, 3),
        "restarts": state.restarts,
        "requests": state.open,
        "running": found.get("num_requests_running", 0),
        "waiting": found.get("num_requests_waiting", 0),
        "kv_cache_usage": found.get("kv_cache_usage_perc", 0.0),
        "prefix_cache_hit_rate": found.get("prefix_cache_hits", 0) / queries if queries else 0.0,
        "generated_tokens": found.get("generation_tokens", 0),
    }
