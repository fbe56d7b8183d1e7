"""Which op of the network an event of our own traces belongs to, and in which pass.

A forward pass is named by the spans of modules (`train/spans.py`). A node of autograd belongs to the op that made it:
both have the same sequence number. What runs forward within a node is recomputed. Nsight Systems records no nodes:
there a backward pass is what autograd's thread launches, and spans name its layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .model import STEP, Ints, Kind, Mask, Trace
from .nesting import HOOKED, Nesting

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
SPAN = re.compile(r"^(?:phase|stage|layer|module)/(?!.* backward$)|^FSDP::")  # FSDP2 names its own work
NODE = re.compile(r"^autograd::engine::evaluate_function")
LAST_NORM = re.compile(r"^module/norm$")
MODULE = re.compile(r"^module/(?!(?:embed|positions|norm|head|score)$)")
EXPERTS = re.compile(r"^module/mlp\.router$")
FFN = re.compile(r"^module/mlp\b")
FORWARD_PASS = re.compile(r"^phase/forward$|^stage/\d+ F")

# Names of modules within a block, or around the blocks → rows.
MODULE_ROWS = (
    (re.compile(r"^attention_(post_)?norm$"), "attention norm"),
    (re.compile(r"^mlp_(post_)?norm$"), "mlp norm"),
    (re.compile(r"^norm$"), "final norm"),
    (re.compile(r"^attention\.\w+_norm\b"), "head norms"),
    (re.compile(r"^attention\.out\b"), "out-projection"),
    (re.compile(r"^attention\.\w"), "qkv"),
    (re.compile(r"^mlp\.router\b"), "router"),
    (re.compile(r"^mlp\.shared\b"), "shared experts"),
    (re.compile(r"^mlp\.down\b"), "ffn down"),
    (re.compile(r"^mlp\.\w"), "ffn up"),
    (re.compile(r"^(?:head|score|scalar_heads)\b"), "head and loss"),
    (re.compile(r"^(?:embed|positions)\b"), "embedding"),
)
# Of the ops of an attention module that are in none of its layers, the core and what arranges heads for it.
CORE = re.compile(
    r"attention|flash|sdpa|flex|cudnn|aten::(?:transpose|alias|flatten|unflatten|view|reshape|contiguous|clone|expand)$",
    re.IGNORECASE,
)
PHASES = {"optimizer": "update", "communication": "gradient norm"}
ACCUMULATE, SHARDING = "accumulate gradients", "sharding"
NODES = (  # that no op of the network made
    (re.compile(r"AccumulateGrad"), (ACCUMULATE, BACKWARD)),
    (re.compile(r"RegisterPostBackwardFunction"), (SHARDING, "")),  # of FSDP2
)


@dataclass(frozen=True)
class Rows:
    """Of every event of the host: an index into `labels`, pairs of op and pass; −1: not known."""

    labels: tuple[tuple[str, str], ...]
    of: Ints


def rows_of(trace: Trace, nesting: Nesting) -> Rows:
    """`nesting`: of annotations, ops and runtime calls."""
    events = trace.events
    spans = trace.named(SPAN) & events.of(Kind.ANNOTATION)
    nodes = trace.named(NODE) & events.of(Kind.OP)
    span, node = nesting.innermost(spans), nesting.innermost(nodes)
    ops, ahead = forward_rows(trace, span, top_ops(trace, nesting, spans, nodes), spans)

    in_node = node >= 0 if np.any(nodes) else on_autograd_thread(trace)
    again = in_node & (span > node)  # within a span that began within the node
    maker = np.where(in_node, links(trace, nesting, nodes)[np.maximum(node, 0)], -1)
    back = np.where(maker >= 0, ahead[np.maximum(maker, 0)], -1)
    labels: dict[tuple[str, str], int] = {}
    found = np.full(len(events), -1, np.int64)
    for mask, rows, way in ((~in_node, ahead, FORWARD), (again, ahead, RECOMPUTE), (in_node & ~again, back, BACKWARD)):
        for index in np.unique(rows[mask & (rows >= 0)]).tolist():
            outside = ops[index] in (*PHASES.values(), SHARDING) or ops[index].startswith("phase ")
            label = (ops[index].removeprefix("phase "), "" if outside else way)
            found[mask & (rows == index)] = labels.setdefault(label, len(labels))
    for pattern, label in NODES:
        own = in_node & ~again & trace.named(pattern)[np.maximum(node, 0)]
        if np.any(own):
            found[own] = labels.setdefault(label, len(labels))
    if not np.any(nodes):
        inside = within(trace, trace.named(HOOKED) & events.of(Kind.ANNOTATION))
        for op, own in (("block", inside), ("around blocks", ~inside)):
            found[in_node & ~again & own] = labels.setdefault((op, BACKWARD), len(labels))
    return Rows(tuple(labels), found)


def on_autograd_thread(trace: Trace) -> Mask:
    """Of events of the host: whether their thread runs backward passes of layers, and not the steps."""
    events = trace.events
    backward, steps = (events.lane[trace.named(name) & events.of(Kind.ANNOTATION)] for name in (HOOKED, STEP))
    return np.isin(events.lane, np.setdiff1d(backward, steps))


def within(trace: Trace, spans: Mask) -> Mask:
    """Whether each event lies in one of these spans, which do not overlap, of any thread."""
    events = trace.events
    starts, ends = events.start[spans], events.end[spans]
    last = np.searchsorted(starts, events.start, side="right") - 1
    return (last >= 0) & (events.end <= ends[np.maximum(last, 0)]) if len(starts) else np.zeros(len(events), np.bool_)


def top_ops(trace: Trace, nesting: Nesting, spans: Mask, nodes: Mask) -> Ints:
    """The outermost op around each event within its innermost span or node, itself included; −1: none."""
    ops = trace.events.of(Kind.OP) & ~nodes
    stop = spans | nodes
    found = nesting.innermost(ops | stop)
    found = np.where((found >= 0) & stop[np.maximum(found, 0)], -1, found)
    while True:
        above = np.where(found >= 0, nesting.parent[np.maximum(found, 0)], -1)
        climb = (above >= 0) & ops[np.maximum(above, 0)]
        if not np.any(climb):
            return found
        found = np.where(climb, above, found)


def forward_rows(trace: Trace, span: Ints, top: Ints, spans: Mask) -> tuple[list[str], Ints]:
    """Ops of the network, and for every event the index of its own, by the innermost span around it; −1: no span."""
    events = trace.events
    detail = bool(np.any(trace.named(MODULE) & spans))  # else blocks are compiled, or an older recording
    experts = bool(np.any(trace.named(EXPERTS) & spans))
    has_norm = bool(np.any(trace.named(LAST_NORM) & spans))
    fused = detail and not np.any(trace.named(FFN) & spans)
    rows = np.flatnonzero(events.of(Kind.OP, Kind.RUNTIME, Kind.ANNOTATION) & (span >= 0))
    keys = np.stack(
        (
            events.name[span[rows]],
            np.where(top[rows] >= 0, events.name[top[rows]], -1),
            after_last_norm(trace, spans)[rows],
        )
    )
    kinds, inverse = np.unique(keys, axis=1, return_inverse=True)
    names = []
    for place, op, after in kinds.T.tolist():
        kind, _, name = trace.names[place].partition("/")
        if kind == "module":
            names.append(module_row(name, trace.names[op] if op >= 0 else "", experts))
        elif kind.startswith("FSDP::"):
            names.append(SHARDING)
        elif kind == "layer":
            names.append("residual" if detail and not fused else "ffn" if fused else "block")
        elif kind == "stage" or name in ("forward", "forward_backward", "backward"):
            names.append("head and loss" if after else "embedding" if has_norm or detail else "around blocks")
        else:
            names.append(PHASES.get(name, f"phase {name}"))
    ops = sorted(set(names))
    found = np.full(len(events), -1, np.int64)
    found[rows] = np.array([ops.index(name) for name in names], np.int64)[inverse.reshape(-1)]
    return ops, found


def after_last_norm(trace: Trace, spans: Mask) -> Mask:
    """Whether each event comes after the last norm of the pass that it lies in, or that came before it."""
    events = trace.events
    passes = events.start[trace.named(FORWARD_PASS) & spans]
    norms = events.start[trace.named(LAST_NORM) & spans]
    if not len(norms) or not len(passes):
        return np.zeros(len(events), np.bool_)
    last_pass = np.searchsorted(passes, events.start, side="right") - 1
    last_norm = np.searchsorted(norms, events.start, side="right") - 1
    return (last_norm >= 0) & (last_pass >= 0) & (norms[np.maximum(last_norm, 0)] >= passes[np.maximum(last_pass, 0)])


def module_row(name: str, op: str, experts: bool) -> str:
    if name == "attention":
        return "attention" if not op or CORE.search(op) else "rotary"
    if name == "mlp":
        return "experts" if experts else "activation"
    return next((row for pattern, row in MODULE_ROWS if pattern.search(name)), f"module {name}")


def links(trace: Trace, nesting: Nesting, nodes: Mask) -> Ints:
    """For every node of autograd the op that made it, by sequence number; −1 where none was recorded.

    Numbers count up in each thread, and an op that makes no node shares its number with the next: the last op with a
    number made the node. The same numbers occur in several threads. A node names its thread by a number of autograd's
    own; the lane meant is the one that has ops for most of the thread's nodes.
    """
    events = trace.events
    found = np.full(len(events), -1, np.int64)
    ops = np.flatnonzero(events.of(Kind.OP) & (events.sequence >= 0) & (events.forward_thread <= 0))
    sequence, forward_thread = events.sequence.copy(), events.forward_thread.copy()
    # Where hooks ran before a node, the call within has its number.
    inner = np.flatnonzero((events.forward_thread > 0) & (events.sequence >= 0) & (nesting.parent >= 0))
    inner = inner[nodes[nesting.parent[inner]] & (sequence[nesting.parent[inner]] < 0)]
    sequence[nesting.parent[inner]], forward_thread[nesting.parent[inner]] = sequence[inner], forward_thread[inner]
    waiting = np.flatnonzero(nodes & (sequence >= 0))
    threads, counts = np.unique(forward_thread[waiting], return_counts=True)
    taken: set[int] = set()
    for thread in threads[np.argsort(-counts, kind="stable")]:
        mine = waiting[forward_thread[waiting] == thread]
        best = (0, False, -1, np.full(len(mine), -1, np.int64))  # matches, a lane of no other thread
        for lane in np.unique(events.lane[ops]).tolist():
            own = ops[events.lane[ops] == lane]
            own = own[np.argsort(events.sequence[own], kind="stable")]  # by number, and by start within it
            numbers = events.sequence[own]
            place = np.searchsorted(numbers, sequence[mine], side="right") - 1
            maker = own[np.maximum(place, 0)]
            same = (place >= 0) & (sequence[maker] == sequence[mine])
            same &= events.start[maker] < events.start[mine]
            found_here = (int(same.sum()), lane not in taken)
            if found_here > best[:2]:
                best = (*found_here, lane, np.where(same, maker, -1))
        taken.add(best[2])
        found[mine] = best[3]
    return found
