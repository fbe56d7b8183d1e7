"""Quantized networks and adapters that several ranks share: what each holds, and that they answer as one rank does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from hf_reference import reference_model
from safetensors import safe_open
from test_lora import Made, all_at_once, greedy_of, merged, two_adapters
from torch import Tensor, nn

from lmworks import LLM, SamplingParams
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Result
from lmworks.engine.quantization.folder import QuantizedWeights, load_quantized, save_quantized
from lmworks.engine.quantization.quantize import Calibration, quantize
from lmworks.engine.quantization.quantized_model import (
    SCHEMES,
    MetaModel,
    QuantLinear,
    quantized_layers,
    round_to_nearest,
    served_bytes,
)
from lmworks.engine.tensor_parallel.executor import Executor
from lmworks.engine.tensor_parallel.tp_shards import INPUTS, OUTPUTS, LinearShard, check_tp_divides
from lmworks.model import GPT
from lmworks.model.gpt import Linear
from lmworks.spec import CheckpointError, EngineSpec, LMWorksError, ModelSpec, SpecError
from tiny import flip_a_bit

CLOSE = 1e-4  # two likeliest tokens that are no further apart may change places
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key head": {"kv_heads": 1, "qkv_bias": True},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "qkv_bias": True, "kv_heads": 4},
    "tied": {"qk_norm": True, "tie_embeddings": True},
    "latent attention": {"kv_lora_rank": 16, "q_lora_rank": 24, "rope_head_dim": 8, "kv_heads": 4},
}
pytestmark = pytest.mark.usefixtures("forked_python")  # tests/engine/test_engine_tp.py starts real workers
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "block": 4, "blocks": 40, "max_batch_tokens": 11}
PROMPTS = [[7, 8, 9] * 3, [1, 2, 3, 4, 5], [50], list(range(20, 43))]


def a_layer(scheme: str, group: int = 128, inputs: int = 192, bias: bool = False) -> QuantLinear:
    layer = Linear(inputs, 48, bias=bias)
    draw = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=draw)
    return round_to_nearest(SCHEMES[scheme], layer.requires_grad_(False), group)


def shares(whole: QuantLinear, dim: int, tp: int) -> list[QuantLinear]:
    size = (whole.weight.shape[0] if dim == OUTPUTS else whole.in_features) // tp
    return [LinearShard(dim, slice(rank * size, (rank + 1) * size)).quantized(whole) for rank in range(tp)]


# --- layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3, 4, 6])
@pytest.mark.parametrize(("scheme", "group"), [("int8", 0), ("fp8", 0), ("int4", 128), ("int4", 16)])
def test_shards_join_to_whole_bitwise(scheme: str, group: int, tp: int) -> None:
    """Of groups of 128, a rank has three, a pair, one and a half, or one: pairs are cut apart, and groups too."""
    whole = a_layer(scheme, group, inputs=768, bias=True)
    for dim in (OUTPUTS, INPUTS):
        parts = shares(whole, dim, tp)
        assert torch.equal(torch.cat([part.dequantized() for part in parts], dim), whole.dequantized())
        assert {part.weight.dtype for part in parts} == {whole.weight.dtype}
        assert all(part.weight.is_contiguous() and part.scale.is_contiguous() for part in parts)
        stored = sum(part.weight.untyped_storage().nbytes() for part in parts)
        assert stored == whole.weight.nbytes  # nobody holds more than its share
        assert all(torch.equal(part.bias, whole.bias) for part in parts) == (dim == INPUTS)
    assert torch.equal(torch.cat([part.bias for part in shares(whole, OUTPUTS, tp)]), whole.bias)


def test_indivisible_group_is_rejected() -> None:
    spec = ModelSpec.from_preset("tiny", hidden=64, heads=8, kv_heads=2, ffn=192)
    groups = {"blocks.0.attention.q": 32, "blocks.0.attention.out": 32, "blocks.0.mlp.down": 32}
    meta_model = MetaModel(spec, "int4", groups)
    check_tp_divides(meta_model, 2)
    says = (
        r"engine.tp = 4: layer 'blocks.0.attention.out' has 64 inputs in int4 groups of 32, and a rank's share of 16 "
        r"is not a multiple of 32, the packing unit; engine.tp = 2 works"
    )
    with pytest.raises(SpecError, match=says):
        check_tp_divides(meta_model, 4)
    check_tp_divides(MetaModel(spec, "int8"), 4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shard_outputs_sum_to_whole(scheme: str) -> None:
    """In fp8 each rank rounds its inputs by a scale of their own, never a coarser one: no further from the truth."""
    whole = a_layer(scheme)
    x = torch.randn(200, 192, generator=torch.Generator().manual_seed(2))
    total = summed(shares(whole, INPUTS, 2), x)
    if scheme != "fp8":
        torch.testing.assert_close(total, whole(x), atol=1e-4, rtol=1e-5)
        return
    truth = x @ whole.dequantized().t()
    mine, ones = ((y - truth).square().mean().sqrt() for y in (total, whole(x)))
    assert not torch.equal(total, whole(x))
    assert mine <= 1.01 * ones
    assert (total - whole(x)).norm() / truth.norm() < 0.04


def summed(parts: list[QuantLinear], x: Tensor) -> Tensor:
    each: list[Tensor] = [part(own) for part, own in zip(parts, x.chunk(len(parts), dim=-1), strict=True)]
    return torch.stack(each).sum(dim=0)


# --- networks ---------------------------------------------------------------------------------------------


def lively(shape: str, **more: Any) -> GPT:
    """Of random weights, norms and biases too, that make some tokens much likelier than others."""
    given = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 96, "context": 64}
    model = GPT(ModelSpec.from_preset("tiny", **{**given, "init_std": 0.2, **SHAPES[shape], **more}), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def make_folder(out: Path, scheme: str, shape: str) -> Path:
    return save_rounded(lively(shape), scheme, out)


def save_rounded(model: GPT, scheme: str, out: Path) -> Path:
    text = torch.randint(0, 96, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    report = quantize(model, scheme, Calibration.of(text, 16, 96, "random tokens"), limit=math.inf)
    save_quantized(model, out, report, vocab=90)
    return out


def answered(
    llm: LLM, adapters: Sequence[str | None] = (None,) * len(PROMPTS), prompts: list[list[int]] = PROMPTS
) -> list[Result]:
    wishes = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "prompt_logprobs": 0}
    return llm.generate(prompts, [SamplingParams(**wishes, adapter=adapter) for adapter in adapters])


def refuse_differences(one: list[Result], other: list[Result], close: float) -> None:
    """Tokens are the same, up to where two are equally likely; until there, so are log-probabilities."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.error is None
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            first, second = (logprob for _, logprob in a.top[:2])
            if a.token != b.token:
                assert first - second < CLOSE, f"token {b.token}, not {a.token}, which leads by {first - second:.2e}"
                break
            assert b.logprob == pytest.approx(a.logprob, abs=close)
    assert prompt_logprobs(one) == pytest.approx(prompt_logprobs(other), abs=close)


def prompt_logprobs(results: list[Result]) -> list[float]:
    return [each.logprob for result in results for each in result.prompt_logprobs or [] if each]


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.native.runner
    assert isinstance(runner, ModelRunner)
    return runner


class ByHalves(nn.Module):
    """One rank's layer, computed as two ranks do."""

    def __init__(self, whole: QuantLinear) -> None:
        super().__init__()
        self.parts, self.bias = shares(whole, INPUTS, 2), whole.bias
        for part in self.parts:
            part.bias = None

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.parts, x)
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize(
    ("scheme", "shape", "kv_dtype"),
    [
        ("int4", "one key head", "int8"),
        ("fp8", "gpt2", "auto"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("int8", "llama", "auto"),
                ("int8", "latent attention", "auto"),
                ("int8", "gpt2", "fp8"),
                ("int4", "tied", "fp8"),
                ("int4", "llama", "auto"),
                ("fp8", "one key head", "int8"),
            )
        ),
    ],
)
def test_two_ranks_equal_one(scheme: str, shape: str, kv_dtype: str, tmp_path: Path) -> None:
    """Of fp8, exactly as one that rounds the inputs of `out` and `down` by halves, and nearly as one that does not.

    From the latter, log-probabilities that range from -2 to -10 differ by 0.1 to 0.15 on average.
    """
    folder = make_folder(tmp_path / "quantized", scheme, shape)
    options = {"kv_dtype": kv_dtype, **SMALL}
    with LLM(folder, **options) as llm:
        whole_bytes = served_bytes(runner_of(llm).model)
        usual = alone = answered(llm)
    if scheme == "fp8":
        with LLM(folder, **options) as llm:
            for block in runner_of(llm).model.blocks.values():
                block.attention.out, block.mlp.down = ByHalves(block.attention.out), ByHalves(block.mlp.down)
            alone = answered(llm)
    with LLM(folder, tp=2, **options) as llm:
        with pytest.raises(SpecError, match=r"use engine.tp = 1, not 2"):
            llm.watch_drift()
        assert served_bytes(runner_of(llm).model) < 0.6 * whole_bytes  # norms, biases and one key head are not halved
        shared = answered(llm)
    refuse_differences(alone, shared, close=1e-4)
    if scheme == "fp8":
        one, two = (torch.tensor(prompt_logprobs(results)) for results in (usual, shared))
        assert (one - two).abs().mean() < 0.2
        assert (one - two).abs().max() < 0.8


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_bf16_scales_are_converted_to_fp32(scheme: str, tmp_path: Path) -> None:
    """Kernels take no others."""
    largest = {"int8": 127, "fp8": 448}[scheme]
    model = lively("llama")
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.down.weight").fill_(largest / 1024)
    folder = save_rounded(model, scheme, tmp_path / "quantized")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("blocks.0.mlp.down.scale").dtype == torch.bfloat16
    stored, one = QuantizedWeights(folder), load_quantized(folder)
    for layer in quantized_layers(one):
        assert stored.layer(layer.label).scale.dtype == layer.scale.dtype
        assert torch.equal(stored.layer(layer.label).scale, layer.scale)


@pytest.mark.slow
def test_damaged_folder_is_rejected(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "quantized", "int4", "llama")
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it is damaged, or from another model"):
        LLM(folder, tp=2, **SMALL)


# --- adapters ---------------------------------------------------------------------------------------------


def test_adapter_load_is_atomic_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that cannot read one is an error for the caller; all go on with those that came before, and after.

    The engine is a batch-invariant one: whoever runs beside a request, its bits are the same.
    """
    reference_model("llama").save_pretrained(tmp_path / "llama")
    adapters = two_adapters("llama")
    folders = {name: made.save(tmp_path / name) for name, made in adapters.items() if name and made}
    spec = {"device": "cpu", "dtype": "fp32", "block": 4, "batch_invariant": True, "prefix_cache": False}
    with LLM(tmp_path / "llama", tp=2, **spec) as llm:
        runner = runner_of(llm)
        hold, weights = runner.load_adapter, folders["second"] / "adapter_model.safetensors"

        def hold_and_hide(name: str, folder: Path) -> None:
            hold(name, folder)
            weights.rename(weights.with_suffix(".hidden"))

        llm.add_adapter("first", folders["first"])
        monkeypatch.setattr(runner, "load_adapter", hold_and_hide)
        with pytest.raises(LMWorksError, match=r"rank 1: .*second/adapter_model\.safetensors: no such file"):
            llm.add_adapter("second", folders["second"])
        monkeypatch.undo()
        (missing, found) = llm.generate(
            [[5, 6, 7]] * 2, [SamplingParams(temperature=0, max_tokens=6, adapter=name) for name in ("second", "first")]
        )
        assert missing.error == "adapter 'second' is not loaded; known: first"
        assert found.token_ids == greedy_of(merged("llama", adapters["first"]), [5, 6, 7], 6)
        weights.with_suffix(".hidden").rename(weights)
        llm.add_adapter("second", folders["second"])
        all_at_once("llama", adapters, llm.native, 1e-5)
        refuse_other_bits(llm, [None, "first", "second", "first"])


def adapter_for(spec: ModelSpec, seed: int) -> Made:
    """On all layers of a network, in the names of Llama or of GPT-2."""
    hidden, ffn, q, kv = spec.hidden, spec.ffn, spec.q_dim, spec.kv_dim
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    where = "model.layers"
    if spec.mlp == "gelu":
        where = "transformer.h"
        shapes = {"attn.c_attn": (q + 2 * kv, hidden), "attn.c_proj": (hidden, q)}
        shapes |= {"mlp.c_fc": (ffn, hidden), "mlp.c_proj": (hidden, ffn)}
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        f"{where}.{layer}.{name}": (torch.randn(3, into, generator=draw) / 5, torch.randn(out, 3, generator=draw) / 5)
        for layer in range(spec.layers)
        for name, (out, into) in shapes.items()
    }
    return Made({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}, pairs)


def test_failed_adapter_is_unloaded_on_all_ranks() -> None:
    class RecordingExecutor(Executor):
        def __init__(self, answers: list[str | None]) -> None:
            self.tp, self.sent, self.replies = 1 + len(answers), [], {}
            for rank, answer in enumerate(answers, start=1):
                self.replies[rank] = mock.Mock(answers=SimpleQueue())
                self.replies[rank].answers.put(answer)

        def send(self, rank: int, message: Any) -> None:
            self.sent.append((rank, type(message).__name__))

    lead = RecordingExecutor([None, "no room", None])
    with pytest.raises(LMWorksError, match="rank 2: no room"):
        lead.add_adapter("mine", Path("adapters/mine"))
    asked = [(rank, "AddAdapter") for rank in (1, 2, 3)]
    assert lead.sent == [*asked, (1, "RemoveAdapter"), (3, "RemoveAdapter")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "scheme", "ranks"),
    [
        ("llama", "", 4),
        ("one key head", "", 2),
        ("gpt2", "", 2),
        ("llama", "int4", 2),
        ("one key head", "int8", 4),
        ("gpt2", "int4", 2),
    ],
)
def test_adapters_with_row_parallel_layers(shape: str, scheme: str, ranks: int, tmp_path: Path) -> None:
    """Two of them and none in a batch, as one rank: beside plain and quantized layers, with biases after the sum."""
    model = lively(shape)
    made = {name: adapter_for(model.spec, seed).save(tmp_path / name) for seed, name in enumerate(("a", "b"))}
    if scheme:
        make_folder(tmp_path / "model", scheme, shape)
    else:
        model.save_hf(tmp_path / "model")
    results = []
    for tp in (1, ranks):
        with LLM(tmp_path / "model", tp=tp, **SMALL) as llm:
            for name, folder in made.items():
                llm.add_adapter(name, folder)
            results.append(answered(llm, ["a", None, "b", "a"]))
            plain = answered(llm)
    refuse_differences(*results, close=1e-4)
    assert results[1][0].token_ids != plain[0].token_ids
    assert results[1][1].token_ids == plain[1].token_ids


# --- batch-invariant --------------------------------------------------------------------------------------


def refuse_other_bits(llm: LLM, adapters: Sequence[str | None] = (None,) * len(PROMPTS)) -> None:
    """Every prompt alone, and all together."""
    together = answered(llm, adapters)
    for place, result in enumerate(together):
        (alone,) = answered(llm, adapters[place : place + 1], PROMPTS[place : place + 1])
        assert alone.logprobs == result.logprobs
        assert alone.prompt_logprobs == result.prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "tp"), [("", 4), ("int8", 4), ("int4", 2), ("fp8", 4), ("experts", 4)])
def test_batch_invariance(scheme: str, tp: int, tmp_path: Path) -> None:
    """Prompts are cut where a step is full: elsewhere among others than alone."""
    if scheme == "experts":
        lively("llama", experts=4, expert_ffn=32).save_hf(tmp_path / "model")
    elif scheme:
        make_folder(tmp_path / "model", scheme, "llama")
    else:
        lively("gpt2").save_hf(tmp_path / "model")
    with LLM(tmp_path / "model", tp=tp, batch_invariant=True, prefix_cache=False, **SMALL) as llm:
        refuse_other_bits(llm)


def test_batch_invariance_on_several_gpus_is_rejected() -> None:
    spec = EngineSpec(tp=2, batch_invariant=True)
    with pytest.raises(SpecError, match=r"batch_invariant = true with engine.tp = 2 is for CPUs.* use engine.tp = 1"):
        Executor("tiny", spec, None, 0, torch.device("cuda"))
