"""Writes mup_reference.json: a Llama of `transformers` under Microsoft's `mup` package, trained for a few steps.

    pip install --no-deps mup==1.0.0 && python tests/model/make_mup_reference.py

Of each case: the standard deviation that `mup.init.normal_` gives every parameter, learning rate and weight decay of
`MuAdamW` and of `MuSGD`, and the losses of the first steps of `MuAdamW` from the initial weights of our model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mup  # type: ignore[import-not-found]
import torch
from mup.layer import MuReadout  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM

from lmworks.model import GPT
from lmworks.model.hf_layout import layout
from lmworks.spec import ModelSpec

BASE = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 64, "context": 32}
CASES = {
    "more heads": {**BASE, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 256},
    "wider heads": {**BASE, "hidden": 128, "ffn": 256, "mup_base_head_dim": 16},
}
LR, DECAY, EPS, STEPS = 4e-3, 0.1, 1e-20, 6  # mup does not scale ε: one that plays no part


def spec_of(keys: dict[str, Any]) -> ModelSpec:
    return ModelSpec(**keys, parametrization="mup", mup_base_hidden=BASE["hidden"])


def llama(keys: dict[str, Any]) -> Any:
    config = LlamaConfig(
        num_hidden_layers=keys["layers"],
        hidden_size=keys["hidden"],
        num_attention_heads=keys["heads"],
        num_key_value_heads=keys["kv_heads"],
        intermediate_size=keys["ffn"],
        vocab_size=keys["vocab"],
        max_position_embeddings=keys["context"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    model.lm_head = MuReadout(keys["hidden"], keys["vocab"], bias=False)
    return model


def reference(keys: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(keys)
    grown = {key: 2 * BASE[key] for key in ("hidden", "ffn")}
    by_count = keys["heads"] > BASE["heads"]
    delta = {**BASE, **grown, **({key: 2 * BASE[key] for key in ("heads", "kv_heads")} if by_count else {})}
    model = llama(keys)
    mup.set_base_shapes(model, llama(BASE), delta=llama(delta))
    torch.manual_seed(0)
    std = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            std[name] = float(mup.init.normal_(parameter, std=0.02).detach().std())
    head_dim, base_head_dim = spec.head_dim, BASE["hidden"] // BASE["heads"]
    for block in model.model.layers:
        block.self_attn.scaling = base_head_dim**0.5 / head_dim  # mup's 1/d, equal to 1/√d in the base model
    ours = dict(GPT(spec, seed=1).named_parameters())
    theirs = {stored.name: stored.gather(ours).detach().clone() for stored in layout(spec, "llama")}
    theirs["model.norm.weight"] *= spec.hidden / BASE["hidden"]  # MuReadout and `scaling` have these multipliers
    for name in theirs:
        if "q_proj" in name:
            theirs[name] *= (head_dim / base_head_dim) ** 0.5
    model.load_state_dict(theirs)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    sgd = mup.MuSGD([dict(group) for group in groups], lr=LR)
    adam = mup.MuAdamW([dict(group) for group in groups], lr=LR, betas=(0.9, 0.95), eps=EPS)
    tokens = torch.randint(0, keys["vocab"], (4, 33), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss))

    def rates(optimizer: Any) -> dict[str, list[float]]:
        return {named[id(p)]: [g["lr"], g["weight_decay"]] for g in optimizer.param_groups for p in g["params"]}

    return {"spec": keys, "std": std, "adamw": rates(adam), "sgd": rates(sgd), "losses": losses}


if __name__ == "__main__":
    found = {name: reference(keys) for name, keys in CASES.items()}
    Path(__file__).with_name("mup_reference.json").write_text(json.dumps(found, indent=1) + "\n")
