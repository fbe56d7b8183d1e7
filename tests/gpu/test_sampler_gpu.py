"""The sampler on a GPU: the tokens that a CPU picks, without a word to the host, and from inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.engine.core.request import Request, Sequence
from lmworks.engine.core.sampler import Sampler, SamplerOutput
from lmworks.engine.core.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, VALID = 20_000, 19_990
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6, "top_p": 0.9, "logprobs": 3},
    {"top_k": 50, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {7: 3.0, 9: -100.0}, "top_p": 0.95},
    {"min_tokens": 5},
]
PLAIN = WISHES[:2] + WISHES[3:4]


def sequence(seed: int, wishes: dict[str, Any]) -> Sequence:
    prompt = [3, 4, 5]
    return Sequence(
        Request(prompt, SamplingParams(max_tokens=99, **wishes), end_token_ids=(11,)), 0, seed, list(prompt), 3
    )


def sampler_on(device: str, wishes: list[dict[str, Any]]) -> Sampler:
    sampler = Sampler(VOCAB, VALID, len(wishes), device)
    for slot, each in enumerate(wishes):
        sampler.admit(slot, sequence(slot * 1000, each))
    return sampler


def batch(rows: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step)) * 2
    return logits, torch.arange(rows).flip(0), torch.full((rows,), step)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def sampled_on(device: str, steps: int) -> list[SamplerOutput]:
    sampler = sampler_on(device, WISHES)
    batches = [[t.pin_memory().to(device, non_blocking=True) for t in batch(len(WISHES), i)] for i in range(steps)]
    return [sampler(*each) for each in batches]


@pytest.mark.usefixtures("no_waiting")
def test_gpu_samples_equal_cpu() -> None:
    there, here = sampled_on("cuda", 8), sampled_on("cpu", 8)
    torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.tokens.cpu(), other.tokens) and not one.bad.any()
        for found, expected in ((one.logprob, other.logprob), (one.top_logprobs, other.top_logprobs)):
            assert found is not None and expected is not None
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5)


def test_graph_captures_plain_sampler() -> None:
    sampler = sampler_on("cuda", PLAIN)
    sampling_metadata = sampler.sampling_metadata(range(len(PLAIN)))
    assert sampling_metadata.plain
    inputs = [t.cuda() for t in batch(len(PLAIN), 0)]
    sampler(*inputs, None, sampling_metadata)  # kernels are compiled before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = sampler(*inputs, None, sampling_metadata)
    for step in range(1, 6):
        if step == 3:
            sampler.admit(1, sequence(99, {"temperature": 2.0, "top_p": 0.5}))  # another one in a slot
        for kept, new in zip(inputs, batch(len(PLAIN), step), strict=True):
            kept.copy_(new)
        graph.replay()
        assert torch.equal(held.tokens, sampler(*inputs, None, sampling_metadata).tokens)
