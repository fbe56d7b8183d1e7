"""Collectives are counted as they are called: the bytes are those of arithmetic, and none is missed."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lmworks.parallel import collectives, comm_counter
from lmworks.parallel.comm_counter import CommCounter
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.spec import Grid


def rows(seen: CommCounter) -> set[tuple[Any, ...]]:
    return {(row.kind, row.group, row.ranks, row.count, row.bytes) for row in seen.table()}


def plain(rank: int) -> set[tuple[Any, ...]]:
    part, whole = torch.ones(6), torch.ones(12)
    with CommCounter() as seen:
        dist.all_reduce(torch.ones(5, dtype=torch.float64))
        dist.all_reduce(torch.ones(3, dtype=torch.bfloat16))
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.empty(6), torch.empty(6)], part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(torch.empty(12), whole)
        dist.broadcast(part, 0)
        dist.barrier()
        if rank == 0:
            dist.send(part, 1)
        else:
            dist.recv(part, 0)
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, 1 - rank), dist.P2POp(dist.irecv, torch.empty(12), 1 - rank)]
        ):
            request.wait()
    dist.all_reduce(part)  # outside: not counted
    return rows(seen)


def test_plain_calls() -> None:
    common = {
        ("all-reduce", "world", 2, 2, 5 * 8 + 3 * 2),
        ("all-gather", "world", 2, 2, 2 * 12 * 4),
        ("reduce-scatter", "world", 2, 1, 12 * 4),
        ("all-to-all", "world", 2, 1, 12 * 4),
        ("broadcast", "world", 2, 1, 6 * 4),
        ("barrier", "world", 2, 1, 0),
    }
    first, second = on_ranks(2, plain)
    assert first == common | {("send", "world", 2, 2, (6 + 12) * 4), ("recv", "world", 2, 1, 12 * 4)}
    assert second == common | {("send", "world", 2, 1, 12 * 4), ("recv", "world", 2, 2, (6 + 12) * 4)}


def traceable(rank: int) -> tuple[set[tuple[Any, ...]], Any]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(4, 6, requires_grad=True)
    with CommCounter() as seen:
        whole = collectives.gather_to_region(x, 1, group)  # backward: reduce-scatter
        collectives.reduce_from_region(whole, group).sum().backward()  # backward: nothing
        functional.all_gather_tensor_autograd(x, 0, group).sum().backward()  # backward: reduce-scatter
        functional.all_to_all_single(x.detach(), [2, 2], [2, 2], group).clone()  # clone waits for the result
    return rows(seen), json.loads(json.dumps(seen.to_dict()))


def test_traceable_calls_count_in_both_passes_and_waiting_does_not() -> None:
    found, written = on_ranks(2, traceable)[0]
    assert found == {
        ("all-gather", "world", 2, 2, 2 * 48 * 4),
        ("reduce-scatter", "world", 2, 2, 2 * 48 * 4),
        ("all-reduce", "world", 2, 1, 48 * 4),
        ("all-to-all", "world", 2, 1, 24 * 4),
    }
    assert {"kind": "all-to-all", "group": "world", "ranks": 2, "count": 1, "bytes": 96} in written["collectives"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))  # 16 KiB each


def ddp(rank: int) -> list[int]:
    model = DistributedDataParallel(layers(), bucket_cap_mb=16 / 1024)
    for _ in range(2):  # the first pass finds the order of gradients, the second agrees on buckets
        model(torch.ones(2, 64)).sum().backward()
    with CommCounter() as seen:
        model(torch.ones(2, 64)).sum().backward()
    with CommCounter() as quiet, model.no_sync():
        model(torch.ones(2, 64)).sum().backward()
    assert quiet.calls == []
    assert all(call.kind == "all-reduce" for call in seen.calls)
    return [call.bytes for call in seen.calls]


def test_ddp_reduces_each_bucket_once() -> None:
    assert on_ranks(2, ddp)[0] == [64 * 64 * 4, 64 * 64 * 4]


def fsdp2(rank: int) -> set[tuple[Any, ...]]:
    grid = Grid(dp_shard=2)
    mesh = Mesh(grid, "cpu")
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh.device_mesh("shard"))
    fully_shard(model, mesh=mesh.device_mesh("shard"))
    with CommCounter(mesh) as seen:
        model(torch.ones(2, 64)).sum().backward()
    return {(row.kind, row.ranks, row.count, row.bytes) for row in seen.table()}


def test_fsdp2_gathers_each_layer_twice_and_scatters_once() -> None:
    layer = 64 * 64 * 4
    assert on_ranks(2, fsdp2)[0] == {("all-gather", 2, 4, 4 * layer), ("reduce-scatter", 2, 2, 2 * layer)}


def axes(rank: int) -> list[tuple[str, int]]:
    grid = Grid(dp_shard=2, tp=2)
    mesh = Mesh(grid, "cpu")
    pair = dist.new_group([1, 2])
    column = dist.new_group([0, 2])
    with CommCounter(mesh) as seen:
        for axis in ("tp", "shard", "dp_cp", "world"):
            dist.all_reduce(torch.ones(1), group=mesh.group(axis))
        if rank in (0, 2):
            dist.all_reduce(torch.ones(1), group=column)  # not of the mesh, but its ranks are
        if rank in (1, 2):
            dist.all_reduce(torch.ones(1), group=pair)
    return [(call.group, call.ranks) for call in seen.calls]


def test_groups_are_named_by_their_axis() -> None:
    found = on_ranks(4, axes)
    assert found[0] == [("tp", 2), ("shard", 2), ("dp_cp", 2), ("world", 4), ("dp_shard", 2)]
    assert found[1][-1] == ("1, 2", 2)


def shards_of_sequences(rank: int) -> list[str]:
    mesh = Mesh(Grid(dp_shard=2, cp=2), "cpu")
    with CommCounter(mesh) as seen:
        for axis in ("cp", "shard"):
            dist.all_reduce(torch.ones(1), group=mesh.group(axis))
    return [call.group for call in seen.calls]


def test_without_experts_no_group_is_called_theirs() -> None:
    assert on_ranks(4, shards_of_sequences)[0] == ["cp", "shard"]


def unknown_operator(rank: int) -> set[tuple[Any, ...]]:
    known = comm_counter.OPERATORS.pop("allreduce_")
    try:
        with CommCounter() as seen:
            dist.all_reduce(torch.ones(6))
    finally:
        comm_counter.OPERATORS["allreduce_"] = known
    return rows(seen)


def test_an_operator_that_is_not_listed_counts_under_its_own_name() -> None:
    assert on_ranks(1, unknown_operator)[0] == {("allreduce_", "world", 1, 1, 24)}


class Nested(torch.autograd.Function):
    """Its backward pass runs another one: beyond a depth of 60, autograd continues in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(torch.ones(1))
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return grad, None


def threads() -> tuple[int, int]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(1, requires_grad=True)
    with CommCounter() as seen:
        Nested.apply(x, 70).sum().backward()
    group = dist.group.WORLD
    assert group is not None
    with CommCounter() as again:  # a recomputed forward pass communicates again
        checkpoint(lambda t: collectives.ReduceFromRegion.apply(t, group) ** 2, x, use_reentrant=False).sum().backward()
    return len(seen.calls), len(again.calls)


@pytest.mark.slow  # imports PyTorch in a new process
def test_nothing_is_missed_in_autograd_threads_and_in_recomputed_passes() -> None:
    """In a process of its own: autograd's threads do not outlive a fork."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(threads) == (71, 2)


def simulated(inside: bool) -> set[tuple[Any, ...]]:
    """One rank of 1024, without the others and without memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=1024)
    try:
        mesh = Mesh(Grid(dp_shard=128, tp=8), "cpu")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        fully_shard(model, mesh=mesh.device_mesh("shard"))
        fake, seen = FakeTensorMode(allow_non_fake_inputs=True), CommCounter(mesh)
        outer, inner = (fake, seen) if inside else (seen, fake)
        with outer, inner:
            model.to_empty(device="cpu")
            x = collectives.copy_to_region(torch.ones(2, 1024, requires_grad=True), mesh.group("tp"))
            model(x).sum().backward()
            dist.all_reduce(torch.ones(3), group=mesh.group("world"))
        return rows(seen)
    finally:
        dist.destroy_process_group()


def simulations(rank: int) -> list[set[tuple[Any, ...]]]:
    dist.destroy_process_group()
    found = [simulated(inside=True), simulated(inside=False)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness ends one
    return found


def test_a_simulated_rank_of_1024_is_counted_alike() -> None:
    whole = 1024 * 1024 * 4
    expected = {
        ("all-gather", "shard", 128, 1, whole),  # a root module stays gathered between the passes
        ("reduce-scatter", "shard", 128, 1, whole),
        ("all-reduce", "tp", 8, 1, 2 * 1024 * 4),
        ("all-reduce", "world", 1024, 1, 12),
    }
    inside, outside = on_ranks(1, simulations)[0]
    assert inside == expected
    assert outside == expected
