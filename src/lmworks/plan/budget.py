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

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..spec import SpecError
from ..spec.errors import did_you_mean
from .case import Case, Number
from .kept import again, kept, total
from .network import Network, network
from .ops import Workload
from .reserve import oom_probability, reserved, usable
from .share import Share, share_of

__all__ = ["Budget", "budget", "oom_probability", "usable"]

# Bytes of optimizer states of one weight; `optimizers.py` has them tensor by tensor.
STATES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "adafactor": 0.01, "sgd": 0.0, "muon": 4.0}
# Bytes of one logit when the loss is highest. Plain code has log p, its gradient and that of the logits, in fp32, and
# over a vocabulary that is cut one more; compiled code the logits as they came and in fp32; a fused loss writes
# gradients over the logits.
LOGITS = {"plain": 12, "compiled": 6, "fused": 2}
CUT = {"plain": 4, "compiled": 0, "fused": 0}
# Bytes of one logit that the allocator keeps from the forward pass, as nothing fits there: those as they came.
LEFT = {"plain": 2, "compiled": 0, "fused": 0}


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank. The first four are those just before the update, the next three at the highest moment."""

    parameters: Number
    gradients: Number
    master: Number
    optimizer: Number
    activations: Number
    logits: Number
    buffers: Number  # gathered weights, messages, gradients on their way
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


@dataclass(frozen=True)
class Moment:
    """What is there beside weights and states."""

    gradients: Number = 0.0
    activations: Number = 0.0
    logits: Number = 0.0
    buffers: Number = 0.0
    left: Number = 0.0

    @property
    def total(self) -> Number:
        return self.gradients + self.activations + self.logits + self.buffers


def budget(case: Case, stage: Number | None = None) -> Budget:
    """Of pipeline rank `stage`, or of whichever of first and last needs more."""
    if case.optimizer not in STATES:
        raise SpecError(f"optimizer {case.optimizer!r} is not known{did_you_mean(case.optimizer, STATES)}")
    net = network(Workload.of_case(case))
    if stage is not None:
        return at_rank(case, net, stage)
    first, last = at_rank(case, net, 0), at_rank(case, net, case.pp - 1)
    worse = np.greater(last.allocated, first.allocated)
    both = {f.name: (getattr(first, f.name), getattr(last, f.name)) for f in fields(Budget)}
    return Budget(**{name: np.where(worse, b, a)[()] for name, (a, b) in both.items()})


def activations(case: Case, rank: Number = 0) -> Number:
    """What the blocks of a pipeline rank keep between forward and backward, of all micro-batches under way."""
    part = share_of(case, rank)
    return part.under_way * blocks_keep(case, network(Workload.of_case(case)), part)


def at_rank(case: Case, net: Network, rank: Number) -> Budget:
    part = share_of(case, rank)
    state = held(case, part)
    moments = [at_loss(case, net, part, state), at_top(case, net, part, state), at_end(case, net, part, state)]
    totals = np.stack(np.broadcast_arrays(*[moment.total for moment in moments]))
    highest = totals.argmax(axis=0)

    def pick(name: str) -> Any:
        values = np.broadcast_arrays(*[getattr(moment, name) for moment in moments], highest)[:-1]
        return np.choose(highest, values)[()]

    there = pick("gradients")
    return Budget(
        **{name: state[name] for name in ("parameters", "gradients", "master", "optimizer", "host")},
        activations=pick("activations") + batch_bytes(case),
        logits=pick("logits"),
        buffers=pick("buffers") + np.maximum(0.0, there - state["gradients"]),
        absent=np.maximum(0.0, state["gradients"] - there),
        left=pick("left"),
    )


def batch_bytes(case: Case) -> Number:
    """int64 tokens and targets of all micro-batches of a step that are at hand: one, or a pipeline's."""
    return 16 * case.tokens


def held(case: Case, part: Share) -> dict[str, Number]:
    """Bytes of weights, gradients, master weights and states; with offload those on the host."""
    code = case.software
    over = case.dp_shard * case.cp  # ranks that share a dense weight, and an expert's
    over_experts = np.maximum(1, np.where(np.equal(case.dp_shard, 1), case.dp, case.dp_shard) * case.cp // case.ep)
    whole = part.root + part.layers * part.block
    cut = (part.root + part.layers * part.dense) / over + part.layers * part.experts / over_experts
    states = STATES[case.optimizer]
    found = {
        "parameters": code.weights * (cut if case.zero == 3 else whole),
        "gradients": code.gradients * (cut if case.zero >= 2 else whole),
        "master": code.master * (cut if case.zero >= 1 else whole),
        "optimizer": states * (cut if case.zero >= 1 else whole),
    }
    host: Number = 0.0 * whole
    if case.offload == "full":
        host = sum(found.values())
        found = dict.fromkeys(found, 0.0 * whole)
    elif case.offload == "optimizer":  # copies of what the rank updates, their gradients, and the states
        own = found["optimizer"] / states if states else cut
        host = found["optimizer"] + found["master"] + 8 * own
        found |= {"optimizer": 0.0 * whole, "master": 0.0 * whole}
    return found | {"host": host}


# --- moments --------------------------------------------------------------------------------------------


def at_loss(case: Case, net: Network, part: Share, state: dict[str, Number]) -> Moment:
    """All activations of this rank; on the last the logits, the hidden states they come from and their gradient."""
    load, h = net.load, case.model.hidden
    states = load.width * load.tokens * h  # hidden states, as tensor-parallel ranks gather them, or their gradient
    head = load.vocab * h
    kind, left = case.software.loss, 0.0 * states
    if kind == "chunked":
        ends, logits, weights = chunked_loss(net)
    else:
        ends = total(net.loss, "saved") - total(net.loss[-1:]) + states * (1 + (load.tp > 1))
        count = load.tokens * load.vocab
        logits = (LOGITS[kind] + CUT[kind] * (load.tp > 1)) / 2 * load.width * count
        left = LEFT[kind] * count
        weights = case.software.stand_in * head
        if case.zero == 3:  # gathered, and its gradient as it is made and as it is sent
            weights = weights + (2 * load.width + case.software.reduce) * head
    return Moment(
        gradients=gradients_there(case, part, state, done=0.0),
        activations=stored(case, net, part) + part.last * ends,
        logits=part.last * logits,
        buffers=part.last * weights + standing(case, part, net, gathered=1.0),
        left=part.last * left,
    )


def at_top(case: Case, net: Network, part: Share, state: dict[str, Number]) -> Moment:
    """Inside the MLP of the top block: what it computes again, and gradients beside what it keeps."""
    load, m = net.load, case.model
    s, w = case.software.stream, load.width
    slots, width = (load.tokens * m.top_k, m.expert_ffn) if m.experts else (load.tokens, m.ffn)
    inside = (2 if m.mlp == "swiglu" else 1) * w * slots * width // load.tp
    if m.experts:
        inside = inside + 2 * w * slots * m.hidden
    stream = s * load.outside * m.hidden * (2 if load.cast else 1) + w * load.tokens * m.hidden * (load.tp > 1)
    work = 2.0 * (part.dense + part.experts) * (load.cast and case.zero < 3)  # casts of the block's weights
    return Moment(
        gradients=gradients_there(case, part, state, done=part.head),
        activations=stored(case, net, part) + again(net, case.recompute) + inside + stream,
        logits=0.0 * load.tokens,
        buffers=work + standing(case, part, net, gathered=2.0) + travelling(case, part),
    )


def at_end(case: Case, net: Network, part: Share, state: dict[str, Number]) -> Moment:
    """All gradients, the embedding's last; micro-batches that a pipeline still holds are done by then."""
    load, m = net.load, case.model
    wide = case.software.gradients if case.software.master == 0 else load.width
    table = wide * load.vocab * m.hidden * part.first
    return Moment(
        gradients=state["gradients"] + 0.0 * load.tokens,
        activations=case.software.stream * load.outside * m.hidden,
        logits=0.0 * load.tokens,
        buffers=table + standing(case, part, net, gathered=0.0),
    )


def chunked_loss(net: Network) -> tuple[Any, Any, Any]:
    """(hidden states, logits, weights) of kernels/cross_entropy.py: logits in chunks, both gradients at once."""
    load, w = net.load, net.load.width
    hidden, head = load.tokens * load.model.hidden, load.vocab * load.model.hidden
    logits = load.chunk_rows * load.vocab
    ends = total(net.loss) + w * hidden + 4 * hidden + (2 * hidden if load.cast else 0)
    if load.cast:
        return ends, np.maximum(10 * logits, 6 * logits + 2 * head), 6 * head
    return ends, 8 * logits, 4 * head


def stored(case: Case, net: Network, part: Share) -> Number:
    """Activations of all micro-batches under way."""
    stem, _, _ = kept(net, case.recompute)
    received = case.software.stream * net.load.outside * case.model.hidden
    return part.under_way * (blocks_keep(case, net, part) + np.where(part.first, stem, received))


def blocks_keep(case: Case, net: Network, part: Share) -> Number:
    """Of one micro-batch. Every k-th block is recomputed whole, the others not at all."""
    each = kept(net, case.recompute)[1]
    if case.recompute != "full":
        return part.layers * each
    few = np.ceil(part.layers / case.recompute_every)
    return few * each + (part.layers - few) * kept(net, "none")[1]


# --- weights and gradients on their way -----------------------------------------------------------------


def gradients_there(case: Case, part: Share, state: dict[str, Number], done: Number) -> Number:
    """Before the backward pass is over. Megatron keeps a buffer for all; elsewhere they come with the backward pass.

    While micro-batches accumulate they stay: whole, as they meet after the last one.
    """
    if case.software.master:
        return state["gradients"]
    whole = case.software.gradients * (part.root + part.layers * part.block)
    several = np.greater(case.accumulation, 1)
    held_back = whole if case.zero == 3 else state["gradients"]
    if case.zero == 2:
        held_back = np.where(np.greater(case.pp, 1), whole, held_back)
    return np.where(several, held_back, case.software.gradients * done)


def standing(case: Case, part: Share, net: Network, gathered: float) -> Number:
    """Weights that are gathered for as long as a block, or the whole pass, needs them; copies that code keeps."""
    code, w = case.software, net.load.width
    own = code.stand_in * part.block
    if case.zero < 3:
        casts = 2.0 * part.layers * part.block * (net.load.cast and case.recompute == "none" and gathered > 0)
        return own + casts
    width = code.gather or w
    stays = np.where(np.greater(case.pp, 1), 1, 0) if case.schedule != "1f1b" or not lmworks(case) else 0
    blocks = np.where(np.equal(stays, 1) | (not case.reshard), part.layers, np.minimum(gathered, part.layers))
    root = 4 * part.root if lmworks(case) else 0.0 * part.root  # ours keeps embedding and head gathered, in fp32
    return own + width * part.block * blocks + root


def travelling(case: Case, part: Share) -> Number:
    """A block's gradients as they are made and as they are sent."""
    if case.zero < 3 or lmworks(case):
        return case.software.reduce * part.block * (case.zero == 3)
    return (case.software.reduce + 2) * part.block


def lmworks(case: Case) -> bool:
    return case.software.name.startswith("lmworks")
