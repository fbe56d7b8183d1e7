"""Kernels are compiled while weights are read.

Both take seconds where neither is in a cache, the one of processors and the other of a disk. Kernels depend on the
widths of a model, not on its depth or its weights: networks of one layer with nothing in them take the steps that the
engine will take, on threads of their own, and what they compiled and loaded is there when the engine begins. Side by
side: a compiler lets go of the interpreter for most of its time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import torch

from ..model import GPT
from ..model.room import make_room
from ..spec import EngineSpec, ModelSpec
from .batch import decoding_frame, unpack
from .graphs import recorded_as, sizes_up_to
from .runner import DTYPES, Runner, filled
from .sampler import Wants
from .warmup import take_largest_step

log = logging.getLogger(__name__)

Scene = list[int]  # decoding steps of so many sequences; without any, the largest step


@contextmanager
def rehearsal(shape: ModelSpec | None, spec: EngineSpec, device: torch.device) -> Iterator[None]:
    """While the block runs, and done when it is left. `shape`: None where only the weights tell it."""
    if shape is None or not pays(shape, spec, device):
        yield
        return
    threads = [
        Thread(target=tried, args=(scene, shape, spec, device), name="rehearsal", daemon=True)
        for scene in scenes(filled(spec, shape, device).max_seqs)
    ]
    for thread in threads:
        thread.start()
    yield  # where it fails, nobody waits for the threads
    for thread in threads:
        thread.join()
    torch.cuda.empty_cache()


def pays(shape: ModelSpec, spec: EngineSpec, device: torch.device) -> bool:
    """A CPU compiles nothing; experts and ranks take other steps; and weights that fill a GPU leave no room for it."""
    if device.type == "cpu" or shape.experts or spec.tp > 1:
        return False
    return torch.cuda.mem_get_info(device)[0] > 2 * shape.params * DTYPES[filled(spec, shape, device).dtype].itemsize


def scenes(max_seqs: int) -> list[Scene]:
    """The first sizes have most of the kernels that others do not have."""
    sizes = sizes_up_to(max_seqs)
    return [[], *(scene for scene in (sizes[:1], sizes[1:3], sizes[3:]) if scene)]


def tried(scene: Scene, shape: ModelSpec, spec: EngineSpec, device: torch.device) -> None:
    """The engine does without it: it then compiles when it begins, and what is really wrong is told there."""
    try:
        play(scene, shape, spec, device)
    except Exception as error:
        log.warning("kernels were not compiled ahead: %s: %s", type(error).__name__, error)


@torch.no_grad()
def play(scene: Scene, shape: ModelSpec, spec: EngineSpec, device: torch.device) -> None:
    runner = one_layer(shape, spec, device)
    if not scene:
        take_largest_step(runner)
    for size in scene:
        buffer, layout = runner.packer.nobody(decoding_frame(size))
        runner.work(unpack(buffer.to(device), layout), recorded_as(Wants()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_layer(shape: ModelSpec, spec: EngineSpec, device: torch.device) -> Runner:
    with torch.device("meta"):
        model = GPT(shape.replace(layers=1))
    make_room(model, device, DTYPES[filled(spec, shape, device).dtype])
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    plain = spec.replace(blocks=1, graphs=False, speculate="none", draft="")
    return Runner(model.eval(), plain, device, shape.vocab)
