"""ZeRO stages 0 to 2: whole weights on every rank; the optimizer's work is sharded by rows (stage 3 is FSDP2).

    resident bytes    weights   gradients   Adam moments    of ψ parameters over n ranks
    stage 0           4ψ        4ψ          8ψ              all-reduce after the last micro-batch (as DDP)
    stage 1           4ψ        4ψ          8ψ/n            reduce-scatter after the last, all-gather of new weights
    stage 2           4ψ        4ψ/n        8ψ/n            reduce-scatter after every one, all-gather

ψ/n is ⌈rows/n⌉ rows of each weight, as in `torch.chunk`. Beyond that, transient: gradients that are computed and not
yet reduced (stage 2: at most the buckets not yet complete), and at most two buckets in flight, (1 + 1/n) buckets of
parallel.bucket_mb each. A leaf is a view of its weight's rows, so no weight is held twice.

Under a pipeline there is no `micro_batch`, and a split backward pass does not call gradient hooks: `finish` then
reduces everything at once, and stage 2 holds whole gradients until it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..model import GPT
from ..spec import RunSpec
from .data_parallel import Shard, take_low_bits, trained_parameters
from .mesh import Mesh

IN_FLIGHT = 2  # buckets: one is filled or emptied while the other is in flight


class Zero:
    """Over a part that has its memory and weights."""

    loss_factor = 1.0  # gradients are summed

    def __init__(self, part: GPT, spec: RunSpec, mesh: Mesh, experts: set[str], stage: int, adapter: str = "") -> None:
        self.part, self.stage = part, stage
        self.dtype = torch.bfloat16 if spec.precision.reduce == "bf16" else torch.float32
        named = trained_parameters(part, adapter)
        order = list(reversed(named))  # gradients come last weight first
        placed: list[tuple[int, Bucket]] = []
        for axis, names in split_by_axis(order, experts, stage).items():
            ranks, rank = (mesh.size(axis), mesh.rank(axis)) if stage else (1, 0)
            size = spec.parallel.bucket_mb * 2**20
            buckets = make_buckets([named[name] for name in names], size, mesh.group(axis), ranks, rank)
            placed += [(order.index(names[last]), bucket) for last, bucket in buckets]
        # In the order in which they fill up: every rank must start the collectives of all groups in one order.
        self.buckets = [bucket for _, bucket in sorted(placed, key=lambda item: item[0])]
        leaves: dict[int, nn.Parameter] = {}  # by the id of their weight
        lows: dict[int, Tensor | None] = {}
        for bucket in self.buckets:
            for index, weight in enumerate(bucket.parameters):
                leaves[id(weight)] = weight if not stage else nn.Parameter(bucket.own(index, weight.detach()))
                low = take_low_bits(weight)
                lows[id(weight)] = low if low is None or not stage else bucket.own(index, low).clone()
                weight.register_post_accumulate_grad_hook(self.ready_hook(bucket))
        self.leaves = {bucket: [leaves[id(weight)] for weight in bucket.parameters] for bucket in self.buckets}
        self.shard_list = [
            Shard(name, leaves[id(p)], p.shape, ("edp" if name in experts else "shard") if stage else None, lows[id(p)])
            for name, p in named.items()
        ]
        self.hooks_active = False  # hooks start reductions: only in a backward pass after which gradients are reduced
        self.started = 0  # buckets of this pass whose reduction has started
        self.reduced = False  # the last micro-batch's gradients were reduced
        # Collectives that run, with what they send (it has to live on) and what is done once they have ended.
        self.pending: deque[tuple[dist.Work | None, Tensor, Callable[[], None]]] = deque()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if not (last or self.stage == 2):
            yield
            return
        self.hooks_active = True
        try:
            yield
            self.reduce_rest()
        finally:
            self.hooks_active = False
        self.reduced = last

    def ready_hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self.hooks_active:
                bucket.ready += 1
                while self.started < len(self.buckets) and self.buckets[self.started].complete:
                    self.reduce(self.buckets[self.started])

        return hook

    def reduce_rest(self) -> None:
        """Buckets that no hook has reduced: unused weights, or a backward pass without hooks."""
        while self.started < len(self.buckets):
            self.reduce(self.buckets[self.started])
        self.started = 0
        for bucket in self.buckets:
            bucket.ready = 0

    def reduce(self, bucket: Bucket) -> None:
        self.started += 1
        self.wait_for_buckets(IN_FLIGHT - 1)
        alone = bucket.group.size() == 1
        flat = bucket.pack([weight.grad for weight in bucket.parameters], torch.float32 if alone else self.dtype)
        if self.stage == 2:
            for weight in bucket.parameters:
                weight.grad = None
        part, work = flat, None
        if not alone and self.stage == 0:
            work = dist.all_reduce(flat, group=bucket.group, async_op=True)
        elif not alone:
            part = flat.new_empty(bucket.length)
            work = dist.reduce_scatter_tensor(part, flat, group=bucket.group, async_op=True)
        self.pending.append((work, flat, partial(self.store_gradients, bucket, part)))

    @torch.no_grad()
    def store_gradients(self, bucket: Bucket, part: Tensor) -> None:
        """Write this rank's summed rows to the gradients of its leaves."""
        leaves = self.leaves[bucket]
        rows = bucket.own_views(part, leaves)
        if self.stage < 2:
            for index, (weight, leaf, row) in enumerate(zip(bucket.parameters, leaves, rows, strict=True)):
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                leaf.grad = bucket.own(index, weight.grad) if self.stage else weight.grad
                leaf.grad.copy_(row)
            return
        for leaf, row in zip(leaves, rows, strict=True):
            leaf.grad = row.to(leaf.dtype, copy=True) if leaf.grad is None else leaf.grad.add_(row)

    def wait_for_buckets(self, in_flight: int = 0) -> None:
        while len(self.pending) > in_flight:
            work, _, then = self.pending.popleft()
            if work is not None:
                work.wait()
            then()

    def finish(self) -> None:
        if not self.reduced:
            self.reduce_rest()
        self.wait_for_buckets()
        self.reduced = False

    def shards(self) -> list[Shard]:
        return self.shard_list

    @torch.no_grad()
    def after_step(self) -> None:
        """All-gather the rows that other ranks have updated."""
        for bucket in self.buckets:
            if bucket.ranks > 1:
                self.wait_for_buckets(IN_FLIGHT - 1)
                self.gather(bucket)
        self.wait_for_buckets()

    def gather(self, bucket: Bucket) -> None:
        part = bucket.pack_own(self.leaves[bucket])
        flat = part.new_empty(bucket.ranks * bucket.length)
        work = dist.all_gather_into_tensor(flat, part, group=bucket.group, async_op=True)
        self.pending.append((work, part, partial(bucket.unpack, flat, bucket.parameters)))

    def zero_grad(self) -> None:
        self.part.zero_grad(set_to_none=True)
        for shard in self.shard_list:
            shard.leaf.grad = None


def split_by_axis(names: list[str], experts: set[str], stage: int) -> dict[str, list[str]]:
    """Names by the axis over which their gradients are summed, in the order given."""
    axes: dict[str, list[str]] = {}
    for name in names:
        axes.setdefault("edp" if name in experts else "shard" if stage else "dp_cp", []).append(name)
    return axes


class Bucket:
    """Many small tensors as one flat buffer, sorted by the rank that owns their rows.

        buffer = [ rank 0's rows of every weight | rank 1's rows of every weight | … ]

    so that a reduce-scatter gives each rank the rows it owns, and an all-gather the rows of all. Rows are chunked as
    `torch.chunk` does, ⌈rows/n⌉ to a rank; the last ranks' parts are padded to the same length, in the buffer alone.
    `ranks` = 1: every rank owns all rows, and the buffer is all-reduced.
    """

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup, ranks: int, rank: int) -> None:
        self.parameters, self.group, self.ranks, self.rank = parameters, group, ranks, rank
        self.rows = [-(-parameter.shape[0] // ranks) for parameter in parameters]  # of one rank, at most
        sizes = [n * parameter[0].numel() for n, parameter in zip(self.rows, parameters, strict=True)]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]  # of each weight in a rank's part
        self.length = sum(sizes)  # of a rank's part
        self.ready = 0  # weights whose gradient is there, in the backward pass that runs now

    @property
    def complete(self) -> bool:
        return self.ready == len(self.parameters)

    def own(self, index: int, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor shaped like the weight `index`: a view, empty on a rank past the last row."""
        n = self.rows[index]
        return tensor[min(self.rank * n, len(tensor)) : (self.rank + 1) * n]

    def pack(self, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The buffer, filled with tensors shaped like the weights; None stands for zeros."""
        flat = torch.empty(self.ranks * self.length, dtype=dtype, device=self.parameters[0].device)
        given = [torch.zeros_like(p) if t is None else t for p, t in zip(self.parameters, tensors, strict=True)]
        inside, outside = self.pairs(flat, given)
        torch._foreach_copy_(inside, outside)
        return flat

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        inside, outside = self.pairs(flat, tensors)
        torch._foreach_copy_(outside, inside)

    def pairs(self, flat: Tensor, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and of the tensors, that hold the same elements: two for each weight at most."""
        parts = flat.view(self.ranks, self.length)
        inside, outside = [], []
        for tensor, n, start in zip(tensors, self.rows, self.starts, strict=True):
            full, rest = divmod(len(tensor), n)  # ranks with all their rows; rows of the rank after them
            width = tensor[0].numel()
            inside.append(parts[:full, start : start + n * width])
            outside.append(tensor[: full * n].view(full, n * width))
            if rest:
                inside.append(parts[full, start : start + rest * width])
                outside.append(tensor[full * n :].view(-1))
        return inside, outside

    def pack_own(self, tensors: Sequence[Tensor]) -> Tensor:
        """One rank's part, filled with its own rows."""
        part = torch.zeros(self.length, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        torch._foreach_copy_(self.own_views(part, tensors), list(tensors))
        return part

    def own_views(self, part: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
        """The rows in one rank's part, shaped like `shapes`."""
        return [
            part[start : start + like.numel()].view_as(like) for start, like in zip(self.starts, shapes, strict=True)
        ]


def make_buckets(
    parameters: list[nn.Parameter], size: float, group: ProcessGroup, ranks: int, rank: int
) -> list[tuple[int, Bucket]]:
    """Buckets of about `size` bytes in the given order, each with the place of its last weight in it."""
    found, held = [], list[nn.Parameter]()
    for index, parameter in enumerate(parameters):
        held.append(parameter)
        if sum(p.nbytes for p in held) >= size or index == len(parameters) - 1:
            found.append((index, Bucket(held, group, ranks, rank)))
            held = []
    return found
