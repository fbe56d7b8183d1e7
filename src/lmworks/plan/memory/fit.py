"""Whether what runs on one machine fits into its memory: why not, and which changes of the spec would make it fit.

The peak of every rank is that of its memory sheet. On a CPU all ranks of a machine share what is free, and each of them
may have a limit of its own; on a GPU a rank has its device to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...spec import Grid, RunSpec, SpecError
from ..policies import POLICIES
from .host_need import gib
from .peak_memory import Row
from .sheet import memory

SHOWN = 4  # rows of the sheet, and changes that would fit
MOST_GPUS = 64  # to shard a model over that does not fit into one
Change = dict[str, dict[str, Any]]  # section → key → value
OtherMemory = Callable[[RunSpec, int], Sequence[Row]]  # what a rank holds beside its training: (spec, rank) → rows


@dataclass(frozen=True)
class Limits:
    """Bytes that are free: for all processes together, and for each of them. None: no limit, or nobody knows."""

    per_node: int | None = None
    each: int | None = None
    what: str = "memory"

    def fits(self, peaks: Iterable[int]) -> bool:
        """Whether processes with these peaks fit; no more of them are worked out than it takes to know."""
        total = 0
        for peak in peaks:
            total += peak
            if (self.per_node is not None and total > self.per_node) or (self.each is not None and peak > self.each):
                return False
        return True


def no_other_memory(_spec: RunSpec, _rank: int) -> Sequence[Row]:
    return ()


def peak_rows(spec: RunSpec, rank: int, device: str, beside: OtherMemory = no_other_memory) -> list[Row]:
    """The memory sheet of a rank; on a CPU what is offloaded lies in the same memory."""
    sheet = memory(spec, device, rank)
    rows = [*sheet.rows, *beside(spec, rank)]
    if device == "cpu" and sheet.host_parts.states:
        rows.append(Row("states on the host", sheet.host_parts.states, "which is the device"))
    return rows


def same_kind(spec: RunSpec, rank: int) -> Any:
    """The same for ranks that hold the same: copies of a model, which shards are not, and engines of rollout ranks."""
    if rank >= spec.parallel.world:
        return "rollout"
    place = Grid.of(spec.parallel).coordinates(rank)
    return (place["pp"], place["tp"], rank == 0) if spec.parallel.strategy == "ddp" else rank


def total(rows: Iterable[Row]) -> int:
    return sum(row.bytes for row in rows)


def refusal(
    spec: RunSpec,
    ranks: Sequence[int],
    device: str,
    limits: Limits,
    beside: OtherMemory = no_other_memory,
    own_layout: bool = True,
) -> str:
    """One line where the `ranks` of this machine do not fit; none where they do, or the planner cannot tell.

    `own_layout`: the data parallelism of the spec may be changed; else it is what is studied.
    """

    def peaks(changed: RunSpec, those: Sequence[int]) -> Iterator[int]:
        known: dict[Any, int] = {}
        for rank in those:
            key = same_kind(changed, rank)
            if key not in known:
                known[key] = total(peak_rows(changed, rank, device, beside))
            yield known[key]

    def here(changed: RunSpec) -> Sequence[int]:
        return range(changed.ranks) if len(ranks) == spec.ranks and device == "cpu" else ranks

    def fits(changed: RunSpec) -> bool:
        return limits.fits(peaks(changed, here(changed)))

    def need(changed: RunSpec) -> int:
        found = list(peaks(changed, here(changed)))
        return sum(found) if limits.per_node is not None else max(found)

    try:
        each = list(peaks(spec, ranks))
        if limits.fits(each):
            return ""
    except SpecError:
        return ""
    rows = peak_rows(spec, ranks[each.index(max(each))], device, beside)
    kinds = [found for kind in changes(spec, device, ranks, own_layout) if (found := list(kind))]
    return sentence(spec.name, each, rows, limits, advice(spec, kinds, fits, need))


def sentence(name: str, each: Sequence[int], rows: Iterable[Row], limits: Limits, would_fit: str) -> str:
    """What is needed, what is there, the largest rows of the largest process, and what would fit."""
    if limits.per_node is not None and sum(each) > limits.per_node:
        much, there = f"{gib(sum(each))} of {limits.what}", limits.per_node
        if len(each) > 1:
            much += f" for the {len(each)} ranks on this machine, {gib(max(each))} each"
    else:
        much, there = f"{gib(max(each))} of {limits.what}" + " a rank" * (len(each) > 1), limits.each or 0
    merged: dict[str, int] = {}
    for row in rows:
        merged[row.name] = merged.get(row.name, 0) + row.bytes
    largest = sorted(merged.items(), key=lambda item: -item[1])[:SHOWN]
    parts = ", ".join(f"{what} {gib(size)}" for what, size in largest)
    return f"{name} needs {much}, and {gib(there)} are free: {parts}; {would_fit}; --force starts it all the same"


# --- what would fit -------------------------------------------------------------------------------------


def advice(
    spec: RunSpec, kinds: list[list[Change]], fits: Callable[[RunSpec], bool], need: Callable[[RunSpec], int]
) -> str:
    """Changes each of which is enough; else all of them that it takes; else what is needed even so."""
    enough = [one for kind in kinds if (one := mildest_change(spec, {}, kind, fits))]
    if enough:
        return f"{' or '.join(words(spec, one) for one in enough[:SHOWN])} would fit"
    taken: list[Change] = []
    for number, kind in enumerate(kinds):
        if changed(spec, joined_changes(*taken, kind[-1])) is None:
            kinds[number] = [{}]
        taken.append(kinds[number][-1])  # the most that this kind of change can do
        if change_fits(spec, joined_changes(*taken), fits):
            return f"{words(spec, relaxed_changes(spec, kinds, taken, fits))} together would fit"
    least = changed(spec, joined_changes(*taken))
    if least is None or least == spec:
        return "no change of its layout would fit"
    return f"even {words(spec, joined_changes(*taken))} needs {gib(need(least))}"


def relaxed_changes(
    spec: RunSpec, kinds: list[list[Change]], taken: list[Change], fits: Callable[[RunSpec], bool]
) -> Change:
    """Each of the changes that are taken together made as small as the others allow."""
    for number in range(len(taken)):
        others = joined_changes(*taken[:number], *taken[number + 1 :])
        taken[number] = mildest_change(spec, others, [{}, *kinds[number]], fits) or {}
    return joined_changes(*taken)


def mildest_change(spec: RunSpec, others: Change, kind: list[Change], fits: Callable[[RunSpec], bool]) -> Change | None:
    """The first of a kind that is enough, with others that are made beside it."""
    return next((one for one in kind if change_fits(spec, joined_changes(others, one), fits)), None)


def change_fits(spec: RunSpec, change: Change, fits: Callable[[RunSpec], bool]) -> bool:
    other = changed(spec, change)
    try:
        return other is not None and fits(other)
    except SpecError:
        return False


def changed(spec: RunSpec, change: Change) -> RunSpec | None:
    """The run with these keys; None where they do not go together."""
    try:
        return spec.replace(**{name: getattr(spec, name).replace(**keys) for name, keys in change.items()})
    except SpecError:
        return None


def joined_changes(*several: Change) -> Change:
    found: Change = {}
    for change in several:
        for name, keys in change.items():
            found[name] = found.get(name, {}) | keys
    return found


def words(spec: RunSpec, change: Change) -> str:
    """As they are typed after the spec; GPUs beyond those of the spec are named."""
    typed = " ".join(
        f"{name}.{key}={value}".replace("=False", "=false")
        for name, keys in change.items()
        for key, value in keys.items()
    )
    other = changed(spec, change)
    return typed + (f" on {other.parallel.world} GPUs" if other and other.parallel.world > spec.parallel.world else "")


def changes(spec: RunSpec, device: str, ranks: Sequence[int], own_layout: bool) -> Iterator[Iterable[Change]]:
    """Kinds of change, those that cost least first; of each kind what changes least first."""
    layout, precision, batch = spec.parallel, spec.precision, spec.data
    own = {} if batch.given["global_batch"] else {"global_batch": batch.global_batch}  # else it would shrink as well
    yield ({"data": {"micro_batch": size, **own}} for size in divisors(batch.micro_batch))
    if spec.checkpoint.asynchronous and device == "cpu":
        yield [{"checkpoint": {"asynchronous": False}}]
    if layout.recompute in POLICIES:
        yield ({"parallel": {"recompute": rung}} for rung in POLICIES[POLICIES.index(layout.recompute) + 1 :])
    if (
        layout.dp > 1
        and own_layout
        and layout.engine == "native"
        and (layout.strategy == "ddp" or (layout.strategy == "zero" and layout.zero < 3))
    ):
        degrees = {} if layout.given["dp"] else {"dp_replicate": 1, "dp_shard": layout.dp}
        yield [
            {
                "parallel": {"strategy": "fsdp2", "zero": 0, **degrees}
                if layout.zero
                else {"strategy": "fsdp2", **degrees}
            }
        ]
    if layout.engine == "native":
        smaller = {} if precision.compute == "bf16" else {"dtype": "bf16"}
        kept = {"weights": "bf16", "states": "bf16"}
        if smaller and precision.dtype == "fp32":
            yield [{"precision": smaller}, {"precision": {**smaller, **kept}}]
        elif not smaller and (precision.weights, precision.states) != ("bf16", "bf16"):
            yield [{"precision": kept}]
    if device == "cpu" and len(ranks) == spec.ranks and layout.dp > 1 and own_layout:
        axis = "dp" if layout.given["dp"] else "dp_shard" if layout.dp_shard > 1 else "dp_replicate"
        yield (fewer_ranks(spec, axis, count, own) for count in divisors(getattr(layout, axis)))
    if device == "cuda" and layout.world == 1 and layout.engine == "native" and own_layout:
        counts = (2**power for power in range(1, MOST_GPUS.bit_length()))
        yield ({"parallel": {"strategy": "fsdp2", "dp_shard": count}} for count in counts)


def fewer_ranks(spec: RunSpec, axis: str, count: int, batch: dict[str, Any]) -> Change:
    """`count` along a data-parallel axis; a cluster that is described has as many devices as there are ranks."""
    change: Change = {"parallel": {axis: count}} | ({"data": batch} if batch else {})
    if spec.cluster.gpus > 1:
        change["cluster"] = {"gpus_per_node": spec.parallel.world * count // getattr(spec.parallel, axis)}
    return change


def divisors(number: int) -> list[int]:
    """Those less than it, the largest first."""
    return [size for size in range(number // 2, 0, -1) if number % size == 0]
