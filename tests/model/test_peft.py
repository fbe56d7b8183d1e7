"""Adapters in PEFT's format: a hand-made folder, and `peft` itself, which reads what we write and writes what we read
(`make test-trl`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmworks.model import GPT
from lmworks.model.lora import add_adapters, init_adapters
from lmworks.model.peft import PeftAdapter, read_peft, write_peft
from lmworks.spec import ModelSpec, SpecError
from lmworks.spec.lora import LoraSpec

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 16, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "gpt-2": {"norm": "layer", "bias": True, "positions": "learned", "mlp": "gelu", "tie_embeddings": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True, "targets": ["attention.q", "mlp.down"]},
    "dora": {"dora": True},
}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def adapted(lora: LoraSpec, **changes: Any) -> GPT:
    model = GPT(ModelSpec(**(SHAPE | changes)))
    add_adapters(model, lora, ("default",))
    init_adapters(model, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("lora_A"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def fill(model: GPT, adapter: PeftAdapter) -> GPT:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter.weight(name))
    return model


def test_a_hand_made_folder(tmp_path: Path) -> None:
    """One layer of a Llama, in PEFT's names."""
    down, up = torch.randn(2, 48), torch.randn(32, 2)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["down_proj"]})
    )
    start = "base_model.model.model.layers.1.mlp.down_proj.lora"
    save_file({f"{start}_A.weight": down, f"{start}_B.weight": up}, tmp_path / "adapter_model.safetensors")
    spec = ModelSpec(**SHAPE)
    found = read_peft(tmp_path, spec)
    assert found.layers.keys() == {"blocks.1.mlp.down.weight"}
    layer = found.layers["blocks.1.mlp.down.weight"]
    assert layer.scale == 3.0 and torch.equal(layer.lora_A, down) and torch.equal(layer.lora_B, up)


@pytest.mark.parametrize("traits", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_written_is_read_back(traits: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2's q, k and v are one layer there: block-diagonal, of three times the rank."""
    lora = LoraSpec(rank=3, alpha=5.0, **options)
    model = adapted(lora, **traits)
    write_peft(tmp_path, model.spec, lora, weights(model), "base")
    found = read_peft(tmp_path, model.spec)
    expected, got = {}, {}
    own = dict(model.named_parameters())
    for name, layer in found.layers.items():
        prefix = f"{name.removesuffix('.weight')}.adapters.default."
        if f"{prefix}lora_A" in own:
            expected[name] = lora.scale * own[f"{prefix}lora_B"].detach() @ own[f"{prefix}lora_A"].detach()
        else:  # k and v beside q, which alone is adapted
            expected[name] = torch.zeros(own[name].shape)
        got[name] = layer.scale * layer.lora_B @ layer.lora_A
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert (layer.magnitude is None) == (not lora.dora)
    if "kv_heads" in traits:
        found.check(model.spec, lora)
        torch.testing.assert_close(fill(adapted(lora, **traits), found)(TOKENS), model(TOKENS))


def test_an_adapter_of_other_options_is_refused(tmp_path: Path) -> None:
    model = adapted(lora := LoraSpec(rank=3, targets=["attention.q"]))
    write_peft(tmp_path, model.spec, lora, weights(model), "base")
    found = read_peft(tmp_path, model.spec)
    for changes, words in (
        ({"rank": 4}, r"lora\.rank = 4, but .* has 3"),
        ({"dora": True}, r"lora\.dora = true, but .* has false"),
        ({"alpha": 3.0}, r"lora\.alpha = 3: the scale would be 1, but .* 2"),
        ({"targets": ["attention.k"]}, r"lora\.targets: .* changes 'attention\.q'"),
        ({"targets": ["attention"]}, r"does not change 'attention\.k'"),
    ):
        with pytest.raises(SpecError, match=words):
            found.check(model.spec, lora.replace(**{"alpha": 6.0, **changes}))


def test_names_of_targets_are_short_where_they_can_be(tmp_path: Path) -> None:
    for traits, targets, expected in (
        (MODELS["llama"], ["attention.q", "mlp"], ["down_proj", "gate_proj", "q_proj", "up_proj"]),
        (MODELS["gpt-2"], ["mlp.down"], ["mlp.c_proj"]),  # attention's is a c_proj too
    ):
        lora = LoraSpec(rank=2, targets=targets)
        model = adapted(lora, **traits)
        write_peft(tmp_path, model.spec, lora, weights(model), "base")
        assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == expected


# --- peft itself -----------------------------------------------------------------------------------------------


@pytest.mark.trl
@pytest.mark.parametrize("traits", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_peft_reads_what_we_write(traits: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = LoraSpec(rank=3, alpha=5.0, **options)
    model = adapted(lora, **traits)
    GPT(model.spec).save_hf(tmp_path / "base")
    write_peft(tmp_path / "adapter", model.spec, lora, weights(model), str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
        merged = theirs.merge_and_unload()
        torch.testing.assert_close(model(TOKENS), merged(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.trl
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_we_read_what_peft_writes(options: dict[str, Any], tmp_path: Path) -> None:
    """Logits, and the gradients of every matrix."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraSpec(rank=3, alpha=5.0, **options)
    model = adapted(lora, **MODELS["llama"])
    GPT(model.spec).save_hf(tmp_path / "base")
    names = ["q_proj", "down_proj"] if lora.targets else "all-linear"
    config = LoraConfig(r=3, lora_alpha=5.0, use_rslora=lora.rslora, use_dora=lora.dora, target_modules=names)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "adapter")
    found = read_peft(tmp_path / "adapter", model.spec)
    found.check(model.spec, lora)
    fill(model, found)
    expected = theirs(TOKENS, labels=TOKENS)
    torch.testing.assert_close(model(TOKENS), expected.logits, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    _, loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    write_peft(tmp_path / "gradients", model.spec, lora, {n: p.grad for n, p in model.named_parameters()}, "")  # type: ignore[misc]
    mine = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(gradients) == len(mine)
    for name, gradient in gradients.items():
        key = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        torch.testing.assert_close(mine[key], gradient, rtol=1e-4, atol=1e-6, msg=name)
