"""Activation offload: activations saved for the backward pass are copied to host memory, and prefetched when needed.

Saved-tensor hooks see what autograd saves of a block, compiled or not. After the forward pass of a block its budget of
bytes is copied to the host on a copy stream, in parallel with the next block. When the block after that begins, the
compute stream waits for the copies, and their device memory is freed. In the backward pass a block's bytes are
prefetched when the block above begins, into memory allocated on the compute stream. So no memory is freed while a copy
reads it, and the allocator can reuse it at once, however far the host runs ahead (`record_stream` would delay that).
Prefetches of a backward pass that failed may still be in flight: their memory is held until the next pass has waited.

The budget is exact to the byte: the last storage is split, and its rest is copied on the device. Host memory is
allocated once and reused in every pass. On a CPU the same copies are made, without a gain.
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

MIN_TENSOR_BYTES = 2**20  # smallest storage that is offloaded; granularity of host memory
CAST_NODES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "SelectBackward0", "UnbindBackward0")
RELEASE_AFTER = 2  # device memory of a block is freed when the second block after it begins


class CopyStream:
    """The copy stream of a GPU; on a CPU copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Copies inside start after the work queued on the compute stream so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event at the end of the copies queued so far."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for the event."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


class HostBuffer:
    """Host memory for one block, pinned if there is a GPU.

    Its pieces are powers of two: the allocator of pinned memory would round them up otherwise.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.pieces: list[Tensor] = []

    def grow(self, size: int) -> None:
        missing = -(-(size - sum(piece.numel() for piece in self.pieces)) // MIN_TENSOR_BYTES) * MIN_TENSOR_BYTES
        while missing > 0:
            piece = 1 << (missing.bit_length() - 1)
            try:
                self.pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=self.pinned))
            except RuntimeError as error:
                raise TrainingError(
                    f"parallel.offload_activations: the host cannot pin {piece / 2**30:.3g} GiB more for a block's "
                    "share; lower it, or run fewer ranks on the machine"
                ) from error
            missing -= piece

    def views(self, first: int, size: int) -> Iterator[Tensor]:
        """Bytes `first` to `first + size`, one view per piece."""
        at = 0
        for piece in self.pieces:
            begin, end = max(first, at), min(first + size, at + piece.numel())
            if begin < end:
                yield piece[begin - at : end - at]
            at += piece.numel()


class BufferLease:
    """A host buffer in use; returned to the pool when neither a block nor pending copies reference the lease."""

    def __init__(self, buffer: HostBuffer, free: list[HostBuffer]) -> None:
        self.buffer, self.free = buffer, free

    def __del__(self) -> None:
        self.free.append(self.buffer)


class OffloadedStorage:
    """A storage saved for backward: on the device, in flight, or with its first `sent` bytes in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.device, self.size = storage.device, storage.nbytes()
        self.sent = 0
        self.host: list[Tensor] = []
        self.rest: Tensor | None = None  # device copy of the part that is not offloaded

    def device_bytes(self) -> Tensor:
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def split(self, size: int) -> None:
        self.sent = size
        self.rest = self.device_bytes()[size:].clone()

    def send(self, buffer: HostBuffer, first: int) -> None:
        self.host = list(buffer.views(first, self.sent))
        for there, here in self.pairs():
            there.copy_(here, non_blocking=True)

    def allocate(self) -> None:
        here = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.rest is not None:
            here[self.sent :].copy_(self.rest)
            self.rest = None
        self.storage = here.untyped_storage()

    def fetch(self) -> None:
        for there, here in self.pairs():
            here.copy_(there, non_blocking=True)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        at, here = 0, self.device_bytes()
        for piece in self.host:
            yield piece, here[at : at + piece.numel()]
            at += piece.numel()


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor as a view of a storage, which may be offloaded. It does not reference the tensor itself: a result
    that referenced itself would never be freed."""

    stored: OffloadedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.stored.storage
        assert storage is not None
        return torch.empty(0, dtype=self.dtype, device=self.stored.device).set_(
            storage, self.offset, self.shape, self.stride
        )


class BlockPass:
    """One block in one pass, from forward to backward. Storages live as long as autograd references them."""

    def __init__(
        self, offload: Offload, index: int, x: Tensor, shared: Iterable[Tensor], before: BlockPass | None
    ) -> None:
        self.offload, self.index, self.before = offload, index, before
        self.device, self.tokens = x.device, x.shape[:-1].numel()
        self.shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self.storages: dict[int, OffloadedStorage] = {}  # of the forward pass, by storage
        self.offloaded: list[weakref.ref[OffloadedStorage]] = []
        self.incoming: list[OffloadedStorage] = []  # prefetched, not yet waited for
        self.lease: BufferLease | None = None
        self.arrived: torch.cuda.Event | None = None

    def __del__(self) -> None:
        if self.incoming:  # of a backward pass that failed
            self.offload.pending_copies.append(PendingCopies(self.index, self.arrived, self.incoming, self.lease))

    # --- hooks ------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # called from compiled blocks, not compiled itself
    def pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        if not self.is_offloadable(tensor):
            return tensor if tensor.is_leaf else tensor.detach()
        storage = tensor.untyped_storage()
        stored = self.storages.setdefault(storage._cdata, OffloadedStorage(storage))
        return SavedTensor(stored, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def is_offloadable(self, tensor: Tensor) -> bool:
        """Activations only: no weights, no views or casts of them, nothing shared with other blocks."""
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.device != self.device:
            return False
        origin = tensor if tensor._base is None else tensor._base
        if origin.is_leaf and origin.requires_grad:
            return False
        cast = tensor.shape in self.offload.weights and (tensor.shape[0] != self.tokens or is_cast_of_leaf(tensor))
        if cast:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= MIN_TENSOR_BYTES and storage._cdata not in self.shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, saved: SavedTensor | Tensor) -> Tensor:
        below, self.before = self.before, None
        if isinstance(saved, Tensor):
            found = saved
        else:
            self.fetch()
            self.offload.copy_stream(self.device).wait(self.arrived)
            self.incoming = []
            found = saved.tensor()
        if below is not None:
            below.fetch()
        return found

    # --- copies ----------------------------------------------------------------------------------------

    def send(self, share: int) -> None:
        """Offload whole storages, largest first, then a part of the smallest that did not fit."""
        chosen: list[OffloadedStorage] = []
        others: list[OffloadedStorage] = []
        left = share
        for stored in sorted(self.storages.values(), key=lambda stored: -stored.size):
            fits = stored.size <= left
            (chosen if fits else others).append(stored)
            stored.sent = stored.size if fits else 0
            left -= stored.sent
        if left and others:
            others[-1].split(left)
            chosen.append(others[-1])
        self.storages = {}
        if not chosen:
            return
        self.lease, at = self.offload.lease_buffer(self.index, self.device), 0
        self.lease.buffer.grow(sum(stored.sent for stored in chosen))
        copy_stream = self.offload.copy_stream(self.device)
        try:
            with copy_stream.after_compute():
                for stored in chosen:
                    stored.send(self.lease.buffer, at)
                    at += stored.sent
        finally:
            self.offload.pending_copies.append(PendingCopies(self.index, copy_stream.mark(), chosen, self.lease))
        self.offloaded = [weakref.ref(stored) for stored in chosen]

    def fetch(self) -> None:
        """Prefetch what was offloaded, unless already started."""
        incoming = [stored for ref in self.offloaded if (stored := ref()) is not None]
        self.offloaded = []
        if not incoming:
            return
        copy_stream = self.offload.copy_stream(self.device)
        for stored in incoming:
            stored.allocate()
        self.incoming = incoming
        try:
            with copy_stream.after_compute():
                for stored in incoming:
                    stored.fetch()
        finally:
            self.arrived = copy_stream.mark()


@dataclass(frozen=True, eq=False)
class PendingCopies:
    """Copies of a block in flight, their completion event, and the memory on both sides, not to be reused before."""

    index: int
    done: torch.cuda.Event | None
    storages: list[OffloadedStorage]
    lease: BufferLease | None


class Offload:
    """Of one model. `shares`: bytes that each block offloads; the last two are 0."""

    def __init__(self, shares: Sequence[int], weights: Iterable[nn.Parameter]) -> None:
        self.shares = tuple(shares)
        self.weights = {shape for weight in weights for shape in weight_shapes(weight)}
        self.free: dict[int, list[HostBuffer]] = {index: [] for index in range(len(self.shares))}
        self.pending_copies: list[PendingCopies] = []
        self.last: BlockPass | None = None
        self.copy_streams: dict[torch.device, CopyStream] = {}

    def copy_stream(self, device: torch.device) -> CopyStream:
        if device not in self.copy_streams:
            self.copy_streams[device] = CopyStream(device)
        return self.copy_streams[device]

    def lease_buffer(self, index: int, device: torch.device) -> BufferLease:
        free = self.free[index]
        return BufferLease(free.pop() if free else HostBuffer(device.type == "cuda"), free)

    @contextmanager
    def block_forward(self, index: int, x: Tensor, shared: Iterable[Tensor]) -> Iterator[None]:
        """Wraps the forward pass of block `index` over x; `shared` tensors are used by other blocks too."""
        if not torch.is_grad_enabled():
            yield
            return
        self.release_finished(index, x.device)
        block_pass = self.last = BlockPass(self, index, x, shared, self.last if index else None)
        with saved_tensors_hooks(block_pass.pack, block_pass.unpack):
            yield
        with torch.no_grad():
            block_pass.send(self.shares[index])

    def release_finished(self, index: int, device: torch.device) -> None:
        """Free device memory whose copies are done; at block 0 also what an unfinished pass left behind."""
        for one in [one for one in self.pending_copies if not index or one.index <= index - RELEASE_AFTER]:
            self.copy_stream(device).wait(one.done)
            for stored in one.storages:
                stored.storage = None
            self.pending_copies.remove(one)


def is_cast_of_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a cast or transposed view of a weight, as autocast makes it. Unknown for tensors
    saved by a compiled block."""
    node = tensor.grad_fn
    while node is not None and node.name() in CAST_NODES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def weight_shapes(weight: Tensor) -> Iterator[torch.Size]:
    """Shapes of the weight, of one expert's slice of it, and of both transposed."""
    yield weight.shape
    for shape in (weight.shape, weight.shape[-2:]) if weight.dim() > 1 else ():
        yield shape
        yield torch.Size((*shape[:-2], shape[-1], shape[-2]))
