"""Constraints that the planner answers before a trial starts: memory of a rank, dollars of the run."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.devices.machine import Machine
from ..plan.memory.reserve import reserved, safe_bytes_of
from ..plan.money import bill
from ..plan.predict import predict
from ..record.formatting import binary_bytes
from ..spec import RunSpec
from ..spec.errors import SpecError


@dataclass(frozen=True)
class Constraints:
    memory_bytes: float | None = None  # of one rank; None: the accelerator's, where the spec names one
    dollars: float | None = None  # of a whole run

    def violation(self, spec: RunSpec) -> str | None:
        """Why a trial of this spec is not started; None where it may be."""
        gpu = spec.cluster.accelerator
        prediction = predict(spec, Machine.of(gpu) if gpu else None)
        need = float(prediction.memory.total)
        if gpu:  # with what the allocator takes on top
            need = float(reserved(need))
        limit = self.memory_bytes or (safe_bytes_of(prediction.machine.memory_bytes) if prediction.machine else None)
        if limit and need > limit:
            return f"needs {binary_bytes(need)} of memory on a rank, the limit is {binary_bytes(limit)}"
        if self.dollars is None:
            return None
        if gpu is None or prediction.time is None or not (price := spec.cluster.price_hour or gpu.price_hour):
            raise SpecError("--max-dollars needs an accelerator with a price: set cluster.gpu, e.g. cluster.gpu=h100")
        tokens = spec.optim.steps * spec.tokens_per_step
        cost = float(bill(tokens, prediction.time.tokens_per_s, spec.parallel.world, price).dollars)
        return f"would cost {shown(cost)}, the limit is {shown(self.dollars)}" if cost > self.dollars else None


def shown(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.2g}"
