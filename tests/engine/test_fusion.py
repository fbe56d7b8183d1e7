"""Merging layers: the same numbers, held once; what cannot be merged stays, and still gives the same."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from test_model_runner import SHAPES, answered, lively, prompts_of, runner_of
from torch import Tensor

from lmworks.engine.core.fusion import FusedAttention, FusedBlock, FusedMLP, RotaryCache, Unfused, fuse
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.quantization.quantized_model import apply_quantization
from lmworks.model import GPT, generate, rope
from lmworks.model.gpt import Linear
from lmworks.spec import LMWorksError, ModelSpec, SpecError


def bytes_of(model: GPT) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_weights_share_memory(shape: str) -> None:
    model = lively(**SHAPES[shape])
    before = bytes_of(model)
    replaced = [weakref.ref(block.attention.kv_b if model.spec.kv_lora_rank else block.attention.q)
                for block in model.layers()]  # fmt: skip
    pointers = {tensor.data_ptr() for tensor in model.parameters()}
    fuse(model, 64)
    assert bytes_of(model) == before
    assert all(ref() is None for ref in replaced)
    held = (*model.parameters(), *model.buffers())
    merged = [tensor for tensor in held if tensor.data_ptr() not in pointers]
    assert len(merged) >= model.spec.layers  # and what was not merged lies where it lay


def test_fused_layers() -> None:
    dense, moe = lively(), lively(**SHAPES["moe"])
    for model in (dense, moe):
        fuse(model, 64)
    blocks = [model.layers()[0] for model in (dense, moe)]
    assert all(isinstance(block, FusedBlock) and isinstance(block.attention, FusedAttention) for block in blocks)
    assert isinstance(blocks[0].mlp, FusedMLP) and isinstance(blocks[1].mlp, Unfused)


class Doubled(Linear):
    """A layer that is not what its weight says: merging by the weight would be wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_doubled(model: GPT) -> GPT:
    for part, name in (("attention", "k"), ("mlp", "up"), ("mlp", "down")):
        owner = getattr(model.layers()[0], part)
        plain = getattr(owner, name)
        odd = Doubled(plain.in_features, plain.out_features, bias=False)
        odd.weight = plain.weight
        setattr(owner, name, odd)
    return model


def test_other_layers_are_unchanged() -> None:
    model = with_doubled(lively(qk_norm=True))
    prompts = prompts_of([21, 6])
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 2
    runner = runner_of(model)
    assert isinstance(runner.model.layers()[0].attention, Unfused) and isinstance(
        runner.model.layers()[1].attention, FusedAttention
    )
    for prompt, result in zip(prompts, answered(runner, prompts, *params), strict=True):
        assert prompt + result.token_ids == generate(model, torch.tensor([prompt]), 12)[0].tolist()


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantised_layers_are_merged(scheme: str) -> None:
    """They give what they gave one by one; with invariance, bitwise the same alone and in a batch."""
    model = apply_quantization(lively(qkv_bias=True, hidden=128, ffn=256), scheme)
    prompts = prompts_of([21, 6])
    params = [SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)] * 2
    runner = runner_of(model)
    assert not any(isinstance(module, Unfused) for module in runner.model.modules())
    for prompt, result in zip(prompts, answered(runner, prompts, *params), strict=True):
        assert prompt + result.token_ids == generate(model, torch.tensor([prompt]), 8)[0].tolist()
    together = answered(runner_of(model, batch_invariant=True), prompts, *params)
    alone = [answered(runner_of(model, batch_invariant=True), [prompt], params[0])[0] for prompt in prompts]
    assert [result.logprobs for result in together] == [result.logprobs for result in alone]


def test_batch_invariance_rejects_unknown_layers() -> None:
    with pytest.raises(SpecError, match=r"batch_invariant = true is not supported by attention.k, which is a Doubled"):
        fuse(with_doubled(lively()), 64, invariant=True)


@pytest.mark.parametrize("scaling", [{}, {"type": "yarn", "factor": 4.0}, {"type": "llama3", "factor": 8.0}])
def test_rotary_cache_equals_tables(scaling: dict[str, object]) -> None:
    spec = ModelSpec.from_preset("tiny", rope_scaling=scaling)
    positions = torch.tensor([0, 99, 7, 7, 127])
    for mine, theirs in zip(
        RotaryCache(spec, 128, torch.device("cpu"))(spec, positions), rope.tables(spec, positions), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_too_long_context_is_rejected() -> None:
    with pytest.raises(LMWorksError, match=r"rotations of 1,000,000,000,000,000 positions .* engine\.context"):
        RotaryCache(ModelSpec.from_preset("tiny"), 10**15, torch.device("cpu"))


def test_original_model_is_unchanged() -> None:
    """A runner takes its model over; one that was copied before still trains."""
    model = lively()
    kept = copy.deepcopy(model)
    fuse(model, 64)
    tokens = torch.tensor([prompts_of([20])[0]])
    kept(tokens[:, :-1], tokens[:, 1:])[1].backward()
    assert all(parameter.grad is not None for parameter in kept.parameters())
