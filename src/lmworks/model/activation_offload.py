"""Offload: what blocks keep for the backward pass waits in host memory, and is back when it is asked for.

Hooks see what autograd saves of a block, be it compiled or not. When the block is done, as many bytes as it may send
start on a stream of copies, beside the next block's work; when the block after that begins, the compute stream waits
for them, and their memory is free for whatever it does from then on. On the way back a block's bytes start when the
block above begins its backward pass, into memory of the compute stream again. So nothing is freed while somebody still
reads it, and the allocator knows it at once, however far the host runs ahead (`record_stream` would make it wait).
What a backward pass that failed had asked for is still on its way: it is kept until the next pass has waited for it.

What a block sends is counted to the byte: of the last storage a part goes, and the rest is copied where it is. Host
memory is made once and used again in every pass. On a CPU the same copies are made, and nothing is gained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..spec import TrainingError

SMALLEST = 2**20  # bytes of a storage that is worth the way, and of a piece of host memory
PREPARED = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "SelectBackward0", "UnbindBackward0")
LATER = 2  # a block's bytes are gone when the second one after it begins


class Courier:
    """The stream of copies beside a GPU's compute stream; on a CPU a copy is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Copies begin when the compute stream has done what it was given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of the copies so far."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, end: torch.cuda.Event | None) -> None:
        """The compute stream does."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)


class Slab:
    """Host memory for what a block sends, pinned beside a GPU.

    Its pieces are powers of two, to which an allocator of pinned memory would round them up.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.pieces: list[Tensor] = []

    def grow(self, size: int) -> None:
        missing = -(-(size - sum(piece.numel() for piece in self.pieces)) // SMALLEST) * SMALLEST
        while missing > 0:
            piece = 1 << (missing.bit_length() - 1)
            try:
                self.pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=self.pinned))
            except RuntimeError as error:
                raise TrainingError(
                    f"parallel.offload_activations: the host has no {piece / 2**30:.3g} GiB more to pin for a block's "
                    "share; lower it, or let fewer ranks share the machine"
                ) from error
            missing -= piece

    def views(self, first: int, size: int) -> Iterator[Tensor]:
        """Bytes `first` to `first + size`, piece by piece."""
        at = 0
        for piece in self.pieces:
            begin, end = max(first, at), min(first + size, at + piece.numel())
            if begin < end:
                yield piece[begin - at : end - at]
            at += piece.numel()


class Loan:
    """A slab in use: free again when neither a block nor copies under way hold the loan."""

    def __init__(self, slab: Slab, free: list[Slab]) -> None:
        self.slab, self.free = slab, free

    def __del__(self) -> None:
        self.free.append(self.slab)


class Parcel:
    """A storage that a block keeps: here, with its first bytes on their way, or in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.device, self.size = storage.device, storage.nbytes()
        self.sent = 0
        self.host: list[Tensor] = []
        self.rest: Tensor | None = None  # what stays of a storage of which a part goes

    def bytes_here(self) -> Tensor:
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def cut(self, size: int) -> None:
        self.sent = size
        self.rest = self.bytes_here()[size:].clone()

    def send(self, slab: Slab, first: int) -> None:
        self.host = list(slab.views(first, self.sent))
        for there, here in self.pairs():
            there.copy_(here, non_blocking=True)

    def make_room(self) -> None:
        here = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.rest is not None:
            here[self.sent :].copy_(self.rest)
            self.rest = None
        self.storage = here.untyped_storage()

    def fetch(self) -> None:
        for there, here in self.pairs():
            here.copy_(there, non_blocking=True)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        at, here = 0, self.bytes_here()
        for piece in self.host:
            yield piece, here[at : at + piece.numel()]
            at += piece.numel()


@dataclass(frozen=True)
class Saved:
    """A tensor as autograd holds it: what it is of a storage, which may be elsewhere. Never the tensor: a result that
    held itself would never be freed."""

    parcel: Parcel
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.parcel.storage
        assert storage is not None
        return torch.empty(0, dtype=self.dtype, device=self.parcel.device).set_(
            storage, self.offset, self.shape, self.stride
        )


class Visit:
    """One block in one pass, from its forward to its backward. Parcels live as long as autograd asks for them."""

    def __init__(self, offload: Offload, index: int, x: Tensor, shared: Iterable[Tensor], before: Visit | None) -> None:
        self.offload, self.index, self.before = offload, index, before
        self.device, self.tokens = x.device, x.shape[:-1].numel()
        self.shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self.parcels: dict[int, Parcel] = {}  # of the forward pass, by their storage
        self.away: list[weakref.ref[Parcel]] = []
        self.coming: list[Parcel] = []  # on their way back, and nobody has waited for them yet
        self.loan: Loan | None = None
        self.arrived: torch.cuda.Event | None = None

    def __del__(self) -> None:
        if self.coming:  # of a backward pass that failed
            self.offload.under_way.append(UnderWay(self.index, self.arrived, self.coming, self.loan))

    # --- hooks ------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled block calls it, and it is no part of that
    def pack(self, tensor: Tensor) -> Saved | Tensor:
        if not self.may_go(tensor):
            return tensor if tensor.is_leaf else tensor.detach()
        storage = tensor.untyped_storage()
        parcel = self.parcels.setdefault(storage._cdata, Parcel(storage))
        return Saved(parcel, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def may_go(self, tensor: Tensor) -> bool:
        """Activations: neither weights, views and casts of them, nor what other blocks hold as well."""
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.device != self.device:
            return False
        origin = tensor if tensor._base is None else tensor._base
        if origin.is_leaf and origin.requires_grad:
            return False
        cast = tensor.shape in self.offload.weights and (tensor.shape[0] != self.tokens or made_of_a_leaf(tensor))
        if cast:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALLEST and storage._cdata not in self.shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, saved: Saved | Tensor) -> Tensor:
        below, self.before = self.before, None
        if isinstance(saved, Tensor):
            found = saved
        else:
            self.fetch()
            self.offload.courier(self.device).wait(self.arrived)
            self.coming = []
            found = saved.tensor()
        if below is not None:
            below.fetch()
        return found

    # --- on the way -------------------------------------------------------------------------------------

    def send(self, share: int) -> None:
        """Whole storages that fit, the largest first; then as much as is left of the smallest that did not."""
        chosen: list[Parcel] = []
        others: list[Parcel] = []
        left = share
        for parcel in sorted(self.parcels.values(), key=lambda parcel: -parcel.size):
            fits = parcel.size <= left
            (chosen if fits else others).append(parcel)
            parcel.sent = parcel.size if fits else 0
            left -= parcel.sent
        if left and others:
            others[-1].cut(left)
            chosen.append(others[-1])
        self.parcels = {}
        if not chosen:
            return
        self.loan, at = self.offload.lend(self.index, self.device), 0
        self.loan.slab.grow(sum(parcel.sent for parcel in chosen))
        courier = self.offload.courier(self.device)
        try:
            with courier.beside():
                for parcel in chosen:
                    parcel.send(self.loan.slab, at)
                    at += parcel.sent
        finally:
            self.offload.under_way.append(UnderWay(self.index, courier.mark(), chosen, self.loan))
        self.away = [weakref.ref(parcel) for parcel in chosen]

    def fetch(self) -> None:
        """What went starts on its way back, if it has not."""
        coming = [parcel for ref in self.away if (parcel := ref()) is not None]
        self.away = []
        if not coming:
            return
        courier = self.offload.courier(self.device)
        for parcel in coming:
            parcel.make_room()
        self.coming = coming
        try:
            with courier.beside():
                for parcel in coming:
                    parcel.fetch()
        finally:
            self.arrived = courier.mark()


@dataclass(frozen=True, eq=False)
class UnderWay:
    """Copies of a block, their end, and the memory on both sides of them, which nobody else may have before."""

    index: int
    end: torch.cuda.Event | None
    parcels: list[Parcel]
    loan: Loan | None


class Offload:
    """Of one model: `shares` are the bytes that each block may send, of which the last two are 0."""

    def __init__(self, shares: Sequence[int], weights: Iterable[nn.Parameter]) -> None:
        self.shares = tuple(shares)
        self.weights = {shape for weight in weights for shape in shapes_of(weight)}
        self.free: dict[int, list[Slab]] = {index: [] for index in range(len(self.shares))}
        self.under_way: list[UnderWay] = []
        self.last: Visit | None = None
        self.couriers: dict[torch.device, Courier] = {}

    def courier(self, device: torch.device) -> Courier:
        if device not in self.couriers:
            self.couriers[device] = Courier(device)
        return self.couriers[device]

    def lend(self, index: int, device: torch.device) -> Loan:
        free = self.free[index]
        return Loan(free.pop() if free else Slab(device.type == "cuda"), free)

    @contextmanager
    def around(self, index: int, x: Tensor, shared: Iterable[Tensor]) -> Iterator[None]:
        """The forward pass of block `index` over x; other blocks see the `shared` tensors too."""
        if not torch.is_grad_enabled():
            yield
            return
        self.let_go(index, x.device)
        visit = self.last = Visit(self, index, x, shared, self.last if index else None)
        with saved_tensors_hooks(visit.pack, visit.unpack):
            yield
        with torch.no_grad():
            visit.send(self.shares[index])

    def let_go(self, index: int, device: torch.device) -> None:
        """Of what has left by now; and of all that an unfinished pass left behind, when another begins."""
        for one in [one for one in self.under_way if not index or one.index <= index - LATER]:
            self.courier(device).wait(one.end)
            for parcel in one.parcels:
                parcel.storage = None
            self.under_way.remove(one)


def made_of_a_leaf(tensor: Tensor) -> bool:
    """By a cast, as autocast makes a weight, or one of several experts', ready for a product. Of what a compiled block
    saves nobody can tell."""
    node = tensor.grad_fn
    while node is not None and node.name() in PREPARED:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def shapes_of(weight: Tensor) -> Iterator[torch.Size]:
    """Of it, of the weight of one expert, and of both transposed."""
    yield weight.shape
    for shape in (weight.shape, weight.shape[-2:]) if weight.dim() > 1 else ():
        yield shape
        yield torch.Size((*shape[:-2], shape[-1], shape[-2]))
