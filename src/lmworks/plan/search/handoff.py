"""From a layout that was found to the spec of a run: as long as days and dollars were quoted for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...spec import RunSpec, SpecError
from ..memory.sheet import run_budget
from .request import Request
from .search import Found

WARM_UP = 2000  # steps at most, as Llama 2 and 3 had


def chosen(front: Sequence[Found], request: Request) -> tuple[int, RunSpec]:
    """The place of the fastest layout that fits as a run, and its spec.

    What the spec says beside its layout, as masks by document, takes memory that the search does not count.
    """
    for place, found in enumerate(front):
        spec = spec_of(found, request)
        if float(run_budget(spec).reserved) <= found.problem.safe_bytes:
            return place, spec
    raise SpecError("with all that the spec says no layout of the front fits; give more GPUs, or a larger --risk")


def spec_of(found: Found, request: Request) -> RunSpec:
    """What the spec says itself holds. Else: as many steps as the tokens take, a warm-up of a tenth of them or 2,000,
    and a checkpoint as often as the bill assumes.
    """
    spec, tokens = found.spec(request.base), request.tokens_on(found.problem)
    steps = math.ceil(tokens / spec.tokens_per_step)
    optim = {"steps": steps}
    if "optim.warmup" not in request.said:
        optim["warmup"] = min(WARM_UP, steps // 10)
    checkpoint = spec.checkpoint
    if "checkpoint.every" not in request.said:
        every = float(found.bill(tokens).save_every_s) / found.step_s
        checkpoint = checkpoint.replace(every=min(max(1, round(every)), steps))
    return spec.replace(optim=spec.optim.replace(**optim), checkpoint=checkpoint)
