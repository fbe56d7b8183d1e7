"""The network: one decoder-only transformer for training, generation and serving.

Read top to bottom: norm, attention, MLP (a mixture of experts is in `moe`), block, model. It knows nothing of ranks,
precision or optimizers, and of no fusion across layers: those are a pass over a built model (`training_fusion`, and the
engine's own). The attention backend is an argument (`attend`), so a KV cache or a paged backend can stand in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.rms_norm import rms_norm
from ..kernels.rope import rotate_qk
from ..kernels.scores import soft_cap
from ..kernels.swiglu import swiglu
from ..kernels.training.cross_entropy import IGNORE, linear_cross_entropy
from ..kernels.training.gelu import gelu
from ..kernels.training.token_divergence import Teacher, TokenDivergence, linear_divergence
from ..kernels.training.token_logprobs import TokenLogprobs, linear_logprobs
from ..spec import ModelSpec, components
from ..spec.parametrization import initial_std
from . import rope
from .activation_checkpointing import checkpointed
from .attention import Attend, dense
from .moe import MoE
from .quantized_weight import QuantizedWeight, quantized_product

if TYPE_CHECKING:
    from .activation_offload import Offload  # which loads the compiler: seconds, and an engine does without it
    from .lora import ActiveAdapter, LayerAdapters

LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever model.norm_eps is (DeepSeek)
Rotary = tuple[Tensor, Tensor] | None  # cos and sin of every position, where the model has rotary embedding


class Linear(nn.Linear):
    """nn.Linear without its own initialisation: weights are a function of (seed, name), see `init_weights`.

    `adapters`: low-rank updates of the weight, which `lora.add_adapters` puts here; `quantized` is the weight where
    `quantized_weight.quantize_base` has replaced it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters: LayerAdapters | None = None
        self.quantized: QuantizedWeight | None = None

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters is None and self.quantized is None:
            return super().forward(x)
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """x·Wᵀ, or those `rows` of W, with the active adapter; a row-parallel layer sums this over its ranks."""
        if self.quantized is None:
            y = F.linear(x, self.weight_rows(rows))
        else:
            y = quantized_product(x, self.quantized, rows)
        return y if self.adapters is None else self.adapters(x, y, self.weight_rows, rows)

    def weight_rows(self, rows: slice | None) -> Tensor:
        weight = self.weight if self.quantized is None else self.quantized.dequantize()
        return weight if rows is None else weight[rows]


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) · weight."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """(x − mean(x)) / √(variance(x) + ε) · weight + bias, as precise as x: autocast would make 4 bytes of 2."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.type_as(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.type_as(x), bias, self.eps)


def make_norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "layer":
        return LayerNorm(spec.hidden, eps=spec.norm_eps, bias=spec.norm_bias)
    return RMSNorm(spec.hidden, eps=spec.norm_eps)


class Attention(nn.Module):
    """Causal self-attention; kv_heads < heads is grouped-query, kv_heads = 1 multi-query."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.score_scale = layer, spec.head_dim, spec.score_scale
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.attention_sinks else None
        self.q = Linear(spec.hidden, spec.q_dim, bias=spec.qkv_bias)
        self.k = Linear(spec.hidden, spec.kv_dim, bias=spec.qkv_bias)
        self.v = Linear(spec.hidden, spec.kv_dim, bias=spec.qkv_bias)
        self.q_norm, self.k_norm, self.norm_whole = None, None, spec.qk_norm_whole
        if spec.qk_norm or spec.qk_norm_whole:
            widths = (spec.q_dim, spec.kv_dim) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(width, eps=spec.norm_eps) for width in widths)
        self.out = Linear(spec.q_dim, spec.hidden, bias=spec.out_bias)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        # The number of heads is inferred, so that a rank may hold a part of them: (batch, seq, heads, head_dim)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None and self.norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not self.norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate_qk(q, k, *rotary)
        if self.score_scale != 1:
            q = q * self.score_scale
        return self.out(attend(q, k, v, self.layer, **self.per_head()).flatten(-2))

    def per_head(self) -> dict[str, Tensor]:
        """Learned parameters of the softmax, one entry for each query head: keywords of the backend."""
        return {} if self.sinks is None else {"sinks": self.sinks}


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one latent vector per token.

    A head is `head_dim` numbers without positions beside `rope_head_dim` with rotary embedding; the rotary part of the
    keys is one for all heads. An engine caches the latent vector and that key (`engine.core.latent_attention`).
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.interleaved, self.score_scale = layer, spec.rope_interleaved, spec.score_scale
        self.nope_dim, self.rope_dim, self.v_dim = spec.head_dim, spec.rope_head_dim, spec.v_head_dim
        rank, q_rank = spec.kv_lora_rank, spec.q_lora_rank
        q_width = spec.heads * (spec.head_dim + spec.rope_head_dim)
        self.q = None if q_rank else Linear(spec.hidden, q_width, bias=False)
        self.q_a = Linear(spec.hidden, q_rank, bias=False) if q_rank else None
        self.kv_a = Linear(spec.hidden, rank + spec.rope_head_dim, bias=False)
        self.q_norm = RMSNorm(q_rank, eps=LATENT_NORM_EPS) if q_rank else None
        self.kv_norm = RMSNorm(rank, eps=LATENT_NORM_EPS)
        self.q_b = Linear(q_rank, q_width, bias=False) if q_rank else None
        self.kv_b = Linear(rank, spec.heads * (spec.head_dim + spec.v_head_dim), bias=False)
        self.out = Linear(spec.heads * spec.v_head_dim, spec.hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        q_nope, q_rope, latent, k_rope = self.latents(x, rotary)
        k_nope, v = (
            self.kv_b(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim)).split((self.nope_dim, self.v_dim), dim=-1)
        )
        q = torch.cat((q_nope, q_rope), dim=-1)
        if self.score_scale != 1:
            q = q * self.score_scale
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return self.out(attend(q, k, v.contiguous(), self.layer).flatten(-2))

    def latents(
        self, x: Tensor, rotary: Rotary, linear: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries without and with positions (…, heads, width), the latent vector (…, rank), the rotary key.

        `linear` computes a layer: an engine has kernels of its own for few rows.
        """
        assert rotary is not None
        if self.q_a is not None and self.q_norm is not None and self.q_b is not None:
            q = linear(self.q_b, self.q_norm(linear(self.q_a, x)))
        else:
            assert self.q is not None
            q = linear(self.q, x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).split(
            (self.nope_dim, self.rope_dim), dim=-1
        )
        latent, k_rope = linear(self.kv_a, x).split((self.kv_norm.normalized_shape[0], self.rope_dim), dim=-1)
        k_rope = k_rope.unsqueeze(-2)
        if self.interleaved:  # pairs (x0, x1), (x2, x3), … into halves
            q_rope, k_rope = (part.unflatten(-1, (-1, 2)).mT.flatten(-2) for part in (q_rope, k_rope))
        q_rope, k_rope = rotate_qk(q_rope.contiguous(), k_rope.contiguous(), *rotary)
        return q_nope, q_rope, self.kv_norm(latent), k_rope


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), GeGLU: the same with gelu, or GELU: down(gelu(up(x)))."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.kind = spec.mlp
        self.gate = Linear(spec.hidden, width, bias=spec.mlp_bias) if spec.gated_mlp else None
        self.up = Linear(spec.hidden, width, bias=spec.mlp_bias)
        self.down = Linear(width, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down((gelu if self.kind == "gelu" else F.gelu)(self.up(x)))
        if self.kind == "geglu":
            return self.down(gelu(self.gate(x)) * self.up(x))
        return self.down(swiglu(self.gate(x), self.up(x)))


def make_moe(spec: ModelSpec) -> MoE:
    return MoE(spec, MLP(spec, spec.shared_experts * spec.expert_ffn) if spec.shared_experts else None)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `residual_scale` weighs what is added.

    `norm_placement`: x + norm(attention(x)) and so on, or a norm before and another one after.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        before, after = spec.norm_placement != "post", spec.norm_placement != "pre"
        self.attention_norm = make_norm(spec) if before else nn.Identity()
        self.attention = LatentAttention(spec, layer) if spec.kv_lora_rank else Attention(spec, layer)
        self.attention_post_norm = make_norm(spec) if after else None
        self.mlp_norm = make_norm(spec) if before else nn.Identity()
        self.mlp = make_moe(spec) if spec.has_experts(layer) else MLP(spec, spec.ffn)
        self.mlp_post_norm = make_norm(spec) if after else None
        self.residual_scale = spec.residual_scale
        self.recompute = "none"  # activation checkpointing policy: see `activation_checkpointing`
        self.attention_linears = sum(linear.name.startswith("attention.") for linear in components.linears(spec))
        self.active_adapter: ActiveAdapter | None = None  # of all its layers, where they have adapters

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        attended = self.attention(self.attention_norm(x), rotary, attend)
        x = x + weigh_branch(attended, self.attention_post_norm, self.residual_scale)
        return x + weigh_branch(self.mlp(self.mlp_norm(x)), self.mlp_post_norm, self.residual_scale)


def weigh_branch(x: Tensor, norm: nn.Module | None, scale: float) -> Tensor:
    """What attention or MLP gives, as it is added to the residual stream."""
    x = x if norm is None else norm(x)
    return x if scale == 1 else x * scale


class GPT(nn.Module):
    """`GPT(spec)(tokens)` gives logits; `GPT(spec)(tokens, targets)` gives (logits, loss). With a scalar head: values.

    `targets[:, t]` is the token after `tokens[:, t]`: the data path shifts by one. A target of −100 is not counted.
    On the meta device the model is only a shape; call `init_weights(seed)` after materialising it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int = 0,
        *,
        layers: Iterable[int] | None = None,  # a part of the network: these blocks, and with `first` the embedding,
        first: bool = True,  # with `last` the head. A part that is not first takes hidden states instead of tokens;
        last: bool = True,  # one that is not last returns them.
    ) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, first, last
        # (hidden, head weight, targets) → sum of the loss
        self.cross_entropy: Callable[..., Tensor] = linear_cross_entropy
        self.token_logprobs: Callable[..., TokenLogprobs] = linear_logprobs  # (hidden, head weight, targets)
        # (hidden, head weight, targets, teacher)
        self.token_divergence: Callable[..., TokenDivergence] = linear_divergence
        self.chunked_loss = True  # False: the loss is computed from all logits, as a quantized head gives them
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear  # (hidden, head weight) → logits
        # cos, sin of positions, also of layers with a rotary base of their own
        self.rotary_tables: Callable[[ModelSpec, Tensor, bool], tuple[Tensor, Tensor]] = rope.tables
        self.offload: Offload | None = None  # of saved activations to host memory
        self.adapter_weights: tuple[components.Weight, ...] = ()  # of a block: see `lora.add_adapters`
        embeds = first or (last and spec.tie_embeddings)
        self.embed: Embedding | None = Embedding(spec.vocab, spec.hidden) if embeds else None
        self.positions = Embedding(spec.context, spec.hidden) if first and spec.positions == "learned" else None
        # Named by the layer, so that a part of the network has the names of the whole.
        chosen = range(spec.layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in chosen})
        self.norm = make_norm(spec) if last else None
        self.score = Linear(spec.hidden, 1, bias=False) if last and spec.scalar_head else None
        own_head = last and not spec.tie_embeddings and not spec.scalar_head
        self.head = Linear(spec.hidden, spec.vocab, bias=False) if own_head else None
        self.scalar_heads = nn.ModuleDict()  # of adapters: see `lora.add_scalar_adapter`
        self.score_grad_share = 1.0  # 1/n where n ranks compute the same values and sum the gradients of their input
        if not next(self.parameters()).is_meta:
            self.init_weights(seed)

    def forward(
        self,
        tokens: Tensor,  # (batch, seq); hidden states (batch, seq, hidden) where the part is not the first
        targets: Tensor | None = None,
        *,
        documents: Tensor | None = None,  # (batch, seq): attention and positions stay inside a document
        positions: Tensor | None = None,  # (seq) or (batch, seq); by default they count from 0
        attend: Attend | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        keep_logits: bool = True,  # False: the loss is computed in chunks and the logits are never held
        only_last: bool = False,  # logits of the last position alone, (batch, 1, vocab): all that generation needs
        logprobs: bool = False,  # of every target instead of the loss
        temperature: float = 1.0,  # of these log-probabilities
        with_entropy: bool = False,  # entropies beside them
        final_states: bool = False,  # what the head would see, and nothing else: a teacher's
        teacher: Teacher | None = None,  # the divergence from it instead of the loss
    ) -> Tensor | tuple[Tensor | None, Tensor] | TokenLogprobs | TokenDivergence:
        if positions is None:
            positions = default_positions(tokens, documents)
        if attend is None:
            attend = dense(self.spec, tokens.device, documents, seq=tokens.shape[1])
        x = self.states(tokens, positions, attend)
        if self.norm is None:
            return x
        if (score := self.scalar_head()) is not None:
            return self.values(self.norm(x), score)
        if targets is None:
            return self.logits(x[:, -1:] if only_last else x)
        x = self.head_input(x)
        if final_states:
            return x
        if teacher is not None:
            return self.token_divergence(x, self.head_weight, targets, teacher, softcap=self.spec.final_softcap)
        if logprobs:
            options = {"temperature": temperature, "softcap": self.spec.final_softcap, "with_entropy": with_entropy}
            return self.token_logprobs(x, self.head_weight, targets, **options)
        if keep_logits or not self.chunked_loss:
            logits = soft_cap(self.project(x, self.head_weight), self.spec.final_softcap)
            flat = logits.flatten(0, 1).float()
            loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        else:
            cap = self.spec.final_softcap
            loss = self.cross_entropy(x.flatten(0, 1), self.head_weight, targets.flatten(), softcap=cap)
        if reduction == "mean":
            loss = loss / (targets != IGNORE).sum()
        return logits if keep_logits else None, loss

    def states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the last block gives, (batch, seq, hidden). An engine's batch is flat: (tokens) → (tokens, hidden)."""
        x = self.embed(tokens) if self.first and self.embed is not None else tokens
        if self.first and self.spec.embed_scale != 1:
            x = x * self.spec.embed_scale
        if self.positions is not None:
            x = x + self.positions(positions)
        for index, (block, rotary) in enumerate(zip(self.layers(), self.rotary(positions), strict=True)):
            with nullcontext() if self.offload is None else self.offload.block_forward(index, x, rotary or ()):
                x = checkpointed(block, block.recompute)(x, rotary, attend)
        return x

    def rotary(self, positions: Tensor) -> list[Rotary]:
        """cos and sin for each block that is here."""
        if self.spec.positions != "rope":
            return [None] * len(self.blocks)
        turned = [int(layer) for layer in self.blocks if self.spec.has_rope(int(layer))]
        kinds = {layer: self.spec.local_rope(layer) for layer in turned}
        tables = {kind: self.rotary_tables(self.spec, positions, kind) for kind in dict.fromkeys(kinds.values())}
        return [tables[kinds[int(layer)]] if int(layer) in kinds else None for layer in self.blocks]

    def logits(self, states: Tensor) -> Tensor:
        """Of the positions of these states: an engine needs few of a batch."""
        return soft_cap(self.project(self.head_input(states), self.head_weight), self.spec.final_softcap)

    def head_input(self, states: Tensor) -> Tensor:
        """What is multiplied with the head's weight: logits are scaled by scaling this."""
        assert self.norm is not None, "only the last part of a network has a head"
        x: Tensor = self.norm(states)
        return x if self.spec.logit_scale == 1 else x * self.spec.logit_scale

    def scalar_head(self) -> nn.Module | None:
        """Of the active adapter, or of the network; None: it is a language model."""
        for name, head in self.scalar_heads.items():
            active = self.layers()[0].active_adapter
            if active is not None and active.name == name:
                return head
        return self.score

    def values(self, states: Tensor, score: nn.Module) -> Tensor:
        """One number per token, fp32: by the scalar head of a reward model or a critic."""
        if self.score_grad_share != 1.0:
            states = ScaleGradient.apply(states, self.score_grad_share)
        values: Tensor = score(states).squeeze(-1).float()
        return values.clone() if values._is_view() else values  # FSDP2 hooks what a module returns, and warns of views

    def layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks.values()))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def head_weight(self) -> Tensor:
        weights = self.embed if self.head is None else self.head
        assert weights is not None, "only the last part of a network has a head"
        return weights.weight

    @property
    def recompute(self) -> str:
        """The policy of the blocks; setting it sets every block's."""
        return ", ".join({block.recompute: None for block in self.layers()})

    @recompute.setter
    def recompute(self, policy: str) -> None:
        for block in self.layers():
            block.recompute = policy

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weight(self.spec, seed, name, parameter.shape))
        for buffer in self.buffers():  # the choice bias of experts
            buffer.zero_()

    @classmethod
    def from_hf(cls, folder: str | Path) -> Self:
        """Read a Hugging Face checkpoint (config.json and safetensors) of a family in `model.hf`."""
        from .hf import load_hf

        return load_hf(cls, Path(folder))

    def save_hf(self, folder: str | Path, eos: int | list[int] | None = None) -> None:
        """Write a checkpoint that `transformers` loads; `eos` are the tokens at which its `generate` stops."""
        from .hf_write import save_hf

        save_hf(self, Path(folder), eos)


class ScaleGradient(torch.autograd.Function):
    """Identity; the gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def initial_weight(spec: ModelSpec, seed: int, name: str, shape: torch.Size) -> Tensor:
    """A whole weight, drawn from a generator keyed by (seed, its name): equal under every layout and device."""
    if name.endswith(".choice_bias"):  # a buffer
        return torch.zeros(shape)
    weight = components.find(spec, name)
    std = initial_std(spec, weight)
    if weight.init in ("zeros", "ones"):
        return torch.full(shape, std)
    return torch.empty(shape).normal_(0.0, std, generator=generator_of(seed, name))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Of one weight."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def default_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """0, 1, 2, …; with documents they start again at each, as if it stood alone."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if documents is None:
        return index
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    start = torch.where(begins, index, 0).cummax(dim=1).values
    return index - start


if __name__ == "__main__":
    spec = ModelSpec.from_preset("tiny")
    tokens = torch.randint(0, spec.vocab, (2, spec.context + 1), generator=torch.Generator().manual_seed(0))
    logits, loss = GPT(spec)(tokens[:, :-1], tokens[:, 1:])
    print(f"{spec.params:,} parameters; logits {tuple(logits.shape)}")
    print(f"loss {loss:.4f}; guessing evenly costs ln {spec.vocab} = {math.log(spec.vocab):.4f}")
