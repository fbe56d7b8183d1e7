"""The shape of a decoder-only language model, and what follows from it by arithmetic alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from . import components
from .errors import SpecError, did_you_mean
from .presets import PRESETS
from .schema import Section, merge, opt


@dataclass(frozen=True)
class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the context the model was first trained with."""

    section: ClassVar[str] = "model.rope_scaling"

    type: str = opt(
        "none", "stretching rule", choices=("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
    )
    factor: float = opt(1.0, "context is stretched by this factor", ge=1.0)
    original_context: int = opt(0, "context before stretching (0: model.context / factor)", ge=0)
    low_freq_factor: float = opt(1.0, "llama3: below this many turns a frequency is divided by factor", gt=0)
    high_freq_factor: float = opt(4.0, "llama3: above this many turns a frequency is kept", gt=0)
    beta_fast: float = opt(32.0, "yarn: above this many turns a frequency is kept", gt=0)
    beta_slow: float = opt(1.0, "yarn: below this many turns a frequency is divided by factor", gt=0)
    truncate: bool = opt(True, "yarn: the bounds between the two are whole pairs (gpt-oss: they are not)")
    attention_factor: float = opt(
        0.0, "yarn, longrope: what cos and sin are multiplied by (0: what follows from factor)", ge=0
    )
    short_factor: tuple[float, ...] = opt(
        (), "longrope: what each pair's frequency is divided by, in sequences of at most original_context"
    )
    long_factor: tuple[float, ...] = opt((), "longrope: the same in longer sequences")

    def check(self) -> None:
        if self.type == "none" and self.factor != 1:
            raise SpecError(f"{self.section}.factor = {self.factor:g} needs {self.section}.type, e.g. 'yarn'")
        for key in ("short_factor", "long_factor"):
            factors = getattr(self, key)
            if bool(factors) != (self.type == "longrope"):
                needs = "is needed" if self.type == "longrope" else f"needs {self.section}.type = 'longrope'"
                raise SpecError(f"{self.section}.{key} {needs}: one number for each rotary pair")
            if any(factor <= 0 for factor in factors):
                raise SpecError(f"{self.section}.{key} must be positive numbers")
        if self.attention_factor and self.type not in ("yarn", "longrope"):
            raise SpecError(f"{self.section}.attention_factor needs {self.section}.type = 'yarn' or 'longrope'")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise SpecError(
                f"{self.section}.low_freq_factor = {self.low_freq_factor:g} must be below "
                f"high_freq_factor = {self.high_freq_factor:g}"
            )

    @property
    def temperature(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor or self.factor <= 1:
            return self.attention_factor or 1.0
        if self.type == "yarn":  # Peng et al. 2023, eq. 22
            return 0.1 * math.log(self.factor) + 1.0
        if self.type == "longrope":  # as Phi-3 has it
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        return 1.0


# Keys that mean something with experts alone.
EXPERT_KEYS = (
    "mlp_layers", "shared_experts", "router", "norm_topk", "routed_scale", "expert_groups", "top_groups", "shared_gate",
    "choice_bias", "capacity", "balance_loss", "balance_bias",
)  # fmt: skip
LAYER_TYPES = ("sliding", "full")
MLP_TYPES = ("experts", "dense")
MUP_KEYS = ("parametrization", "mup_base_hidden", "mup_base_layers", "mup_base_head_dim")


@dataclass(frozen=True)
class ModelSpec(Section):
    section: ClassVar[str] = "model"

    preset: str = opt("", "start from this named shape; other keys then change it")
    layers: int = opt(4, "transformer blocks", ge=1)
    hidden: int = opt(256, "width of the residual stream", ge=1)
    heads: int = opt(4, "query heads", ge=1)
    kv_heads: int = opt(0, "key/value heads (0: as many as heads)", ge=0)
    head_dim: int = opt(0, "width of one head (0: hidden / heads)", ge=0)
    ffn: int = opt(0, "width of the MLP (0: 4 × hidden for gelu, 8/3 × hidden rounded up to 64 for swiglu)", ge=0)
    vocab: int = opt(512, "rows of the embedding; at least the tokenizer's size", ge=2)
    context: int = opt(256, "longest sequence the model is made for", ge=1)
    norm: str = opt("rms", "normalisation", choices=("rms", "layer"))
    norm_placement: str = opt(
        "pre",
        "where: before attention and MLP, after each before it is added (OLMo 2), or both (Gemma 2, GLM-4)",
        choices=("pre", "post", "both"),
    )
    norm_eps: float = opt(1e-5, "added to the variance", gt=0)
    positions: str = opt("rope", "how position enters", choices=("rope", "learned", "alibi", "none"))
    rope_theta: float = opt(10_000.0, "base of the rotary frequencies", gt=0)
    rope_fraction: float = opt(
        1.0, "share of each head that rotary embedding turns (Phi, GLM: 0.5; GPT-NeoX: 0.25)", gt=0, le=1
    )
    rope_scaling: RopeScaling = opt(RopeScaling, "stretching of the rotary frequencies")
    mlp: str = opt(
        "swiglu",
        "feed-forward block: gated by SiLU or by GELU in its tanh form, or GELU alone in that form or exact",
        choices=("swiglu", "geglu", "gelu", "gelu_erf"),
    )
    bias: bool = opt(False, "bias on every linear layer and on LayerNorm: implies the four keys that follow")
    qkv_bias: bool = opt(False, "bias on the query, key and value projections (Qwen2)")
    out_bias: bool = opt(False, "bias on the output projection of attention")
    mlp_bias: bool = opt(False, "bias on the projections of the MLP")
    norm_bias: bool = opt(False, "bias on LayerNorm")
    qk_norm: bool = opt(False, "RMSNorm over each query and key head (Qwen3)")
    qk_norm_whole: bool = opt(False, "RMSNorm over all queries and over all keys of a token (OLMo 2)")
    kv_lora_rank: int = opt(
        0, "multi-head latent attention (DeepSeek): keys and values are kept as one vector of this width (0: off)", ge=0
    )
    q_lora_rank: int = opt(0, "latent attention: rank of the query projection (0: projected directly)", ge=0)
    rope_head_dim: int = opt(
        0, "latent attention: rotary part of a head, beside head_dim without positions (0: head_dim / 2)", ge=0
    )
    v_head_dim: int = opt(0, "latent attention: width of a value head (0: head_dim)", ge=0)
    rope_interleaved: bool = opt(False, "latent attention: rotary pairs lie side by side (DeepSeek), not in halves")
    sliding_window: int = opt(0, "a query sees this many keys, itself included (0: all before it)", ge=0)
    layer_types: tuple[str, ...] = opt(
        (),
        "'sliding' (the window) or 'full' (all keys before) for each layer, repeated until all layers have one, e.g. "
        "['sliding', 'sliding', 'sliding', 'full'] (empty: the window, if any, on every layer)",
    )
    rope_local_theta: float = opt(
        0.0, "rotary base of sliding layers, without rope_scaling (Gemma 3, Mellum 2; 0: as the others)", ge=0
    )
    rope_layers: tuple[str, ...] = opt(
        (),
        "'rope' or 'none' for each layer, repeated until all layers have one: those with 'none' turn no heads "
        "(SmolLM3; empty: all turn them)",
    )
    attention_scale: float = opt(
        0.0, "what scores are multiplied by before the softmax (Granite, Gemma; 0: 1/√ of a key head's width)", ge=0
    )
    embed_scale: float = opt(1.0, "what embeddings are multiplied by (Granite, Gemma)", gt=0)
    residual_scale: float = opt(1.0, "what attention and MLP are multiplied by before they are added (Granite)", gt=0)
    logit_scale: float = opt(1.0, "what logits are multiplied by (Granite)", gt=0)
    attention_softcap: float = opt(0.0, "scores become cap·tanh(score / cap) before the mask (Gemma 2; 0: off)", ge=0)
    final_softcap: float = opt(0.0, "logits become cap·tanh(logit / cap) (Gemma 2; 0: off)", ge=0)
    attention_sinks: bool = opt(False, "a learned score for each query head joins the softmax's sum (gpt-oss)")
    tie_embeddings: bool = opt(False, "the head uses the embedding matrix")
    scalar_head: bool = opt(False, "one number per token instead of logits: a reward model, or a critic")
    experts: int = opt(0, "experts per MoE layer (0: dense)", ge=0)
    mlp_layers: tuple[str, ...] = opt(
        (),
        "'experts' or 'dense' (one MLP of width ffn) for each layer, repeated until all layers have one (DeepSeek: the "
        "first layers are dense; empty: experts in all)",
    )
    top_k: int = opt(2, "experts that each token visits", ge=1)
    shared_experts: int = opt(0, "experts that every token visits", ge=0)
    expert_ffn: int = opt(0, "width of one expert (0: ffn)", ge=0)
    router: str = opt(
        "softmax", "scores of experts; a sigmoid scores each by itself (DeepSeek-V3)", choices=("softmax", "sigmoid")
    )
    norm_topk: bool = opt(True, "the weights of a token's top_k experts are divided by their sum")
    routed_scale: float = opt(1.0, "what the weights of routed experts are multiplied by", gt=0)
    expert_groups: int = opt(1, "groups of experts; a token visits those of its best top_groups alone", ge=1)
    top_groups: int = opt(1, "groups that a token may visit", ge=1)
    shared_gate: bool = opt(False, "a sigmoid of each token weighs the shared experts' result (Qwen2-MoE)")
    capacity: float = opt(
        0.0,
        "an expert takes at most capacity × seq × top_k / experts tokens of a sequence (0: no token is dropped)",
        ge=0,
    )
    balance_loss: float = opt(0.0, "weight of the loss that spreads each sequence's tokens over experts", ge=0)
    choice_bias: bool = opt(
        False, "a bias of the choice of experts is part of the model (DeepSeek-V3); balance_bias implies it"
    )
    balance_bias: float = opt(
        0.0, "step by which busy experts are made less likely, without a loss (DeepSeek-V3; 0: off)", ge=0
    )
    attention: str = opt("auto", "attention backend", choices=("auto", "reference", "sdpa", "flex", "flash"))
    init_std: float = opt(
        0.02, "standard deviation of initial weights; residual outputs are scaled by 1/√(2·layers)", gt=0
    )
    parametrization: str = opt(
        "standard",
        "how initial weights and learning rates follow width and depth: as they are, or by μP (CompleteP), so that "
        "hyper-parameters tuned on a small base model hold for a large one",
        choices=("standard", "mup"),
    )
    mup_base_hidden: int = opt(0, "mup: hidden of the base model, on which hyper-parameters were tuned", ge=0)
    mup_base_layers: int = opt(0, "mup: layers of the base model (0: layers; nothing follows depth)", ge=0)
    mup_base_head_dim: int = opt(0, "mup: head_dim of the base model (0: head_dim; heads grow in number)", ge=0)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        return cls.from_dict({"preset": name, **changes})

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        name = data.get("preset") if isinstance(data, dict) else None
        if name and isinstance(name, str):
            if name not in PRESETS:
                raise SpecError(f"model.preset = {name!r} is not known{did_you_mean(name, PRESETS)}")
            data = merge(PRESETS[name], data)
        return super().from_dict(data)

    def check(self) -> None:
        if self.preset and self.given == {**ModelSpec().given, "preset": self.preset}:
            raise SpecError(f"a preset is a starting point: write ModelSpec.from_preset({self.preset!r}, …)")
        self.derive("kv_heads", self.kv_heads or self.heads)
        self.derive("tie_embeddings", self.tie_embeddings and not self.scalar_head)
        if self.heads % self.kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise SpecError(
                f"model.heads = {self.heads} is not divisible by model.kv_heads = {self.kv_heads}; "
                f"kv_heads can be {', '.join(map(str, fitting))}"
            )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise SpecError(
                    f"model.hidden = {self.hidden} is not divisible by model.heads = {self.heads}; "
                    f"use hidden = {self.heads * round(self.hidden / self.heads) or self.heads} or set model.head_dim"
                )
            self.derive("head_dim", self.hidden // self.heads)
        if self.positions == "rope" and self.head_dim % 2 and not self.kv_lora_rank:
            raise SpecError(f"model.head_dim = {self.head_dim} must be even for model.positions = 'rope'")
        if not self.ffn:
            width = -(-8 * self.hidden // (3 * 64)) * 64 if self.gated_mlp else 4 * self.hidden
            self.derive("ffn", width)
        self.check_biases()
        if self.norm_placement != "pre" and self.norm != "rms":
            raise SpecError(
                f"model.norm_placement = {self.norm_placement!r} needs model.norm = 'rms', not {self.norm!r}"
            )
        if self.norm_placement == "post" and self.experts:
            raise SpecError("model.norm_placement = 'post' does not go with model.experts: a router reads a norm")
        if self.qk_norm_whole and self.qk_norm:
            raise SpecError("model.qk_norm_whole does not go with model.qk_norm: it is one or the other")
        self.check_moe()
        self.check_latent()
        self.check_layer_types()
        self.check_rope()
        self.check_attention()
        self.check_parametrization()

    def check_biases(self) -> None:
        """`bias` is true where all that the network has are."""
        parts = ["qkv_bias", "out_bias", "mlp_bias"]
        if self.norm == "layer":
            parts.append("norm_bias")
        elif self.norm_bias:
            raise SpecError(f"model.norm_bias needs model.norm = 'layer', not {self.norm!r}")
        self.derive("bias", self.bias or all(getattr(self, part) for part in parts))
        for part in parts if self.bias else ():
            self.derive(part, True)

    def check_parametrization(self) -> None:
        if self.parametrization == "standard":
            for key in MUP_KEYS[1:]:
                if getattr(self, key):
                    raise SpecError(f"model.{key} needs model.parametrization = 'mup'")
            return
        if not self.mup_base_hidden:
            raise SpecError(
                "model.parametrization = 'mup' needs model.mup_base_hidden: the width of the model on which the "
                "learning rate was (or will be) tuned, e.g. 256"
            )
        self.derive("mup_base_layers", self.mup_base_layers or self.layers)
        self.derive("mup_base_head_dim", self.mup_base_head_dim or self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """The keys of μP only where it is on: a standard spec reads, and hashes, as it did before there was any."""
        table = super().to_dict()
        return table if self.parametrization == "mup" else {k: v for k, v in table.items() if k not in MUP_KEYS}

    def check_moe(self) -> None:
        if not self.experts:
            usual = {field.name: field.default for field in fields(self)}
            for key in EXPERT_KEYS:
                if getattr(self, key) != usual[key]:
                    raise SpecError(f"model.{key} needs model.experts > 0")
            return
        if unknown := [name for name in self.mlp_layers if name not in MLP_TYPES]:
            raise SpecError(f"model.mlp_layers: {unknown[0]!r} is not one of: {', '.join(MLP_TYPES)}")
        if self.mlp_layers and set(self.mlp_layers[: self.layers]) != set(MLP_TYPES):
            raise SpecError(
                "model.mlp_layers must name both kinds among its layers; leave it empty for experts in all, or "
                "model.experts = 0 for none"
            )
        if self.top_k > self.experts:
            raise SpecError(f"model.top_k = {self.top_k} is more than model.experts = {self.experts}")
        if self.mlp != "swiglu" or self.mlp_bias:
            raise SpecError("model.experts needs model.mlp = 'swiglu' and model.mlp_bias = false")
        self.derive("expert_ffn", self.expert_ffn or self.ffn)
        self.derive("choice_bias", self.choice_bias or self.balance_bias > 0)
        if self.shared_gate and not self.shared_experts:
            raise SpecError("model.shared_gate needs model.shared_experts > 0")
        self.check_groups()

    def check_groups(self) -> None:
        each = self.experts // self.expert_groups
        if self.experts % self.expert_groups or (self.router == "sigmoid" and self.expert_groups > 1 and each < 2):
            raise SpecError(
                f"model.expert_groups = {self.expert_groups} does not divide model.experts = {self.experts} into "
                "groups of one size (with model.router = 'sigmoid', of at least two experts)"
            )
        if not self.top_k <= self.top_groups * each <= self.experts:
            raise SpecError(
                f"model.top_groups = {self.top_groups} of model.expert_groups = {self.expert_groups} have "
                f"{self.top_groups * each} experts; they must be at least model.top_k = {self.top_k} and at most all"
            )

    def check_latent(self) -> None:
        if not self.kv_lora_rank:
            for key in ("q_lora_rank", "rope_head_dim", "v_head_dim", "rope_interleaved"):
                if getattr(self, key):
                    raise SpecError(f"model.{key} needs model.kv_lora_rank > 0 (multi-head latent attention)")
            return
        off = ("qk_norm", "qk_norm_whole", "bias", "qkv_bias", "out_bias", "attention_sinks")
        needs = {"positions": "rope", **dict.fromkeys(off, False), "kv_heads": self.heads, "attention_softcap": 0.0}
        for key, value in needs.items():
            if getattr(self, key) != value:
                raise SpecError(
                    f"model.{key} = {getattr(self, key)!r} does not go with latent attention (model.kv_lora_rank = "
                    f"{self.kv_lora_rank}); it must be {value!r}"
                )
        self.derive("rope_head_dim", self.rope_head_dim or max(2, self.head_dim // 4 * 2))
        self.derive("v_head_dim", self.v_head_dim or self.head_dim)
        if self.rope_head_dim % 2:
            raise SpecError(f"model.rope_head_dim = {self.rope_head_dim} must be even")
        if self.v_head_dim > self.head_dim + self.rope_head_dim:
            raise SpecError(
                f"model.v_head_dim = {self.v_head_dim} is wider than a key head, head_dim + rope_head_dim = "
                f"{self.head_dim + self.rope_head_dim}"
            )

    def check_rope(self) -> None:
        scaling = self.rope_scaling
        if self.rope_fraction != 1 and (self.positions != "rope" or self.kv_lora_rank):
            raise SpecError("model.rope_fraction needs model.positions = 'rope', and no latent attention")
        if self.positions == "rope" and (self.rotary_dim % 2 or not self.rotary_dim):
            raise SpecError(
                f"model.rope_fraction = {self.rope_fraction:g} of model.head_dim = {self.head_dim} is "
                f"{self.rotary_dim} numbers; it must be an even number of at least 2"
            )
        if scaling.type == "none":
            return
        if self.positions != "rope":
            raise SpecError(
                f"model.rope_scaling.type = '{scaling.type}' needs model.positions = 'rope', not '{self.positions}'"
            )
        for key in ("short_factor", "long_factor"):
            count, pairs = len(getattr(scaling, key)), self.rotary_dim // 2
            if scaling.type == "longrope" and count != pairs:
                raise SpecError(f"model.rope_scaling.{key} has {count} numbers for {pairs} rotary pairs of a head")
        if not scaling.original_context:
            before = max(1, int(self.context / scaling.factor))
            self.derive("rope_scaling", scaling.with_derived("original_context", before))

    def check_layer_types(self) -> None:
        if unknown := [name for name in self.layer_types if name not in LAYER_TYPES]:
            raise SpecError(f"model.layer_types: {unknown[0]!r} is not one of: {', '.join(LAYER_TYPES)}")
        if self.layer_types and not self.sliding_window:
            raise SpecError("model.layer_types needs model.sliding_window: how many keys a sliding layer sees")
        if self.layer_types and set(self.layer_types) != set(LAYER_TYPES):
            raise SpecError(
                "model.layer_types must name both kinds of layers; leave it empty for a window on every layer, or "
                "model.sliding_window = 0 for none"
            )
        if unknown := [name for name in self.rope_layers if name not in ("rope", "none")]:
            raise SpecError(f"model.rope_layers: {unknown[0]!r} is not one of: rope, none")
        if self.rope_layers and (self.positions != "rope" or self.kv_lora_rank or "rope" not in self.rope_layers):
            raise SpecError(
                "model.rope_layers needs model.positions = 'rope', 'rope' for a layer, and no latent attention"
            )
        if self.rope_local_theta and not (self.layer_types and self.positions == "rope"):
            raise SpecError("model.rope_local_theta needs model.layer_types and model.positions = 'rope'")

    def check_attention(self) -> None:
        for key in ("attention_softcap", "attention_sinks"):
            if getattr(self, key) and self.attention in ("sdpa", "flash"):
                raise SpecError(
                    f"model.attention = '{self.attention}' cannot do model.{key} = {getattr(self, key)!r}; "
                    "'auto', 'reference' and, on a GPU, 'flex' can"
                )
        if self.attention != "flash":
            return
        if self.kv_lora_rank and self.v_head_dim != self.head_dim + self.rope_head_dim:
            raise SpecError(
                "model.attention = 'flash' takes keys and values of one width; latent attention (model.kv_lora_rank) "
                "needs attention = 'sdpa' or 'flex'"
            )
        if self.positions == "alibi":
            raise SpecError(
                "model.attention = 'flash' cannot do model.positions = 'alibi'; that needs attention = 'flex' or 'sdpa'"
            )
        width = self.head_dim + self.rope_head_dim
        if width > 256:
            raise SpecError(f"model.attention = 'flash' takes heads of at most 256; head_dim = {width} needs 'sdpa'")

    # --- layers -----------------------------------------------------------------------------------

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and (not self.mlp_layers or self.mlp_layers[layer % len(self.mlp_layers)] == "experts")

    def at(self, layer: int) -> ModelSpec:
        """As if all layers had the MLP, or the experts, of this one."""
        return self if not self.mlp_layers else by_mlp(self)[0 if self.has_experts(layer) else 1]

    @property
    def kinds(self) -> list[tuple[ModelSpec, int]]:
        """The model as if all layers were of one kind, and how many are; first the kind with experts."""
        if not self.mlp_layers:
            return [(self, self.layers)]
        routed, dense = by_mlp(self)
        return [(routed, self.expert_layers), (dense, self.layers - self.expert_layers)]

    @property
    def expert_layers(self) -> int:
        return sum(self.has_experts(layer) for layer in range(self.layers))

    def window_of(self, layer: int) -> int:
        """Keys that a query sees in this layer, itself included; 0: all before it."""
        if not self.layer_types:
            return self.sliding_window
        return self.sliding_window if self.layer_types[layer % len(self.layer_types)] == "sliding" else 0

    def has_rope(self, layer: int) -> bool:
        """Whether this layer turns heads at all."""
        return self.positions == "rope" and (
            not self.rope_layers or self.rope_layers[layer % len(self.rope_layers)] == "rope"
        )

    @property
    def score_scale(self) -> float:
        """What queries are multiplied by, so that their product with keys, over √width, is scaled as asked for."""
        if not self.attention_scale:
            return 1.0
        return self.attention_scale * math.sqrt(self.head_dim + (self.rope_head_dim if self.kv_lora_rank else 0))

    def local_rope(self, layer: int) -> bool:
        """Whether this layer turns heads by `rope_local_theta`."""
        return self.rope_local_theta > 0 and self.window_of(layer) > 0

    @property
    def full_layers(self) -> int:
        """Layers in which a query sees all keys before it."""
        return sum(not self.window_of(layer) for layer in range(self.layers))

    # --- parameter counts -------------------------------------------------------------------------

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that rotary embedding turns."""
        return self.rope_head_dim if self.kv_lora_rank else int(self.head_dim * self.rope_fraction)

    @property
    def rotary_width(self) -> int:
        """Width of the tables: heads are turned whole, those pairs beyond `rope_fraction` by no angle."""
        return self.rope_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def gated_mlp(self) -> bool:
        return self.mlp in ("swiglu", "geglu")

    @property
    def norm_params(self) -> int:
        """Of one norm over the residual stream: a weight, and a bias for LayerNorm with biases."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def block_params(self) -> float:
        """The mean of all blocks, where they differ."""
        return self.mean(sum(weight.size for weight in components.block_weights(kind)) for kind, _ in self.kinds)

    def mean(self, values: Iterable[float]) -> float:
        """Over all layers, of one value for each kind."""
        found = list(values)
        if len(found) == 1:
            return found[0]
        return sum(value * count for value, (_, count) in zip(found, self.kinds, strict=True)) / self.layers

    @property
    def routed_params(self) -> int:
        """Of one block that has them: parameters of experts, of which a token visits top_k."""
        return sum(weight.size for weight in components.block_weights(self.kinds[0][0]) if weight.experts)

    @property
    def embedding_params(self) -> int:
        """Look-up tables: tokens, and positions where they are learned."""
        return sum(weight.size for weight in components.embedding_weights(self))

    @property
    def params(self) -> int:
        """Every trainable number; a tied head is counted once."""
        root = sum(weight.size for weight in components.root_weights(self))
        return root + sum(
            count * sum(weight.size for weight in components.block_weights(kind)) for kind, count in self.kinds
        )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all of them, less the experts it does not visit."""
        if not self.experts:
            return self.params
        return self.params - self.expert_layers * self.routed_params * (self.experts - self.top_k) // self.experts

    @property
    def block_matmul_params(self) -> float:
        """Weights of one block that a token is multiplied with; the mean of all blocks, where they differ."""
        return self.mean(
            round(sum(weight.matmul_token_share * weight.size for weight in components.block_weights(kind)))
            for kind, _ in self.kinds
        )

    @property
    def matmul_params(self) -> int:
        """Weights that one token is multiplied with: the head counts, the input embedding does not."""
        return round(self.layers * self.block_matmul_params) + self.head_outputs * self.hidden

    @property
    def head_outputs(self) -> int:
        """Numbers per token that the head gives."""
        return 1 if self.scalar_head else self.vocab


@functools.lru_cache(maxsize=64)
def by_mlp(spec: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """As if all layers had experts, and as if none had."""
    alike = spec.replace(mlp_layers=())
    usual = {field.name: field.default for field in fields(spec) if field.name in EXPERT_KEYS}
    return alike, alike.replace(**usual, experts=0, expert_ffn=0, top_k=ModelSpec().top_k)
