"""Low-rank adapters over one network: the formula in plain torch, several adapters, recomputation, merging."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.model import GPT
from lmworks.model.lora import add_adapters, init_adapters, merge_adapter, use_adapter
from lmworks.model.moe import update_balance
from lmworks.spec import ModelSpec, RunSpec, SpecError, components
from lmworks.spec.lora import LoraSpec, block_adapter_weights

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 16, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"kv_heads": 2, "qkv_bias": True},
    "latent": {"kv_lora_rank": 12, "q_lora_rank": 16, "head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6},
    "experts": {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1},
    "gpt-2": {"norm": "layer", "bias": True, "positions": "learned", "mlp": "gelu", "tie_embeddings": True},
}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def adapted(lora: LoraSpec, names: tuple[str, ...] = ("default",), **changes: Any) -> GPT:
    """A model whose adapters differ from their start, where they change nothing."""
    model = GPT(ModelSpec(**(SHAPE | changes)))
    add_adapters(model, lora, names)
    init_adapters(model, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("lora_A"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def changed_weights(model: GPT, adapter: str, lora: LoraSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fresh leaves of an adapter, and the plain network's weights as functions of them: W as the papers change it."""
    own = dict(model.named_parameters())
    leaves = {name: p.detach().clone().requires_grad_() for name, p in own.items() if f".{adapter}." in name}
    weights = {name: p.detach() for name, p in own.items() if not p.requires_grad}
    for linear in components.linears(model.spec):
        for layer in range(model.spec.layers):
            name = f"blocks.{layer}.{linear.name}"
            start = f"{name}.adapters.{adapter}."
            if f"{start}lora_A" not in leaves:
                continue
            base, down, up = weights[f"{name}.weight"], leaves[f"{start}lora_A"], leaves[f"{start}lora_B"]
            changed = base + lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank) * up @ down
            if lora.dora:
                norm = changed.norm(dim=1, keepdim=True).detach()
                changed = leaves[f"{start}magnitude"].unsqueeze(1) * changed / norm
            weights[f"{name}.weight"] = changed
    return leaves, weights


@pytest.mark.parametrize("traits", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", [{}, {"rslora": True, "targets": ["attention"]}, {"dora": True}], ids=str)
def test_loss_and_gradients_are_those_of_changed_weights(traits: dict[str, Any], options: dict[str, Any]) -> None:
    lora = LoraSpec(rank=3, alpha=5.0, **options)
    model = adapted(lora, **traits)
    leaves, weights = changed_weights(model, "default", lora)
    expected = torch.func.functional_call(GPT(model.spec), weights, (TOKENS,))
    logits = model(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    F.cross_entropy(expected.flatten(0, 1), TOKENS.flatten()).backward()
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == leaves.keys()  # frozen weights have none
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_fresh_adapter_changes_nothing() -> None:
    model = GPT(ModelSpec(**SHAPE))
    expected = model(TOKENS)
    add_adapters(model, LoraSpec(rank=3, dora=True), ("default",))
    init_adapters(model, seed=0)
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    down = model.blocks["0"].attention.q.adapters["default"].lora_A  # type: ignore[union-attr, index]
    bound = 1 / math.sqrt(32)  # Kaiming's uniform with a = √5, as PEFT and nn.Linear start
    assert 0.9 * bound < float(down.detach().abs().max()) <= bound


def test_names_and_shapes_are_those_of_the_description() -> None:
    """What the planner counts."""
    for traits in MODELS.values():
        lora, names = LoraSpec(rank=3, dora=True), ("policy", "critic")
        model = adapted(lora, names, **traits)
        planned = [(w.name, w.shape) for w in block_adapter_weights(model.spec, lora, names)]
        found = [(name, tuple(p.shape)) for name, p in model.blocks["1"].named_parameters() if p.requires_grad]
        assert found == planned


def test_several_adapters_over_one_base() -> None:
    model = adapted(LoraSpec(rank=2), ("policy", "critic"))
    base = GPT(model.spec)(TOKENS)
    policy = model(TOKENS)
    with use_adapter(model, "critic"):
        critic = model(TOKENS)
        with use_adapter(model, None):
            torch.testing.assert_close(model(TOKENS), base, rtol=0, atol=0)
        torch.testing.assert_close(model(TOKENS), critic, rtol=0, atol=0)
    assert min(float((one - other).detach().abs().max()) for one, other in ((policy, critic), (policy, base))) > 0.01
    torch.testing.assert_close(model(TOKENS), policy, rtol=0, atol=0)
    with pytest.raises(SpecError, match=r"lora\.rank"), use_adapter(GPT(model.spec), "policy"):
        pass


@pytest.mark.parametrize("policy", ["full", "selective", "mlp"])
def test_recomputation_uses_the_adapter_of_its_forward_pass(policy: str) -> None:
    """The backward pass of a critic runs when the policy is active again."""
    gradients = []
    for recompute in ("none", policy):
        model = adapted(LoraSpec(rank=2, dora=True), ("policy", "critic"))
        model.recompute = recompute
        with use_adapter(model, "critic"):
            _, loss = model(TOKENS, TOKENS)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and all(".critic." in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("dora", [False, True])
def test_a_merged_adapter_is_a_plain_network(dora: bool) -> None:
    model = adapted(LoraSpec(rank=2, dora=dora), ("policy", "critic"))
    with use_adapter(model, "critic"):
        expected = model(TOKENS)
    merge_adapter(model, "critic")
    assert model.state_dict().keys() == GPT(model.spec).state_dict().keys()
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_router_keeps_its_choice_bias() -> None:
    model = adapted(LoraSpec(rank=2), experts=4, top_k=2, expert_ffn=16, balance_bias=0.1)
    _, loss = model(TOKENS, TOKENS)
    loss.backward()
    update_balance(model)
    assert not any(bool(buffer.any()) for buffer in model.buffers())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"lora": {"rank": 4, "targets": ["attention.w"]}}, "attention.q, attention.k"),
        ({"lora": {"rank": 4, "targets": ["mlp.up"]}, "model": MODELS["experts"]}, "routed experts have no adapters"),
        ({"lora": {"rank": 4}, "precision": {"dtype": "fp8"}}, "use 'bf16'"),
        ({"lora": {"rank": 4}, "parallel": {"strategy": "fsdp1", "dp": 2}}, "use 'fsdp2'"),
        (
            {"lora": {"rank": 4}, "parallel": {"engine": "deepspeed", "strategy": "zero", "zero": 1}},
            "parallel.engine = 'native'",
        ),
        ({"lora": {"dora": True}}, "lora.dora needs adapters: set lora.rank"),
    ],
)
def test_what_cannot_be_adapted_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        RunSpec.from_dict({"model": {**SHAPE, "context": 256, **table.pop("model", {})}, **table})
    assert words in str(error.value)
