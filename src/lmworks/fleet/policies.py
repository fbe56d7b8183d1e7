"""Autoscaling policies for a trace and a server: one by name, or those of a front."""

from __future__ import annotations

from ..plan.serving.plans import Slo
from ..spec import SpecError
from ..spec.errors import did_you_mean
from .autoscale import INTERVAL_S, Policy, Predictive, Reactive, Static
from .server_model import ServerModel, capacity
from .trace import Trace

QUEUES = (0.5, 2.0, 8.0)  # requests that wait for one server, which `reactive` aims at
KV_USES = (0.3, 0.6, 0.85)
HEADROOMS = (1.0, 1.3, 1.7, 2.5)  # servers over what `predictive` forecasts


def make_policy(name: str, replicas: int, trace: Trace, model: ServerModel, slo: Slo, period: float) -> Policy:
    if not name:
        return Static(replicas)
    if name == "reactive":
        return Reactive()
    if name == "predictive":
        return predictive(trace, model, slo, period)
    raise SpecError(f"--autoscale {name!r} is unknown{did_you_mean(name, ('reactive', 'predictive'))}")


def predictive(trace: Trace, model: ServerModel, slo: Slo, period: float, headroom: float = 1.3) -> Predictive:
    count = len(trace.arrivals)
    prompt, answer = (sum(getattr(one, key) for one in trace.arrivals) / count for key in ("prompt", "answer"))
    return Predictive(
        capacity(model, prompt, answer, slo.tpot), model.startup_s + INTERVAL_S, headroom=headroom, period=period
    )


def policies(trace: Trace, model: ServerModel, slo: Slo, most: int, period: float) -> list[Policy]:
    """Fixed numbers, reactive and predictive ones from lean to generous."""
    return [
        *(Static(count) for count in range(1, most + 1)),
        *(Reactive(queue, kv) for queue in QUEUES for kv in KV_USES),
        *(predictive(trace, model, slo, period, headroom) for headroom in HEADROOMS),
    ]
