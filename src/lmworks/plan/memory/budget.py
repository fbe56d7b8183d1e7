"""The memory of one rank for any layout, in closed form: one job, or thousands at once.

What is always there follows from the weights that a rank holds (`share.py`) and what ZeRO cuts of them:

    bytes a weight     weights   gradients   master and moments      over n = dp_shard × cp ranks
    stage 0            w         g           m + o
    stage 1            w         g           (m + o) / n
    stage 2            w         g / n       (m + o) / n
    stage 3            w / n     g / n       (m + o) / n

What comes and goes is highest at one of three moments: at the loss (all activations, the logits), in the backward pass
of the top block (all activations, what one block computes again), or at its end (all gradients). A pipeline has the
most micro-batches under way on its first rank and the logits on its last: both are worked out, and the worse is said.
`memory.py` has the same of our own trainer, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...spec import SpecError
from ...spec.errors import did_you_mean
from ..activation_offload import total_pinned_bytes
from ..case import Case, Number
from ..exact.optimizers import STATES
from ..network import Network, network
from ..ops import Workload
from .closed_form import at_end, at_loss, at_lowest, at_top, is_lmworks, saved_by_blocks
from .reserve import WORKSPACES, reserved
from .share import RankShare, rank_share, shard_degrees


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank. The first four are those just before the update, the next three at the highest moment."""

    parameters: Number
    gradients: Number
    master: Number
    optimizer: Number
    activations: Number
    logits: Number
    buffers: Number  # gathered weights, messages, gradients on their way, workspaces
    absent: Number  # gradients that are not made yet at the highest moment
    left: Number  # freed before it, but in blocks that nothing of that moment fits
    host: Number  # in host memory

    @property
    def allocated(self) -> Number:
        there = self.parameters + self.gradients + self.master + self.optimizer
        return there + self.activations + self.logits + self.buffers - self.absent

    @property
    def reserved(self) -> Number:
        return reserved(self.allocated) + self.left

    def to_dict(self) -> dict[str, float]:
        found = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return found | {"allocated": float(self.allocated), "reserved": float(self.reserved)}


def budget(case: Case, stage: Number | None = None) -> Budget:
    """Of pipeline rank `stage`, or of whichever of first and last needs more."""
    if case.optimizer not in STATES:
        raise SpecError(f"optimizer {case.optimizer!r} is not known{did_you_mean(case.optimizer, STATES)}")
    net = network(Workload.of_case(case))
    if stage is not None:
        return at_rank(case, net, stage)
    first = at_rank(case, net, 0)
    if np.all(np.equal(case.pp, 1)):
        return first
    last = at_rank(case, net, case.pp - 1)
    worse = np.greater(last.allocated, first.allocated)
    both = {f.name: (getattr(first, f.name), getattr(last, f.name)) for f in fields(Budget)}
    return Budget(**{name: np.where(worse, b, a)[()] for name, (a, b) in both.items()})


def activations(case: Case, rank: Number = 0) -> Number:
    """What the blocks of a pipeline rank keep between forward and backward, of all micro-batches under way."""
    part = rank_share(case, rank)
    return part.in_flight * saved_by_blocks(case, network(Workload.of_case(case)), part)


def at_rank(case: Case, net: Network, rank: Number) -> Budget:
    part = rank_share(case, rank)
    state = resident_state(case, part)
    # A rank that runs all forward passes first has no gradients when it holds all micro-batches, and then holds fewer.
    fewer = np.where(np.greater(case.pp, 1), np.minimum(part.in_flight, case.accumulation - 1), part.in_flight)
    rest = replace(part, in_flight=np.where(np.greater(case.accumulation, 1), fewer, part.in_flight))
    moments = [at_end(case, net, part, state)]
    for share, later in ((part, False), (rest, True)):
        moments += [at_loss(case, net, share, state, later), at_top(case, net, share, state, later)]
        # Where several micro-batches follow one another, all gradients are at the top too.
        if is_lmworks(case) and (
            np.any(case.offload_activations) or np.any(np.equal(case.accumulation, 1) & (not later))
        ):
            moments.append(at_lowest(case, net, share, state, later))
    totals = np.stack(np.broadcast_arrays(*[moment.total for moment in moments]))
    highest = totals.argmax(axis=0)

    def pick(name: str) -> Any:
        values = np.broadcast_arrays(*[getattr(moment, name) for moment in moments], highest)[:-1]
        return np.choose(highest, values)[()]

    there = pick("gradients")
    return Budget(
        **{name: state[name] for name in ("parameters", "gradients", "master", "optimizer")},
        host=state["host"] + total_pinned_bytes(case, net),
        activations=pick("activations") + batch_bytes(case),
        logits=pick("logits"),
        buffers=pick("buffers") + np.maximum(0.0, there - state["gradients"]) + WORKSPACES,
        absent=np.maximum(0.0, state["gradients"] - there),
        left=pick("left"),
    )


def batch_bytes(case: Case) -> Number:
    """int64 tokens and targets of the micro-batches that are at hand: one, or all of a pipeline's step."""
    return 16 * case.tokens * np.where(np.greater(case.pp, 1), case.accumulation, 1)


def resident_state(case: Case, part: RankShare) -> dict[str, Number]:
    """Bytes of weights, gradients, master weights and states; with offload those on the host."""
    code = case.software
    over, over_experts = shard_degrees(case)
    whole = part.root + part.layers * part.block
    cut = (part.root + part.layers * part.dense) / over + part.layers * part.experts / over_experts
    states = STATES[case.optimizer]
    found = {
        "parameters": code.weights * (cut if case.zero == 3 else whole),
        "gradients": code.gradients * (cut if case.zero >= 2 else whole),
        "master": (code.master + code.low_bytes) * (cut if case.zero >= 1 else whole),
        "optimizer": states * (cut if case.zero >= 1 else whole),
    }
    host: Number = 0.0 * whole
    if case.offload == "full":
        host = sum(found.values())
        found = dict.fromkeys(found, 0.0 * whole)
    elif case.offload == "optimizer":  # copies of what the rank updates, their gradients, and the states
        own = found["optimizer"] / states if states else cut
        host = found["optimizer"] + found["master"] + (code.weights + code.gradients) * own
        found |= {"optimizer": 0.0 * whole, "master": 0.0 * whole}
    return found | {"host": host}
