"""Quantized networks: what they compute, what calibration gains, what the gate refuses, and folders."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmworks import GPT, ModelSpec
from lmworks.data import TokenData
from lmworks.engine.quantization.calibrated_rounding import BlockRunner, InputStats, calibrated, gptq, quantize_layers
from lmworks.engine.quantization.drift import DriftMonitor, Inputs
from lmworks.engine.quantization.folder import (
    is_quantized,
    load_quantized,
    save_quantized,
)
from lmworks.engine.quantization.quantize import Calibration, QuantizationRefused, quantize
from lmworks.engine.quantization.quantized_model import (
    SCHEMES,
    QuantExperts,
    QuantLinear,
    apply_quantization,
    linears,
    merge_layers,
    quantized_layers,
    round_to_nearest,
    served_bytes,
    set_batch_invariant,
)
from lmworks.kernels.inference.quantized import int4_round
from lmworks.loading import hf_tokenizer
from lmworks.model.gpt import Linear
from lmworks.model.moe import MoE, moe_layers
from lmworks.spec import CheckpointError, DataError, LMWorksError, SpecError
from tiny import differences, flip_a_bit, make_spec, train

SHAPES = {
    "llama": {},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "qkv_bias": True, "kv_heads": 4},
    "qwen": {"qk_norm": True, "tie_embeddings": True},
    "deepseek": {"kv_lora_rank": 32, "q_lora_rank": 32, "rope_head_dim": 8, "kv_heads": 4},
}


def small(shape: str = "llama") -> GPT:
    spec = ModelSpec.from_preset("tiny", **{"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, **SHAPES[shape]})
    model = GPT(spec, seed=3).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def some_tokens(model: GPT, rows: int = 2, seq: int = 20) -> Tensor:
    return torch.randint(0, model.spec.vocab, (rows, seq), generator=torch.Generator().manual_seed(0))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# --- what a quantized network computes --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_model_equals_dequantized_model(scheme: str, shape: str) -> None:
    """fp8 rounds activations too: there a layer in front of each linear does it, with torch's own cast."""
    model = small(shape)
    plain = copy.deepcopy(model)
    apply_quantization(model, scheme)
    for name, layer in linears(plain):
        new = model.get_submodule(name)
        assert isinstance(new, QuantLinear)
        kind = "int8" if name == "head" and scheme == "int4" else scheme
        assert new.scheme.name == kind
        assert 0 < off(new.dequantized(), layer.weight) < {"int8": 0.01, "int4": 0.2, "fp8": 0.05}[kind]
        layer.weight.copy_(new.dequantized())
        if scheme == "fp8":
            layer.register_forward_pre_hook(lambda _layer, inputs: fp8_and_back(inputs[0]))
    if plain.head is not None:
        plain.project = lambda states, _weight: plain.head(states)  # with the hook of fp8
    tokens = some_tokens(model)
    assert off(model(tokens), plain(tokens)) < 1e-5
    kept = {name: parameter for name, parameter in model.named_parameters() if "bias" not in name}
    assert all("embed" in name or "norm" in name or "positions" in name for name in kept)
    assert (model.head is None) == model.spec.tie_embeddings
    assert not differences(kept, {name: dict(plain.named_parameters())[name] for name in kept})


def fp8_and_back(x: Tensor) -> tuple[Tensor]:
    scale = x.abs().amax(dim=-1, keepdim=True) / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale,)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_layers_merge_along_their_outputs(scheme: str, shape: str) -> None:
    attention = apply_quantization(small(shape), scheme).layers()[1].attention
    parts = [attention.q, attention.k, attention.v]
    whole = merge_layers(parts)
    assert whole is not None
    assert whole.weight.dtype == SCHEMES[scheme].stored
    assert whole.label == "blocks.1.attention.q"
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], dim=-1))
    assert merge_layers([attention.q, small().layers()[0].attention.k]) is None
    other = "fp8" if scheme == "int8" else "int8"
    assert merge_layers([attention.q, apply_quantization(small(shape), other).layers()[1].attention.k]) is None


def test_deepcopy_copies_head() -> None:
    model = apply_quantization(small(), "int4")
    copied, tokens = copy.deepcopy(model), some_tokens(model)
    wanted = model(tokens)
    assert isinstance(model.head, QuantLinear)
    model.head.scale.zero_()
    assert not model(tokens).any()
    assert torch.equal(copied(tokens), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chunked_loss_equals_full_loss(scheme: str) -> None:
    """The weight of a head means nothing without its scales."""
    model = apply_quantization(small(), scheme)
    tokens, targets = some_tokens(model), some_tokens(model).roll(1)
    _, wanted = model(tokens, targets)
    logits, found = model(tokens, targets, keep_logits=False)
    assert logits is None
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cast_keeps_quantized_format(scheme: str) -> None:
    model = apply_quantization(small("gpt2"), scheme)
    before = copy.deepcopy(model.layers()[0].mlp.up)
    after = model.bfloat16().layers()[0].mlp.up
    assert after.bias.dtype == torch.bfloat16
    for name in ("weight", "scale"):
        assert getattr(after, name).dtype == getattr(before, name).dtype
    assert torch.equal(after.dequantized(), before.dequantized())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariant_layer(scheme: str) -> None:
    model = apply_quantization(small(), scheme)
    layer = model.layers()[0].mlp.down
    x = torch.randn(33, layer.in_features, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    set_batch_invariant(model)
    whole = layer(x)
    assert off(whole, before) < 1e-5
    for end in (1, 2, 8, 32):
        assert torch.equal(layer(x[:end]), whole[:end])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_invariant_layer_in_half_precision(scheme: str, dtype: torch.dtype) -> None:
    """Before they are scaled, sums of 8-bit numbers are more than fp16 holds."""
    model = apply_quantization(small(), scheme)
    layer = model.layers()[0].mlp.down
    x = 30 * torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = layer(x)
    set_batch_invariant(model)
    assert off(layer(x), wanted) < 2 * torch.finfo(dtype).eps


def test_unquantizable_models_are_rejected() -> None:
    with pytest.raises(SpecError, match=r"int9.*did you mean.*int8|int9.*known"):
        apply_quantization(small(), "int9")
    with pytest.raises(SpecError, match="quantized already"):
        apply_quantization(apply_quantization(small(), "int8"), "int4")
    with pytest.raises(SpecError, match="'int4' does not support networks with experts; use int8 or fp8"):
        apply_quantization(mixture(), "int4")
    with pytest.raises(SpecError, match="multiple of 32, but one has 48"):
        apply_quantization(GPT(ModelSpec.from_preset("tiny", hidden=48, heads=4, kv_heads=2)), "int4")


def mixture() -> GPT:
    traits = {"experts": 4, "top_k": 2, "expert_ffn": 48, "shared_experts": 1, "balance_bias": 0.01}
    return GPT(ModelSpec.from_preset("tiny", layers=2, hidden=64, heads=4, kv_heads=2, init_std=0.2, **traits), seed=3)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_quantized_experts_equal_dequantized_experts(scheme: str) -> None:
    """fp8 rounds what the products read, too."""
    model = mixture().requires_grad_(False).eval()
    plain = copy.deepcopy(model)
    bytes_before = served_bytes(model)
    apply_quantization(model, scheme)
    assert served_bytes(model) < 0.7 * bytes_before  # the embedding of 257 rows stays
    for name, layer in linears(plain):
        layer.weight.copy_(model.get_submodule(name).dequantized())
        if scheme == "fp8":
            layer.register_forward_pre_hook(lambda _layer, inputs: fp8_and_back(inputs[0]))
    plain.project = lambda states, _weight: plain.head(states)

    def rounded(x: Tensor) -> Tensor:
        return fp8_and_back(x)[0] if scheme == "fp8" else x

    def dispatch(moe: MoE, rows: Tensor, counts: Tensor) -> Tensor:
        results = []
        for expert, run in enumerate(rows.split(counts.tolist())):
            inner = F.silu(rounded(run) @ moe.gate[expert].t()) * (rounded(run) @ moe.up[expert].t())
            results.append(rounded(inner) @ moe.down[expert].t())
        return torch.cat(results)

    for mine, theirs in zip(moe_layers(plain), moe_layers(model), strict=True):
        for name in ("gate", "up", "down"):
            kept = getattr(theirs, name)
            assert isinstance(kept, QuantExperts)
            wide = kept.weight.float() * kept.scale.unsqueeze(-1)
            assert 0 < off(wide, getattr(mine, name)) < {"int8": 0.01, "fp8": 0.05}[scheme]
            getattr(mine, name).copy_(wide)
        mine.dispatch = dispatch
    tokens = some_tokens(model)
    assert off(model(tokens), plain(tokens)) < 1e-5
    model.bfloat16()
    assert moe_layers(model)[0].down.weight.dtype == SCHEMES[scheme].stored
    assert moe_layers(model)[0].down.scale.dtype == torch.float32


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_quantized_mixture_is_written_read_and_served(scheme: str, tmp_path: Path) -> None:
    model = mixture().requires_grad_(False).eval()
    text = Calibration.of(torch.randint(0, 257, (2000,), generator=torch.Generator().manual_seed(1)), 16, 257, "noise")
    tokens = some_tokens(model)
    before = model(tokens)
    report = quantize(model, scheme, text, limit=math.inf)
    errors = {layer.name: layer.error for layer in report.layers}
    assert [name for name in errors if name.endswith("experts")] == [f"blocks.{i}.mlp.experts" for i in range(2)]
    assert 0 < errors["blocks.0.mlp.experts"] < {"int8": 0.02, "fp8": 0.1}[scheme]
    assert off(model(tokens), before) < 0.2
    save_quantized(model, tmp_path / "out", report, eos=[256], tokenizer="bytes")
    assert not differences(load_quantized(tmp_path / "out").state_dict(), model.state_dict())

    from lmworks import LLM, SamplingParams

    prompts = [list(text.encode()) for text in ("def", "return x if")]
    llm = LLM(tmp_path / "out", device="cpu", blocks=64, context=32)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False)
    llm.close()
    for prompt, result in zip(prompts, results, strict=True):
        given = torch.tensor([prompt])
        for _ in range(8):
            given = torch.cat((given, model(given)[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
        assert result.token_ids == given[0, len(prompt) :].tolist()


# --- calibrated rounding ----------------------------------------------------------------------------------


def test_uncorrelated_inputs_give_plain_rounding() -> None:
    """With a diagonal H there is nothing to compensate: every weight goes to its nearest level."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    q, scale = gptq(weight, torch.eye(64), 16)
    assert torch.equal(q, int4_round(weight, scale))


def test_calibration_improves_correlated_inputs() -> None:
    """Features 0 … 127 and 128 … 255 move together: what the first lose is made up for by the second, too."""
    draw = torch.Generator().manual_seed(0)
    layer = Linear(256, 96)
    layer.weight = torch.nn.Parameter(torch.randn(96, 256, generator=draw), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.randn(96, generator=draw), requires_grad=False)
    mix = torch.randn(100, 128, generator=draw)  # 128 features that are mixtures of 100, some of them large
    mix[:, ::9] *= 8
    mix = torch.cat((mix, mix + 0.1 * torch.randn(100, 128, generator=draw)), dim=1)
    inputs, others = (torch.randn(600, 100, generator=draw) @ mix for _ in "ab")
    inputs[:, 5] = others[:, 5] = 0  # never seen: the damping keeps H invertible
    seen = InputStats()
    seen.update(inputs, True, True)
    scheme = SCHEMES["int4"]
    wanted = F.linear(others, layer.weight)
    plain, better = (
        new(others) - layer.bias for new in (round_to_nearest(scheme, layer), calibrated(scheme, layer, seen, 128))
    )
    assert off(plain, wanted) > 0.05
    assert off(better, wanted) < 0.4 * off(plain, wanted)


def test_error_is_measured_on_held_out_inputs() -> None:
    model = small()
    block = model.layers()[0]
    states = [torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    with torch.no_grad():
        seen = BlockRunner(model, block).collect_stats(
            states, {"mlp.down": block.mlp.down, "attention.q": block.attention.q}, True
        )
    rows = [block.attention_norm(x).flatten(0, 1) for x in states]
    torch.testing.assert_close(seen["attention.q"].rows(), rows[3])
    fitted = torch.cat(rows[:3])
    torch.testing.assert_close(seen["attention.q"].second_moment, fitted.t() @ fitted)
    assert not block.mlp.down._forward_pre_hooks


def test_calibration_uses_quantized_earlier_blocks() -> None:
    model = small()
    batches = [some_tokens(model), some_tokens(model, rows=3)]
    reports = {layer.name: layer for layer in quantize_layers(model, SCHEMES["int4"], batches, 128)}
    for name in ("blocks.1.attention.q", "head"):
        inputs: list[Tensor] = []
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _layer, given, seen=inputs: seen.append(given[0].flatten()))
        for tokens in batches:
            model(tokens)
        assert reports[name].amax == pytest.approx(float(torch.cat(inputs).abs().max()), rel=1e-5)
        assert reports[name].rms == pytest.approx(float(torch.cat(inputs).square().mean().sqrt()), rel=1e-5)
    assert reports["blocks.1.mlp.up"].group == 32
    assert reports["head"].group == 0


# --- a trained network through the pipeline ---------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> GPT:
    """It has to have learnt something: noise has the same perplexity whatever is done to its weights."""
    spec = make_spec(dataset, "model.hidden=64", "optim.steps=60", "data.global_batch=16", "data.micro_batch=16")
    return train(spec, tmp_path_factory.mktemp("quantize") / "run").model


@pytest.fixture(scope="module")
def text(dataset: Path, trained: GPT) -> Calibration:
    data = TokenData.open(dataset, "val")
    return Calibration.of(data.read(0, min(4000, len(data))).astype("int64"), 32, trained.spec.vocab, "held-out")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_report_has_loss_and_size(scheme: str, trained: GPT, text: Calibration) -> None:
    model = copy.deepcopy(trained)
    report = quantize(model, scheme, text)
    windows = torch.cat(text.measure)
    for network, loss in ((trained, report.loss_before), (model, report.loss_after)):
        with torch.no_grad():
            _, wanted = network(windows[:, :-1], windows[:, 1:])
        assert loss == pytest.approx(float(wanted), rel=1e-5)
    assert report.passed
    assert math.exp(report.loss_after - report.loss_before) - 1 == pytest.approx(report.increase)
    assert [layer.name for layer in report.layers] == [name for name, _ in linears(trained)]
    assert report.bytes_after == served_bytes(model) < report.bytes_before == 2 * trained.spec.params
    errors = [layer.error for layer in report.layers]
    plain = [layer.rounded_error for layer in report.layers]
    assert all(0 < error < {"int8": 0.02, "int4": 0.2, "fp8": 0.1}[scheme] for error in errors)
    if scheme == "int4":  # on text that it was not fitted to
        assert sum(errors) < 0.8 * sum(plain)
    else:
        assert errors == plain


@pytest.mark.parametrize("broken", ["blocks.0.mlp.up", "head"])
def test_broken_scale_is_rejected_by_layer(broken: str, trained: GPT, text: Calibration) -> None:
    def damaged(name: str, layer: Linear, seen: InputStats) -> QuantLinear:
        new = round_to_nearest(SCHEMES["int8"], layer)
        if name == broken:
            new.scale[30:120] *= 40
        return new

    with pytest.raises(QuantizationRefused, match=rf"nothing was written. The worst layers: {broken}") as refused:
        quantize(copy.deepcopy(trained), "int8", text, make=damaged)
    assert refused.value.exit_code == 1
    assert refused.value.report.increase > 0.02

    def not_finite(name: str, layer: Linear, seen: InputStats) -> QuantLinear:
        new = round_to_nearest(SCHEMES["int8"], layer)
        if name == broken:
            new.scale[3] = math.inf
        return new

    with pytest.raises(QuantizationRefused, match=broken) as refused:
        quantize(copy.deepcopy(trained), "int8", text, limit=math.inf, make=not_finite)
    json.dumps(refused.value.report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nonfinite_model_is_rejected(scheme: str, trained: GPT, text: Calibration) -> None:
    model = copy.deepcopy(trained)
    model.layers()[0].mlp.up.weight.data[0, 0] = math.nan
    with pytest.raises(LMWorksError, match=r"the loss of the model as it is, on .*, is nan"):
        quantize(model, scheme, text, progress=lambda layer: pytest.fail("it began"))


def test_calibration_text_is_checked() -> None:
    with pytest.raises(DataError, match="100 tokens are too few"):
        Calibration.of(list(range(100)), 32, 256, "text.txt")
    with pytest.raises(DataError, match="token 300 is outside the model's vocabulary of 256"):
        Calibration.of([300] * 1000, 32, 256, "text.txt")
    one, other = (Calibration.of([last] + [1] * 999, 32, 256, "t") for last in (2, 3))
    assert one.fingerprint != other.fingerprint
    assert len(one.fit) >= 2
    windows = torch.cat([torch.cat(one.fit), torch.cat(one.measure)])
    assert windows.shape == (1000 // 33, 33)


# --- to disk and back -------------------------------------------------------------------------------------


@pytest.fixture(params=SCHEMES)
def folder(request: pytest.FixtureRequest, trained: GPT, text: Calibration, tmp_path: Path) -> tuple[GPT, Path]:
    model = copy.deepcopy(trained)
    out = tmp_path / "quantized"
    save_quantized(model, out, quantize(model, request.param, text), eos=[256], tokenizer="bytes")
    return model, out


def test_folder_round_trip_is_bitwise(folder: tuple[GPT, Path]) -> None:
    model, out = folder
    back = load_quantized(out)
    states = [
        {k: v.view(torch.uint8) if v.dtype.itemsize == 1 else v.float() for k, v in m.state_dict().items()}
        for m in (model, back)
    ]
    assert not differences(*states)
    assert [v.dtype for v in back.state_dict().values()] == [v.dtype for v in model.state_dict().values()]
    assert [layer.label for layer in quantized_layers(back)] == [name for name, _ in linears(GPT(model.spec))]
    tokens = some_tokens(model)
    assert torch.equal(back(tokens), model(tokens))
    half = load_quantized(out, dtype=torch.bfloat16)
    assert half.embed is not None and half.embed.weight.dtype == torch.bfloat16
    assert half.head_weight.dtype == model.head_weight.dtype
    assert off(half(tokens).float(), model(tokens)) < 0.1
    tokenizer = hf_tokenizer(out)
    assert tokenizer is not None
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    about = json.loads((out / "quantization.json").read_text())
    assert about["report"]["passed"]
    assert about["report"]["calibration_fingerprint"]


def test_bf16_weights_are_stored_in_bf16(text: Calibration, trained: GPT, tmp_path: Path) -> None:
    model = copy.deepcopy(trained).bfloat16().float()
    save_quantized(model, tmp_path / "q", quantize(model, "int8", text))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(load_quantized(tmp_path / "q").embed.weight, model.embed.weight)


@pytest.mark.parametrize("folder", ["int4"], indirect=True)
def test_damaged_and_foreign_folders_are_rejected(folder: tuple[GPT, Path], tmp_path: Path) -> None:
    model, out = folder
    original = {path.name: path.read_bytes() for path in out.iterdir()}

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_quantized(out)
        for name, content in original.items():
            (out / name).write_bytes(content)

    flip_a_bit(out / "model.safetensors")
    refused(r"model\.safetensors: it is damaged, or from another model")
    (out / "model.safetensors").unlink()
    refused("the file is missing")
    (out / "config.json").write_text(json.dumps({"model": ModelSpec.from_preset("tiny").to_dict()}))
    refused(r"config\.json: it is damaged, or from another model")
    about = json.loads(original["quantization.json"])
    (out / "quantization.json").write_text(json.dumps({**about, "scheme": "int8"}))
    refused(r"tensor 'blocks.0.attention.q.weight' is torch.int32|missing or too many|belongs there")
    (out / "quantization.json").write_text(json.dumps({**about, "groups": {}}))
    refused("no group that fits")
    for wrong in ({"groups": dict.fromkeys(about["groups"], 0)}, {"groups": {"head": "x"}}, {"vocab": None}):
        (out / "quantization.json").write_text(json.dumps({**about, **wrong}))
        refused("groups or vocab are not integers")
    (out / "quantization.json").write_text(json.dumps({**about, "scheme": ["int4"]}))
    refused("scheme .* is not known here")
    for version, said in (
        (1, "an earlier version wrote it.* quantize it again"),
        (99, "version 99, .* quantize the model"),
    ):
        (out / "quantization.json").write_text(json.dumps({**about, "version": version}))
        refused(said)
    (out / "quantization.json").unlink()
    assert not is_quantized(out)
    refused("not written by `lmworks quantize`")
    assert load_quantized(out) is not None
    mixed = load_file(out / "model.safetensors")
    del mixed["norm.weight"]
    save_file(mixed, out / "model.safetensors")
    from lmworks.engine.quantization.folder import load_tensors

    with pytest.raises(CheckpointError, match=r"the first is 'norm\.weight'"):
        load_tensors(model, out / "model.safetensors")


def test_foreign_output_folder_is_not_overwritten(trained: GPT, text: Calibration, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    model = copy.deepcopy(trained)
    report = quantize(model, "int8", text)
    with pytest.raises(SpecError, match="not empty and holds no quantized model"):
        save_quantized(model, tmp_path, report)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# --- drift ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["int8"], indirect=True)
def test_drift_is_detected_only_on_change(folder: tuple[GPT, Path], text: Calibration) -> None:
    _, out = folder
    model = load_quantized(out)
    assert not any(layer._forward_pre_hooks for layer in quantized_layers(model))  # off by default
    monitor = DriftMonitor.of_folder(model, out)
    with monitor, torch.no_grad():
        for batch in text.fit:
            model(batch[:, :-1])
    report = monitor.report()
    assert report.rows == sum(batch[:, :-1].numel() for batch in text.fit)
    for layer in report.layers:
        assert layer.rms_ratio == pytest.approx(1, abs=0.02)  # the layers before were not yet quantized, then
        assert layer.amax_ratio == pytest.approx(1, abs=0.1)
    assert report.drifted == []
    monitor.reset()
    model.layers()[0].mlp_norm.weight.mul_(5)
    with monitor, torch.no_grad():
        model(text.fit[0][:, :-1])
    assert "blocks.0.mlp.up" in monitor.report().drifted
    assert "blocks.0.attention.q" not in monitor.report().drifted
    assert not any(layer._forward_pre_hooks for layer in quantized_layers(model))


@pytest.mark.parametrize("folder", ["int8", "int4"], indirect=True)
def test_drift_of_served_model(folder: tuple[GPT, Path]) -> None:
    """Merged layers are known by their first part; every token that a step computes is seen once."""
    from lmworks import LLM, SamplingParams

    _, out = folder
    with LLM(out, device="cpu", blocks=64, context=32) as llm:
        monitor = llm.watch_drift()
        prompts = [list(text.encode()) for text in ("def", "return x if", "import self not y", "for x in")]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), progress=False)
        report = monitor.report()
        assert report.rows == llm.native.metrics.computed_tokens == sum(map(len, prompts)) + 4 * 9
        merged = ("attention.q", "attention.out", "mlp.gate", "mlp.down")
        names = {f"blocks.{layer}.{part}" for layer in range(llm.native.runner.model.spec.layers) for part in merged}
        assert {layer.name for layer in report.layers} == {*names, "head"}
        assert report.drifted == []
    with LLM("tiny") as llm, pytest.raises(SpecError, match="only a model that `lmworks quantize` made"):
        llm.watch_drift()


def test_drift_monitor_needs_calibration() -> None:
    with pytest.raises(SpecError, match="no quantized layer"):
        DriftMonitor(small(), {"blocks.0.mlp.up": Inputs(1, 1)})


# --- served ---------------------------------------------------------------------------------------------------


def test_engine_equals_plain_quantized_model(folder: tuple[GPT, Path]) -> None:
    """Merged, paged and batched it takes the tokens that the whole network, run anew for each, finds likeliest."""
    from lmworks import LLM, SamplingParams

    model, out = folder
    prompts = [list(text.encode()) for text in ("def", "return x if", "import self not y", "for x in")]
    llm = LLM(out, device="cpu", blocks=64, context=32)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), progress=False)
    llm.close()
    for prompt, result in zip(prompts, results, strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(10):
            tokens = torch.cat((tokens, model(tokens)[:, -1, :257].argmax(dim=-1, keepdim=True)), dim=1)
        assert result.token_ids == tokens[0, len(prompt) :].tolist()
