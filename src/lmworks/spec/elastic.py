"""The same run on fewer ranks: data parallelism gives way, and accumulation keeps the global batch.

Tensor, pipeline and context parallelism stay as written: they are how the model fits, and what its parts are. What a
step trains on does not change: the order of the data is a function of seed and cursor, and of a global batch every
layout takes the same sequences.
"""

from __future__ import annotations

from .errors import SpecError
from .run import RunSpec


def fitted(spec: RunSpec, ranks: int) -> RunSpec:
    """`spec` laid over `ranks` ranks, at most as many as it has; the reason and the numbers that fit where it cannot.

    Copies of the model go first (`dp_replicate`), then its shards are spread over fewer ranks.
    """
    if ranks == spec.ranks:
        return spec
    if not spec.fault.elastic:
        raise SpecError(
            f"the layout has {spec.ranks} ranks, not {ranks}; to go on with fewer, set fault.elastic = true"
        )
    smaller = shrunk(spec, ranks) if 0 < ranks < spec.parallel.world else None
    if smaller is None:
        others = ", ".join(map(str, sizes(spec)))
        raise SpecError(
            f"{ranks} ranks do not fit: fault.elastic changes data parallelism alone, and {fixed(spec)} "
            f"and data.global_batch = {spec.data.global_batch} in micro-batches of {spec.data.micro_batch} "
            f"leave {others} ranks"
        )
    return smaller


def sizes(spec: RunSpec, at_most: int | None = None) -> list[int]:
    """Every number of ranks that the run can go on with, most first."""
    top = spec.ranks
    fitting = [n for n in range(top - 1, 0, -1) if shrunk(spec, n)] if spec.fault.elastic else []
    return [n for n in (top, *fitting) if at_most is None or n <= at_most]


def shrunk(spec: RunSpec, ranks: int) -> RunSpec | None:
    layout = spec.parallel
    each = layout.pp * layout.cp * layout.tp
    if ranks % each:
        return None
    dp = ranks // each
    # Shards hold the model's memory: as many of them as before, where that is possible.
    shard = layout.dp_shard if dp % layout.dp_shard == 0 else dp
    degrees = {"dp": 0, "dp_shard": shard, "dp_replicate": dp // shard}
    machines = {"nodes": 1, "gpus_per_node": 1}  # those of the spec are not all there
    kept = [rank for rank in spec.log.profile_ranks if rank < ranks]
    try:
        return spec.replace(
            parallel=layout.replace(**degrees),
            data=spec.data.replace(global_batch=spec.data.global_batch),
            cluster=spec.cluster.replace(**machines),
            log=spec.log.replace(profile_ranks=kept or [0]),
        )
    except SpecError:
        return None


def fixed(spec: RunSpec) -> str:
    layout = spec.parallel
    degrees = {f"parallel.{axis}": getattr(layout, axis) for axis in ("pp", "cp", "tp", "ep")}
    degrees["align.engine_tp"] = spec.align.engine_tp
    return ", ".join(f"{key} = {size}" for key, size in degrees.items() if size > 1) or "one rank a copy"
