"""Kernel warm-up: kernels are compiled while weights are loaded.

Compiling uses processors, loading a disk; each takes seconds with cold caches. Kernels depend on the widths of a model,
not on its depth or weights: a one-layer network without weights runs the steps that the engine will run, on a thread of
its own, so that its kernels are compiled and loaded when the engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

import torch

from ...spec import EngineSpec, ModelSpec
from ..quantization.quantized_model import MetaModel
from .cuda_graphs import capture_sizes, captured_metadata, run_dummy_step, run_largest_step
from .model_runner import DTYPES, ModelRunner, resolve_spec
from .sampler import SamplingMetadata
from .step_input import decode_bucket, unpack

log = logging.getLogger(__name__)


@contextmanager
def warm_up_kernels(meta_model: MetaModel | None, spec: EngineSpec, device: torch.device) -> Iterator[None]:
    """Compile in the background while the block runs; joined at its end. `meta_model`: None if not known yet."""
    if meta_model is None or not is_worthwhile(meta_model.spec, spec, device):
        yield
        return
    thread = Thread(target=warm_up_or_log, args=(meta_model, spec, device), name="kernel-warmup", daemon=True)
    thread.start()
    yield  # on an exception the thread is not joined
    thread.join()
    torch.cuda.empty_cache()


def is_worthwhile(shape: ModelSpec, spec: EngineSpec, device: torch.device) -> bool:
    """Not on a CPU, which compiles nothing; not with tensor parallelism; not without free GPU memory."""
    if device.type == "cpu" or spec.tp > 1:
        return False
    return (
        torch.cuda.mem_get_info(device)[0] > 2 * shape.params * DTYPES[resolve_spec(spec, shape, device).dtype].itemsize
    )


def warm_up_or_log(meta_model: MetaModel, spec: EngineSpec, device: torch.device) -> None:
    """Failures are logged only: the engine then compiles at first launch, and raises real errors."""
    try:
        compile_kernels(meta_model, spec, device)
    except Exception as error:
        log.warning("kernels were not compiled ahead: %s: %s", type(error).__name__, error)


@torch.no_grad()
def compile_kernels(meta_model: MetaModel, spec: EngineSpec, device: torch.device) -> None:
    """Twice on a GPU: a dry run that compiles all kernels in parallel, then a real run."""
    if device.type != "cuda":
        run_steps(one_layer_runner(meta_model, spec, device))
        return
    with ThreadPoolExecutor(1) as beside:
        loading = beside.submit(load_compiler)
        runner = one_layer_runner(meta_model, spec, device)
        loading.result()
    from ...kernels.triton_support import compile_only

    with compile_only():
        run_steps(runner)
    run_steps(runner)
    torch.cuda.synchronize(device)


def load_compiler() -> None:
    """Import Triton (half a second) and hash its version, the key of its cache (nearly as long again)."""
    from ...kernels.triton_support import hash_triton_version

    hash_triton_version()


def run_steps(runner: ModelRunner) -> None:
    """The largest step, one prompt of every length that has an attention kernel, all decode bucket sizes, and one whose
    sequences share a prefix."""
    run_largest_step(runner)
    for count in prompt_lengths(runner.spec, runner.model.spec.experts > 0):
        run_dummy_step(runner, 1, count)
    prefixes, sizes = runner.packer.prefixes, capture_sizes(runner.spec.max_seqs)
    buckets = [decode_bucket(size) for size in sizes]
    if prefixes.sharing:
        buckets.append(buckets[-1]._replace(shared_tiles=prefixes.max_tiles(sizes[-1])))
    for bucket in buckets:
        buffer, layout = runner.packer.dummy_step(bucket)
        runner.forward_and_sample(unpack(buffer.to(runner.device), layout), captured_metadata(SamplingMetadata()))


def prompt_lengths(spec: EngineSpec, experts: bool) -> list[int]:
    """Beyond 1,024 tokens attention has one kernel for all lengths; experts have more."""
    powers = spec.max_batch_tokens.bit_length() if experts else 12
    return sorted({min(2**power, spec.context - 1, spec.max_batch_tokens) for power in range(1, powers)})


def one_layer_runner(meta_model: MetaModel, spec: EngineSpec, device: torch.device) -> ModelRunner:
    model = meta_model.blank(device, DTYPES[resolve_spec(spec, meta_model.spec, device).dtype], layers=1)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    plain = spec.replace(blocks=1, graphs=False, speculate="none", draft="")
    return ModelRunner(model.eval(), plain, device, meta_model.spec.vocab)
