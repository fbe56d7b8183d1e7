"""μP: against Microsoft's `mup` package (`make_mup_reference.py`) and the multipliers of published networks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.model import GPT
from lmworks.model.hf_layout import layout
from lmworks.parallel.single_rank import SingleRank
from lmworks.spec import ModelSpec, OptimSpec, PrecisionSpec, SpecError
from lmworks.spec.components import find
from lmworks.spec.hf_config import spec_of_config
from lmworks.spec.parametrization import initial_std
from lmworks.train.optim import make_optimizer, set_learning_rate

REFERENCE = json.loads(Path(__file__).with_name("mup_reference.json").read_text())
MUP: dict[str, Any] = {"parametrization": "mup", "mup_base_hidden": 32}
SMALL = {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 256, "vocab": 64, "context": 32}
TOKENS = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int, rate: float) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def rates(model: GPT, optim: OptimSpec) -> dict[str, tuple[float, float]]:
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, optim)
    by_id = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


# --- Microsoft's package --------------------------------------------------------------------------------------


def folded(spec: ModelSpec, name: str) -> float:
    """The multiplier of the package's forward pass that is part of this weight of ours."""
    if name == "norm.weight":
        return 32 / spec.hidden
    return math.sqrt(spec.mup_base_head_dim / spec.head_dim) if ".attention.q." in name else 1.0


@pytest.mark.parametrize("case", REFERENCE)
def test_init_and_rates_are_those_of_mup(case: str) -> None:
    """Initial variances, and learning rates and decays of MuAdamW and MuSGD, of every parameter."""
    there = REFERENCE[case]
    model = GPT(ModelSpec(**there["spec"], **MUP))
    names = {stored.name: stored.parts[0] for stored in layout(model.spec, "llama")}
    for theirs, std in there["std"].items():
        weight = find(model.spec, names[theirs])
        expected = std * folded(model.spec, names[theirs]) / (2 if weight.init == "residual" else 1)  # √(2 · 2 layers)
        assert initial_std(model.spec, weight) == pytest.approx(expected, rel=0.02), theirs
        parameter = model.get_parameter(names[theirs])
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.04), theirs
    for kind, power in (("adamw", 1), ("sgd", 2)):
        ours = rates(model, OptimSpec(optimizer=kind, lr=4e-3, weight_decay=0.1))
        for theirs, (lr, decay) in there[kind].items():
            multiplier = folded(model.spec, names[theirs]) ** power
            assert ours[names[theirs]] == pytest.approx((lr * multiplier, decay / multiplier)), (kind, theirs)


@pytest.mark.parametrize("case", REFERENCE)
def test_first_steps_are_those_of_mup(case: str) -> None:
    """A Llama of `transformers` with MuReadout, 1/d attention and MuAdamW has the same losses."""
    there = REFERENCE[case]
    model = GPT(ModelSpec(**there["spec"], **MUP), seed=1)
    optim = OptimSpec(lr=4e-3, weight_decay=0.1, eps=1e-20)
    optimizer = make_optimizer(SingleRank(model).shards(), model.spec, optim)
    assert train(model, optimizer, 6, 4e-3) == pytest.approx(there["losses"], abs=2e-5)


# --- the published multipliers, in width and depth --------------------------------------------------------------


def granite(spec: ModelSpec, weights: dict[str, Tensor], m: float, depth: float) -> Any:
    """A network of `transformers` that multiplies in its forward pass, with our weights freed of those factors."""
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        num_hidden_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        intermediate_size=spec.ffn,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tie_embeddings,
        attention_multiplier=math.sqrt(spec.mup_base_head_dim) / spec.head_dim,
        residual_multiplier=1 / depth,
        logits_scaling=m,  # a divisor
        embedding_multiplier=1.0,
        attn_implementation="eager",
    )
    model = GraniteForCausalLM(config)
    theirs = {stored.name: stored.gather(weights).detach().clone() for stored in layout(spec, "llama")}
    theirs["model.norm.weight"] *= m
    for name, value in theirs.items():
        if "o_proj" in name or "down_proj" in name:
            value *= depth
        if "q_proj" in name:
            value *= math.sqrt(spec.head_dim / spec.mup_base_head_dim)
    if spec.tie_embeddings:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    model.load_state_dict(theirs)
    return model


def complete_p(model: Any, lr: float, decay: float, eps: float, m: float, depth: float) -> torch.optim.AdamW:
    """AdamW by table 1 of CompleteP (arXiv:2505.01618) at α = 1: of embeddings, hidden weights, gains."""
    groups = []
    for name, parameter in model.named_parameters():
        inside, matrix = ".layers." in name, parameter.ndim == 2
        scaled = inside and matrix
        groups.append({
            "params": [parameter],
            "lr": lr / m if scaled else lr,
            "weight_decay": decay * m if scaled else decay if matrix else 0.0,
            "eps": eps / m / depth if inside else eps / m,
        })  # fmt: skip
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@pytest.mark.parametrize("tied", [False, True])
def test_multipliers_in_the_weights_are_those_of_the_forward_pass(tied: bool) -> None:
    """Equal logits and equal training, with an ε that matters, 4 × as wide (two heads, 4 × as wide) and 3 × as deep."""
    keys = {**SMALL, "layers": 6, "heads": 2, "kv_heads": 1, "tie_embeddings": tied}
    model = GPT(ModelSpec(**keys, **MUP, mup_base_layers=2, mup_base_head_dim=16), seed=3)
    lr, decay, eps = 5e-3, 0.1, 1e-4
    theirs = granite(model.spec, dict(model.named_parameters()), 4.0, 3.0)
    torch.testing.assert_close(model(TOKENS[:, :-1]), theirs(TOKENS[:, :-1]).logits, rtol=1e-4, atol=1e-5)
    optimizer = make_optimizer(
        SingleRank(model).shards(), model.spec, OptimSpec(lr=lr, weight_decay=decay, eps=eps, beta2=0.95)
    )
    losses = train(model, optimizer, 8, lr)
    reference, expected = complete_p(theirs, lr, decay, eps, 4.0, 3.0), []
    for _ in range(8):
        logits = theirs(TOKENS[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        reference.zero_grad()
        loss.backward()
        reference.step()
        expected.append(float(loss.detach()))
    assert expected[0] - expected[-1] > 0.3
    assert losses == pytest.approx(expected, abs=2e-5)


def test_the_16_bit_optimizer_has_the_same_rates() -> None:
    """With fp32 masters below bf16 weights it follows PyTorch's AdamW, group by group."""
    spec = ModelSpec(**SMALL, **MUP, mup_base_layers=1)
    moved = []
    for precision, dtype in ((PrecisionSpec(), torch.float32), (PrecisionSpec(dtype="bf16", weights="bf16"), None)):
        model = GPT(spec).to(dtype or torch.bfloat16)
        before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        optimizer = make_optimizer(SingleRank(model).shards(), spec, OptimSpec(weight_decay=0.1), precision)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_learning_rate(optimizer, 0.25)
        optimizer.step()
        moved.append({name: float((p.detach().float() - before[name]).mean()) for name, p in model.named_parameters()})
    for name, amount in moved[0].items():
        assert moved[1][name] == pytest.approx(amount, rel=0.02), name
    assert moved[0]["blocks.0.mlp.down.weight"] == pytest.approx(-0.25 / 8, rel=0.02)  # width 4, depth 2


# --- specs and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"experts": 4, "shared_experts": 1},
        {"bias": True, "norm": "layer", "positions": "learned", "mlp": "gelu", "tie_embeddings": True},
        {"qk_norm": True, "attention_sinks": True, "scalar_head": True},
        {"kv_lora_rank": 32, "q_lora_rank": 32, "kv_heads": 8},
    ],
)
def test_base_model_is_the_standard_one(keys: dict[str, Any]) -> None:
    standard = ModelSpec(**{**SMALL, "hidden": 32, **keys})
    base = standard.replace(**MUP)
    for (name, one), (_, other) in zip(GPT(standard).named_parameters(), GPT(base).named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert len(set(rates(GPT(base), OptimSpec()).values())) <= 2  # matrices and the rest


def test_experts_and_routers() -> None:
    """Experts are hidden weights; a router's outputs do not grow in number with the width, and are Θ(1)."""
    spec = ModelSpec(**{**SMALL, "layers": 4}, experts=4, shared_experts=1, **MUP, mup_base_layers=2)
    of = rates(GPT(spec), OptimSpec(lr=1.0, weight_decay=0.1))
    found = {name: of[f"blocks.3.mlp.{name}"] for name in ("router.weight", "up", "down", "shared.down.weight")}
    assert {name: rate for name, (rate, _) in found.items()} == {
        "router.weight": 1 / 4,
        "up": 1 / 4,
        "down": 1 / 8,
        "shared.down.weight": 1 / 8,
    }
    assert all(rate * decay == pytest.approx(0.1) for rate, decay in found.values())
    assert initial_std(spec, find(spec, "blocks.0.mlp.router.weight")) == pytest.approx(0.02 / 4)
    assert initial_std(spec, find(spec, "blocks.0.mlp.down")) == pytest.approx(0.02 / math.sqrt(4) / 2 / 2)


def test_hugging_face_export_has_the_same_logits(tmp_path: Path) -> None:
    """A plain Llama; the parametrization stays in config.json, so that training goes on as it was."""
    from transformers import AutoModelForCausalLM

    spec = ModelSpec(**{**SMALL, "layers": 4}, **MUP, mup_base_layers=2)
    model = GPT(spec)
    train(model, make_optimizer(SingleRank(model).shards(), spec, OptimSpec()), 2, 1e-2)
    model.save_hf(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    again = GPT.from_hf(tmp_path)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert rates(again, OptimSpec()) == rates(model, OptimSpec())
    config = json.loads((tmp_path / "config.json").read_text())
    assert spec_of_config(config).to_dict() == spec.to_dict() | {"head_dim": 16}


def test_a_standard_spec_is_written_as_before() -> None:
    assert not [key for key in ModelSpec().to_dict() if "mup" in key or key == "parametrization"]
    written = ModelSpec(**SMALL, **MUP).to_dict()
    assert (written["parametrization"], written["mup_base_layers"], written["mup_base_head_dim"]) == ("mup", 2, 16)
    assert ModelSpec.from_dict(written) == ModelSpec(**SMALL, **MUP)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"parametrization": "mup"}, "needs model.mup_base_hidden"),
        ({"mup_base_layers": 2}, "model.mup_base_layers needs model.parametrization = 'mup'"),
        ({"parametrization": "μP"}, "model.parametrization = 'μP'"),
        ({**MUP, "mup_base_hidden": -1}, "model.mup_base_hidden"),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelSpec(**SMALL, **keys)
