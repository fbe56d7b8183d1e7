"""What layers exchange while micro-batches pass through them: tensor, context, expert and pipeline parallelism.

    tp, without sp    leaving a region is an all-reduce forward, entering one an all-reduce backward
    tp, with sp       entering is an all-gather, leaving a reduce-scatter, and backward the other way round
    cp, ring          keys and values go around forward; backward again, and their gradients with them, in fp32
    cp, ulysses       queries, keys and values are traded for heads, results back; backward the same
    ep                how many tokens go where, tokens there, results back; backward tokens and results again
    pp                hidden states to the next stage, their gradients back, as wide as the residual stream

A block that is computed again exchanges again what its forward pass does, up to the last tensor that its backward pass
needs: not what leaves the MLP, and under the policy `selective`, which keeps what attention found, not the ring's keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ops import chunk_rows, device_of
from ..pipelines.stages import Stage
from ..policies import policies
from ..software import software_of
from .calls import BACKWARD, FORWARD, Collective, Here
from .shards import FP32

INT64 = 8


def exchanges(here: Here, stage: Stage) -> Iterator[Collective]:
    """Of all micro-batches in the layers of one stage."""
    layout = here.spec.parallel
    if layout.tp > 1:
        yield from tensor(here, stage)
    if layout.cp > 1:
        yield from (ring if layout.cp_method == "ring" else ulysses)(here, stage)
    if layout.ep > 1:
        yield from experts(here, stage)
    model = here.spec.model
    if layout.cp > 1 and model.experts and model.balance_loss:
        size = FP32 * 2 * here.spec.data.micro_batch * model.experts
        yield from forward_only(here, stage, "all-reduce", "balance of experts", "cp", 1, size, again(here, stage))


def again(here: Here, stage: Stage, *policy: str) -> int:
    """Layers that are computed again, under any policy or under this one."""
    chosen = policies(here.spec, stage.layers)
    return sum(one in policy if policy else one != "none" for one in chosen)


def forward_only(
    here: Here, stage: Stage, kind: str, what: str, group: str, calls: int, size: int, repeated: int
) -> Iterator[Collective]:
    """`calls` in each layer's forward pass, and as many again in `repeated` layers."""
    times = here.spec.accumulation
    yield here.call(kind, what, group, times * len(stage.layers) * calls, size, FORWARD)
    yield here.call(kind, f"{what}, again", group, times * repeated * calls, size, BACKWARD)


# --- tensor parallel ------------------------------------------------------------------------------------


def tensor(here: Here, stage: Stage) -> Iterator[Collective]:
    layers, repeated, hidden = len(stage.layers), again(here, stage), here.tokens * here.spec.model.hidden
    mlp = here.stream if here.spec.model.experts else here.width  # a router takes the stream, and its result is as wide
    crossings = [  # what, entered (or left), how often, again, bytes of a number
        ("attention", True, layers, repeated, here.width),
        ("attention", False, layers, repeated, here.width),
        ("mlp", True, layers, repeated, mlp),
        ("mlp", False, layers, 0, mlp),
        ("embedding", False, int(stage.first), 0, here.stream),
        ("head", True, int(stage.last), 0, here.width),
    ]
    for what, entered, count, more, width in crossings:
        yield from crossing(here, what, entered, count, more, width * hidden)
    if stage.last:
        yield loss(here)


def crossing(here: Here, what: str, entered: bool, count: int, more: int, size: int) -> Iterator[Collective]:
    """Into a tensor-parallel region, or out of it: two operations, each the other's gradient, or one and none."""
    times = here.spec.accumulation
    pair = ("all-gather", "reduce-scatter") if here.spec.parallel.sp else ("", "all-reduce")
    there, back = pair if entered else pair[::-1]
    what = f"{'into' if entered else 'out of'} {what}"
    if there:
        yield here.call(there, what, "tp", times * count, size, FORWARD)
        yield here.call(there, f"{what}, again", "tp", times * more, size, BACKWARD)
    if back:
        yield here.call(back, f"gradient {what}", "tp", times * count, size, BACKWARD)


def loss(here: Here) -> Collective:
    """Two fp32 numbers a token of every rank, one gather for each chunk of logits."""
    spec, tp = here.spec, here.spec.parallel.tp
    in_place = software_of(spec).in_place
    rows = int(chunk_rows(here.tokens, spec.model.vocab // tp, device_of(spec), here.width, in_place))
    count = spec.accumulation * -(-here.tokens // rows)
    return here.total("all-gather", "loss", "tp", count, spec.accumulation * here.tokens * tp * 2 * FP32, FORWARD)


# --- context parallel -----------------------------------------------------------------------------------


def ring(here: Here, stage: Stage) -> Iterator[Collective]:
    spec, hops = here.spec, here.grid.cp - 1
    block = 2 * here.tokens * local_kv_heads(here) * spec.model.head_dim  # numbers
    keys, calls = here.width * block, spec.accumulation * len(stage.layers) * hops
    for kind in ("send", "recv"):
        repeated = again(here, stage, "full")
        yield from forward_only(here, stage, kind, "keys and values", "cp", hops, keys, repeated)
        yield here.call(kind, "keys and values for gradients", "cp", calls, keys, BACKWARD)
        yield here.call(kind, "gradients of keys and values", "cp", calls, FP32 * block, BACKWARD)


def ulysses(here: Here, stage: Stage) -> Iterator[Collective]:
    spec, cp = here.spec, here.grid.cp
    heads, kv_heads = spec.model.heads // spec.parallel.tp, max(local_kv_heads(here), cp)
    calls, repeated = spec.accumulation * len(stage.layers), again(here, stage)
    for what, count in (("queries, keys, values", heads + 2 * kv_heads), ("attention's result", heads)):
        size = here.width * here.tokens * count * spec.model.head_dim
        yield from forward_only(here, stage, "all-to-all", what, "cp", 1, size, repeated)
        yield here.call("all-to-all", f"gradient of {what}", "cp", calls, size, BACKWARD)


def local_kv_heads(here: Here) -> int:
    return max(1, here.spec.model.kv_heads // here.spec.parallel.tp)


# --- expert parallel ------------------------------------------------------------------------------------


def experts(here: Here, stage: Stage) -> Iterator[Collective]:
    model, calls, repeated = here.spec.model, here.spec.accumulation * len(stage.layers), again(here, stage)
    yield from forward_only(here, stage, "all-to-all", "tokens by expert", "ep", 1, INT64 * model.experts, repeated)
    size = here.width * here.tokens * model.top_k * model.hidden
    for what in ("tokens to experts", "results of experts"):
        yield from forward_only(here, stage, "all-to-all", what, "ep", 1, size, repeated)
        yield here.call("all-to-all", f"gradient of {what}", "ep", calls, size, BACKWARD)


# --- pipeline -------------------------------------------------------------------------------------------


def messages(here: Here) -> Iterator[Collective]:
    """Between stages on different ranks; the two stages at the turn of a V are on one."""
    layout = here.spec.parallel
    if layout.pp == 1:
        return
    size = here.stream * here.tokens * here.spec.model.hidden // (layout.tp if layout.sp else 1)
    last = layout.pp * layout.virtual_stages - 1
    own = {stage.index for stage in here.stages}
    after = sum(
        stage < last and stage + 1 not in own for stage in own
    )  # of its stages, those with a next one elsewhere
    before = sum(stage > 0 and stage - 1 not in own for stage in own)
    count = here.spec.accumulation
    yield here.call("send", "hidden states", "pp", count * after, size, FORWARD)
    yield here.call("recv", "hidden states", "pp", count * before, size, FORWARD)
    yield here.call("send", "gradients of hidden states", "pp", count * before, size, BACKWARD)
    yield here.call("recv", "gradients of hidden states", "pp", count * after, size, BACKWARD)
