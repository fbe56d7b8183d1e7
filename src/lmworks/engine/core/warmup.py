"""Before the first request: profiling the memory of the largest step, and capturing CUDA graphs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .cuda_graphs import captured_metadata
from .kv_cache import free_on_gpu
from .request import Request, Sequence
from .sampler import SamplingMetadata
from .sampling_params import SamplingParams
from .scheduler import Chunk, Step

if TYPE_CHECKING:
    from .model_runner import ModelRunner


def run_largest_step(runner: ModelRunner) -> None:
    """A dummy step with the most tokens and sequences."""
    spec = runner.spec
    seqs = min(spec.max_seqs, spec.max_batch_tokens)
    run_dummy_step(runner, seqs, max(1, min(spec.max_batch_tokens // seqs, spec.context - 1)))


def run_dummy_step(runner: ModelRunner, seqs: int, count: int) -> None:
    """A dummy prefill of `seqs` prompts of `count` tokens; all write to block 0."""
    request = Request([0] * count, SamplingParams(max_tokens=1))
    chunks = []
    for slot in range(seqs):
        sequence = Sequence(request, slot, slot, [0] * count, count, slot=slot)
        sequence.blocks = [0] * math.ceil(count / runner.spec.block)
        runner.admit(sequence)
        chunks.append(Chunk(sequence, 0, count, 1))
    runner.launch(Step(chunks)).read()


def profile_cache_memory(runner: ModelRunner) -> int:
    """Bytes left for the KV cache beside the peak of the largest step, which also loads its kernels."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    run_largest_step(runner)
    peak = torch.cuda.max_memory_allocated(runner.device)
    torch.cuda.empty_cache()
    return free_on_gpu(runner.device, runner.spec.memory, peak)


@torch.no_grad()
def capture_graphs(runner: ModelRunner) -> None:
    """Capture plain decode steps of all bucket sizes: less than a second in all.

    Rarer variants (wider tables, log-probabilities) are captured when first needed, mixed steps when their bucket is
    used again; that step takes longer.
    """
    assert runner.graphs is not None
    for size in reversed(runner.graphs.sizes):  # the largest first: the others reuse its memory
        runner.graphs.run(
            *runner.packer.dummy_decode(runner.graphs.padded(size)), captured_metadata(SamplingMetadata())
        )
    torch.cuda.synchronize(runner.device)
