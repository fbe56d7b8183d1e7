"""Kernels are compiled while weights are read.

Both take seconds where neither is in a cache, the one of processors and the other of a disk. Kernels depend on the
widths of a model, not on its depth or its weights: a network of one layer with nothing in it takes the steps that the
engine will take, on a thread of its own, and what was compiled and loaded for them is there when the engine begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

import torch

from ...spec import EngineSpec, ModelSpec
from .cuda_graphs import captured_metadata
from .graph_buckets import capture_sizes
from .meta_model import MetaModel
from .model_runner import DTYPES, ModelRunner, resolve_spec
from .sampler import SamplingMetadata
from .step_input import decode_bucket, unpack
from .warmup import run_dummy_step, run_largest_step

log = logging.getLogger(__name__)


@contextmanager
def warm_up_kernels(outline: MetaModel | None, spec: EngineSpec, device: torch.device) -> Iterator[None]:
    """While the block runs, and done when it is left. `outline`: None where only the weights tell it."""
    if outline is None or not is_worthwhile(outline.spec, spec, device):
        yield
        return
    thread = Thread(target=warm_up_or_log, args=(outline, spec, device), name="rehearsal", daemon=True)
    thread.start()
    yield  # where it fails, nobody waits for the thread
    thread.join()
    torch.cuda.empty_cache()


def is_worthwhile(shape: ModelSpec, spec: EngineSpec, device: torch.device) -> bool:
    """A CPU compiles nothing; experts and ranks take other steps; and weights that fill a GPU leave no room for it."""
    if device.type == "cpu" or shape.experts or spec.tp > 1:
        return False
    return (
        torch.cuda.mem_get_info(device)[0] > 2 * shape.params * DTYPES[resolve_spec(spec, shape, device).dtype].itemsize
    )


def warm_up_or_log(outline: MetaModel, spec: EngineSpec, device: torch.device) -> None:
    """The engine does without it: it then compiles when it begins, and what is really wrong is told there."""
    try:
        compile_kernels(outline, spec, device)
    except Exception as error:
        log.warning("kernels were not compiled ahead: %s: %s", type(error).__name__, error)


@torch.no_grad()
def compile_kernels(outline: MetaModel, spec: EngineSpec, device: torch.device) -> None:
    """Twice on a GPU: only to find what there is to compile, and as it will be."""
    if device.type != "cuda":
        run_steps(one_layer_runner(outline, spec, device))
        return
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(load_compiler)
        runner = one_layer_runner(outline, spec, device)
        loading.result()
    from ...kernels.compiling import compiled_apart

    with compiled_apart():
        run_steps(runner)
    run_steps(runner)
    torch.cuda.synchronize(device)


def load_compiler() -> None:
    """Half a second, and nearly as long again until it knows its own version, by which it finds what it has kept."""
    from ...kernels.compiling import know_version

    know_version()


def run_steps(runner: ModelRunner) -> None:
    """The largest, one prompt of every length that attention has a kernel for, and decoding steps of all sizes that
    graphs are recorded of. None reads what another has picked.
    """
    run_largest_step(runner)
    for count in prompt_lengths(runner.spec):
        run_dummy_step(runner, 1, count)
    for size in capture_sizes(runner.spec.max_seqs):
        buffer, layout = runner.packer.dummy_decode(decode_bucket(size))
        runner.forward_and_sample(unpack(buffer.to(runner.device), layout), captured_metadata(SamplingMetadata()))


def prompt_lengths(spec: EngineSpec) -> list[int]:
    """Their lengths: beyond 512 tokens attention has one kernel for all."""
    return sorted({min(2**power, spec.context - 1, spec.max_batch_tokens) for power in range(1, 10)})


def one_layer_runner(outline: MetaModel, spec: EngineSpec, device: torch.device) -> ModelRunner:
    model = outline.blank(device, DTYPES[resolve_spec(spec, outline.spec, device).dtype], layers=1)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    plain = spec.replace(blocks=1, graphs=False, speculate="none", draft="")
    return ModelRunner(model.eval(), plain, device, outline.spec.vocab)
