"""How initial weights and learning rates follow width and depth: `model.parametrization`.

μP (Tensor Programs V, arXiv:2203.03466, table 8) in width, CompleteP (arXiv:2505.01618, α = 1) in depth. With
m = hidden / mup_base_hidden and l = layers / mup_base_layers, relative to the base model:

    role                        initial std   learning rate (AdamW)   its gradient, and so Adam's ε
    embedding, head             1             1                       1/m
    hidden (width × width)      1/√m          1/m                     1/m
    vector (gain, bias, sink)   1             1                       1/m
    head_gain (of q_norm, …)    1             1                       1
    router                      1/m           1/m                     1
    last norm                   1/m           1/m                     1
    inside blocks                                                     × 1/l
    ends a residual branch      × 1/l         × 1/l                   × l
    scales attention scores     × s           × s                     × 1/s     s = √(mup_base_head_dim / head_dim)

The published rules multiply in the forward pass: logits by 1/m, what a branch adds by 1/l, scores by 1/d in place of
1/√d. Adam's update does not change when a multiplier θ of a weight is moved into it (initial value × θ, learning rate
× θ, gradient and ε ÷ θ), so here each one is part of a weight: of the last norm, of the projections back into the
stream, of the queries. The network computes what it always does, and nothing that runs it (engine, kernels, layouts,
quantization, Hugging Face export) has to know.

SGD's learning rate is Adam's divided by the scale of the gradient. The decay per step, lr × weight_decay, is the same
for every weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import components
from .components import Role, Weight
from .errors import SpecError
from .lora import adapter_of

if TYPE_CHECKING:
    from .model import ModelSpec


@dataclass(frozen=True)
class Scales:
    """Of one weight, relative to the base model."""

    init: float = 1.0  # of its initial values
    lr: float = 1.0  # of its learning rate under Adam
    grad: float = 1.0  # of its gradient

    def learning_rate(self, optimizer: str) -> float:
        return self.lr / self.grad if optimizer == "sgd" else self.lr


def scales(m: ModelSpec, weight: Weight) -> Scales:
    if m.parametrization == "standard":
        return Scales()
    width, depth = m.hidden / m.mup_base_hidden, m.layers / m.mup_base_layers
    by_role: dict[Role, tuple[float, float, float]] = {
        "embedding": (1, 1, 1 / width),
        "head": (1, 1, 1 / width),
        "hidden": (1 / math.sqrt(width), 1 / width, 1 / width),
        "vector": (1, 1, 1 / width),
        "head_gain": (1, 1, 1),
        "router": (1 / width, 1 / width, 1),
        "last_norm": (1 / width, 1 / width, 1),
    }
    init, lr, grad = by_role[weight.role]
    if weight.role not in ("embedding", "head", "last_norm"):
        grad /= depth
    folded = 1 / depth if weight.ends_branch else 1.0  # a multiplier that is part of the weight
    if weight.scales_scores:
        folded *= math.sqrt(m.mup_base_head_dim / m.head_dim)
    return Scales(init * folded, lr * folded, grad / folded)


def scales_by_name(m: ModelSpec, name: str) -> Scales:
    """Of a parameter of the network; adapters, and their scalar heads, have none."""
    plain = m.parametrization == "standard" or adapter_of(name)
    return Scales() if plain else scales(m, components.find(m, name))


def initial_std(m: ModelSpec, weight: Weight) -> float:
    """The standard deviation of its initial values; 1 is what a gain starts at."""
    base_hidden, base_layers = m.mup_base_hidden or m.hidden, m.mup_base_layers or m.layers
    std = m.init_std
    if weight.init == "residual":
        std /= math.sqrt(2 * base_layers)
    elif weight.init == "score":
        std = 1 / math.sqrt(base_hidden + 1)
    elif weight.init in ("ones", "zeros"):
        std = float(weight.init == "ones")
    return std * scales(m, weight).init


GROWS_WITH_HIDDEN = ("heads", "kv_heads", "ffn", "expert_ffn", "kv_lora_rank", "q_lora_rank")


def resized(m: ModelSpec, hidden: int, layers: int) -> ModelSpec:
    """The same model in another width and depth: heads keep their width, and all other widths their proportion."""
    changes: dict[str, int] = {"hidden": hidden, "layers": layers, "head_dim": m.head_dim}
    for key in GROWS_WITH_HIDDEN:
        value = getattr(m, key) * hidden / m.hidden
        if "heads" in key and value != int(value):
            raise SpecError(
                f"hidden = {hidden} does not keep the proportions of a model with hidden = {m.hidden}, heads = "
                f"{m.heads} and kv_heads = {m.kv_heads}: it would have {value:g} {key}"
            )
        changes[key] = round(value)
    return m.replace(**changes)
