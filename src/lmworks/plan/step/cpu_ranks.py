"""The step of data-parallel CPU ranks, from one rank's measured rates and measured collectives (gloo).

DDP reduces its buckets while the backward pass goes on: bucket by bucket on one link, each when the gradients in it are
there. FSDP2 on a CPU waits for every collective, prefetched or not: PyTorch calls them synchronously, and there are no
streams to hide them in. Each rank is taken to have the cores that its rates were measured with.
"""

from __future__ import annotations

from dataclasses import replace

from ...spec import Gpu, RunSpec
from ..case import Case
from ..devices.links import Fabric
from ..devices.machine import Machine
from ..devices.profile import Profile
from ..exact.collectives import collectives
from ..exact.exchanges import LAST, Collective
from ..exact.shards import buckets, rank_stages, trained_weights
from ..network import network
from ..ops import Workload
from .one_device import StepTime, interval, passes, step_time
from .uncalibrated import Work

WIRE_INTERVAL = (0.9, 1.15)  # measured over predicted time of collectives


def not_priced(spec: RunSpec, profile: Profile | None) -> str:
    """Why the step of several CPU ranks is not predicted; empty: it is."""
    layout = spec.parallel
    plain = layout.engine == "native" and layout.world == layout.dp and layout.ep == 1
    if not plain or layout.strategy not in ("ddp", "fsdp2"):
        return "of several CPU ranks, those of DDP and FSDP2 alone are predicted"
    if profile is None:
        return "several CPU ranks need a measured link: cluster.profile with what `lmworks bench collectives` wrote"
    nodes, per_node = ranks_of_nodes(spec)
    if (nodes > 1 and profile.between is None) or (per_node > 1 and profile.curve is None):
        missing = "between nodes" if nodes > 1 and profile.between is None else "inside a node"
        return f"{spec.cluster.profile} has no collectives {missing}: `lmworks bench collectives --profile` adds them"
    return ""


def ranks_of_nodes(spec: RunSpec) -> tuple[int, int]:
    nodes = min(spec.cluster.nodes, spec.parallel.world)
    return nodes, -(-spec.parallel.world // nodes)


def ranks_step_time(spec: RunSpec, machine: Machine, profile: Profile) -> StepTime:
    """As `step_time`, with communication that nothing hides."""
    fabric = fabric_of(spec, machine, profile)
    one = step_time(spec, machine)
    parts, tags = dict(one.parts), dict(one.tags)
    calls = collectives(spec)
    if spec.parallel.strategy == "ddp":
        gradients = [call for call in calls if call.when == LAST]
        hidden = [call for call in calls if call.when != LAST]
        wire = sum(seconds(fabric, call) for call in hidden) + exposed_buckets(spec, machine, fabric, gradients)
    else:
        wire = sum(seconds(fabric, call) for call in calls)
        parts["optimizer"] /= spec.parallel.dp_shard
    parts["communication"] = wire
    tags["communication"] = min(fabric.tag(call.kind, call.ranks, call.stride) for call in calls)  # measured < modelled
    low, high = interval(sum(parts.values()) - wire, machine)
    ends = low + wire * WIRE_INTERVAL[0], high + wire * WIRE_INTERVAL[1]
    return StepTime(parts, tags, one.tokens, ends, one.notes)


def fabric_of(spec: RunSpec, machine: Machine, profile: Profile) -> Fabric:
    nodes, per_node = ranks_of_nodes(spec)
    cluster = spec.cluster.replace(nodes=nodes, gpus_per_node=per_node)
    gpu, slower = Gpu(name=machine.name), profile.link_factors
    return Fabric.of(cluster, gpu, profile.curve, between=profile.between, slower=slower)


def seconds(fabric: Fabric, call: Collective) -> float:
    return call.count * float(fabric.seconds(call.kind, call.bytes / call.count, call.ranks, call.stride))


def exposed_buckets(spec: RunSpec, machine: Machine, fabric: Fabric, gradients: list[Collective]) -> float:
    """Seconds after the last backward pass until the last bucket has been reduced.

    A bucket is ready when the backward pass has come as far as its share of the parameters, last ones first.
    """
    if not gradients:
        return 0.0
    case, call = Case.of(spec), gradients[0]
    sizes = [weight.size for stage in rank_stages(case, 0) for weight in trained_weights(case, stage)]
    backward, done, free = backward_seconds(spec, machine), 0, 0.0
    for elements in buckets(case, sizes):
        done += elements
        ready = backward * done / sum(sizes)
        one = replace(call, count=1, bytes=elements * case.software.reduce)
        free = max(free, ready) + seconds(fabric, one)
    return free - backward


def backward_seconds(spec: RunSpec, machine: Machine) -> float:
    """Of one micro-batch: head and loss, blocks with what they recompute, embedding."""
    load = Workload.of(spec, machine.device)
    work = Work.of(network(load), machine, load.dtype, spec.parallel.recompute)
    done = {id(work.loss[1]), id(work.recomputed), id(work.block[1]), id(work.stem[1])}
    return sum(
        times / spec.accumulation * (float(sum(one.seconds_by_kind.values())) + launch_s * float(one.launches))
        for one, times, launch_s in passes(spec, work, machine)
        if id(one) in done
    )
