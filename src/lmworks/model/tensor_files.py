"""The safetensors format, where the library does not do it: written a tensor at a time, read to a device by many
threads.

A file is the length of its header in 8 bytes, the header in JSON, and the tensors' bytes in the header's order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..spec import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """Of contiguous tensors (name, type, shape)."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, shapes: Mapping[str, Tensor], values: Iterator[Tensor]) -> None:
    """The next of `values` for each of `shapes`, which have its type and shape and may be on `meta`."""
    with path.open("wb") as file:
        file.write(header((name, shape.dtype, shape.shape) for name, shape in shapes.items()))
        for _ in shapes:
            file.write(raw(next(values)))
        file.flush()
        os.fsync(file.fileno())


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    write_tensors(path, tensors, iter(tensors.values()))


def raw(tensor: Tensor) -> memoryview:
    """Its bytes, without a copy on a CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Span:
    """The location of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


def spans(path: Path) -> dict[str, Span]:
    """Of a file that `safe_open` has found to be whole; less those of types that no network here has."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table: dict[str, Any] = json.loads(file.read(size))
    table.pop("__metadata__", None)
    return {
        name: Span(TORCH_DTYPES[one["dtype"]], tuple(one["shape"]), 8 + size + start, end - start)
        for name, one in table.items()
        if one["dtype"] in TORCH_DTYPES
        for start, end in [one["data_offsets"]]
    }


# --- from files to a device ------------------------------------------------------------------------------


STAGED_DEVICES = ("cuda",)  # devices to which weights are copied through pinned buffers
THREADS = 16
PIECE = 8 * 2**20  # bytes of one buffer: a disk is asked for enough at once, and pinning a GiB would take a second

Item = TypeVar("Item")


class DoubleBuffer:
    """Two pinned buffers of one thread: while one is copied to the GPU, the other is filled.

    Memory-mapped files would be read at the pace of page faults: 2 GB/s from a disk, 5 from memory.
    """

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        self.device, self.piece, self.turn = device, piece, 0
        self.cuda = device.type == "cuda"
        self.buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self.free = [torch.cuda.Event() for _ in self.buffers] if self.cuda else []

    def fetch(self, file: int, span: Span) -> Tensor:
        """A tensor of an open file. It may still be on its way; later work on the stream waits for it."""
        there = torch.empty(span.shape, dtype=span.dtype, device=self.device)
        target = there.view(-1).view(torch.uint8)
        for begin in range(0, span.bytes, self.piece):
            size = min(self.piece, span.bytes - begin)
            self.turn = 1 - self.turn
            buffer = self.buffers[self.turn][:size]
            if self.cuda:
                self.free[self.turn].synchronize()  # its last copy is done
            read_into(file, buffer.numpy().data, span.start + begin)
            target[begin : begin + size].copy_(buffer, non_blocking=True)
            if self.cuda:
                self.free[self.turn].record()
        return there


def read_into(file: int, buffer: memoryview, start: int) -> None:
    """All of it; the interpreter is not locked meanwhile."""
    while len(buffer):
        count = os.preadv(file, [buffer], start)
        if count == 0:
            raise CheckpointError("a file of weights became shorter while it was read")
        buffer, start = buffer[count:], start + count


def upload_in_threads(items: Iterable[Item], work: Callable[[Item, DoubleBuffer], None], device: torch.device) -> None:
    """Do `work` on every item, by THREADS threads with a buffer each; the first error is raised at the end."""
    mine = local()

    def run(item: Item) -> None:
        here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.no_grad(), here:  # settings of the thread
            if not hasattr(mine, "buffer"):
                mine.buffer = DoubleBuffer(device)
            work(item, mine.buffer)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, item) for item in items]:
            done.result()


Module = TypeVar("Module", bound=nn.Module)


def to_empty(model: Module, device: torch.device, dtype: torch.dtype) -> Module:
    """A model of the meta device, on `device`, with anything in it; its parameters in `dtype`.

    Buffers keep their formats: the bias of a choice of experts is fp32, quantized weights are integers. As
    nn.Module.to_empty, which asks Python code for the layout of each tensor, and that loads a system for symbolic
    mathematics: seconds, when an engine starts.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
