"""Engines for the tests of the API: made in the engine's process, so each is a function of this module."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import time
from pathlib import Path

import torch

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.engine import Engine
from lmworks.engine.request import Piece
from lmworks.engine.runner import Runner
from lmworks.model import GPT
from lmworks.serve.channel import Served
from lmworks.spec import EngineSpec, ModelSpec, SpecError

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=257, context=512)
SPEC = EngineSpec(device="cpu", block=16, blocks=1024, context=512, max_seqs=64, max_batch_tokens=256)


def tiny(**options: int) -> Served:
    """One layer of width 32 over bytes, random weights."""
    torch.set_num_threads(1)
    model = GPT(MODEL)
    model.init_weights(0)
    runner = Runner(model.eval(), SPEC.replace(**options), torch.device("cpu"), ByteTokenizer.vocab_size)
    return Served(Engine(runner, ByteTokenizer(), seed=0))


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> tuple[int, int]:
    """Blocks of Python's allocator, and bytes of the C library's, that hold something."""
    gc.collect()
    look = ctypes.CDLL(None).mallinfo2
    look.restype = MallInfo
    found = look()
    return sys.getallocatedblocks(), found.uordblks + found.hblkhd


def telling(told: Path, **options: int) -> Served:
    """Writes down what its process has in use, when that gets SIGUSR1."""

    def tell(*_: object) -> None:
        written = told.with_suffix(".new")
        written.write_text(" ".join(map(str, in_use())))
        written.rename(told)

    signal.signal(signal.SIGUSR1, tell)
    return tiny(**options)


def missing() -> Served:
    raise SpecError("no model is there")


class Fragile(Engine):
    """Fails in the step after a prompt that begins with 13."""

    def step(self) -> list[Piece]:
        if any(request.prompt[0] == 13 for request in self.requests.values()):
            raise RuntimeError("the device is on fire")
        return super().step()


def fragile() -> Served:
    served = tiny()
    return Served(Fragile(served.engine.runner, ByteTokenizer(), seed=0))


def endless() -> Served:
    """Weights that never come."""
    time.sleep(1000)
    return tiny()
