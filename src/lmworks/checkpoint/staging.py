"""Staging memory of asynchronous saves, allocated once: training waits only for the copy into it.

It is an anonymous file shared by the rank and its writer process, so nothing is left behind however they end. On CUDA
its pages are pinned, and copies run at bus speed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import torch

from ..spec import CheckpointError
from .save_plan import RankPlan, tensor_lookup


class Staging:
    def __init__(self, plan: RankPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        size = max(1, plan.bytes)
        try:
            self.descriptor = anonymous_file()
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise CheckpointError(
                f"no memory for the {size} bytes that an asynchronous save copies on this rank ({error.strerror}); "
                "use checkpoint.asynchronous = false"
            ) from error
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.buffer.zero_()  # touches its pages before the first save
        if device.type == "cuda" and int(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)):
            raise CheckpointError(
                f"cannot pin the {size} bytes that an asynchronous save copies on this rank (see ulimit -l); "
                "use checkpoint.asynchronous = false"
            )

    def copy_from(self, state: dict[str, Any]) -> None:
        """Copy this rank's pieces of `state`."""
        find = tensor_lookup(state)
        for piece in self.plan.pieces:
            target = self.buffer[piece.start : piece.start + piece.bytes].view(piece.dtype).view(piece.sizes)
            target.copy_(find(piece), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        os.close(self.descriptor)


def anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lmworks-staging")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
