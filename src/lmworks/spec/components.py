"""The components of the network, each described once: weights, sharding, names in Hugging Face checkpoints, work.

`block(model)` lists the components of one transformer block in the order in which data passes them. Readers:

    spec/model.py                 parameter counts
    model/gpt.py                  initial values; a test compares names and shapes with `GPT(spec).named_parameters()`
    spec/parametrization.py       initial scale, learning rate and gradient scale of each role under μP
    model/hf_layout.py            names in a checkpoint
    parallel/tensor_parallel.py   the dimension along which each weight is sharded
    plan/                         FLOPs, saved activations, bytes moved: one cost rule for each kind of component,
                                  for eager code (plan/eager.py) and for fused code (plan/fused.py)
    plan/serving/, engine/        weights read in a decode step, KV cache bytes

A new architectural trait is a component or a field here, its computation in model/, and a key of its config.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .model import ModelSpec

# Over tensor-parallel ranks: outputs, inputs, KV heads (outputs; whole where ranks outnumber the heads), or not at all.
Shard = Literal["column", "row", "kv_heads", "replicated"]
# residual: normal, scaled down with the number of layers; score: normal with a variance of 1 / (width + 1)
Init = Literal["normal", "residual", "ones", "zeros", "score"]
SCORE = "score.weight"  # the scalar head
# What a weight does, for rules that depend on width (spec/parametrization.py). hidden: width × width; embedding, head
# and router: width × a fixed number; vector: gains, biases and sinks; head_gain: one gain for all attention heads.
Role = Literal["embedding", "hidden", "vector", "head_gain", "router", "last_norm", "head"]

ROOT = -1  # the layer of weights outside blocks: embedding, last norm, head


@dataclass(frozen=True)
class Weight:
    """One parameter, of the whole network."""

    name: str  # within its block; in the lists of `weights`, within the network
    shape: tuple[int, ...]
    tp_dim: int | None = None  # dimension that tensor parallelism shards
    kv_heads: int = 0  # sharded only where the ranks divide this number of heads (0: always)
    in_tp_region: bool = False  # used inside a tensor-parallel region: where replicated, its gradient is partial
    gathered: bool = False  # used where the positions of all ranks are gathered: replicated, its gradient is whole
    experts: int = 0  # its first dimension counts experts, which expert parallelism shards
    matmul_token_share: float = 0.0  # the share of tokens that it is multiplied with
    init: Init = "normal"
    role: Role = "hidden"
    ends_branch: bool = False  # its product (or sum) is what a residual branch adds to the stream
    scales_scores: bool = False  # attention scores are proportional to it: of queries
    hf: str = ""  # in a Hugging Face checkpoint of the Llama layout, within its layer
    layer: int = ROOT

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def sharded(self, tp: int) -> int | None:
        """The dimension that `tp` ranks shard; None: the weight is whole on every rank."""
        return self.tp_dim if tp > 1 and not (self.kv_heads and self.kv_heads % tp) else None

    def inference_part(self, tp: int, rank: int) -> tuple[range, ...]:
        """The indices along each dimension that one of `tp` ranks needs for inference.

        As in training, but where ranks outnumber the key heads each needs the rows of one, not all.
        """
        dim, parts, index = self.sharded(tp), tp, rank
        if tp > 1 and self.kv_heads % tp:
            dim, parts, index = 0, self.kv_heads, rank * self.kv_heads // tp
        each = [size // parts if axis == dim else size for axis, size in enumerate(self.shape)]
        return tuple(
            range(index * part, (index + 1) * part) if axis == dim else range(part) for axis, part in enumerate(each)
        )

    def has_partial_grad(self, tp: int, sp: bool) -> bool:
        """Replicated on every tensor-parallel rank, each of which computes a part of its gradient.

        With sequence parallelism every rank sees its own positions, so this holds for all replicated weights.
        """
        return tp > 1 and self.sharded(tp) is None and (sp or self.in_tp_region) and not self.gathered


def rows_of_ranks(rows: int, ranks: int) -> list[range]:
    """As `torch.chunk` deals them: ⌈rows/ranks⌉ each, so the last ranks have fewer, or none."""
    each = -(-rows // ranks)
    return [range(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]


def overlap(first: range, second: range) -> range:
    """Of two runs of indices; empty where they have none in common."""
    start, stop = max(first.start, second.start), min(first.stop, second.stop)
    return range(start, stop) if start < stop else range(0)


# --- kinds of components ----------------------------------------------------------------------------------


class WithoutWeights:
    """A component that has no parameters."""

    def weights(self) -> Iterator[Weight]:
        return iter(())


@dataclass(frozen=True)
class Linear:
    """y = x·Wᵀ + bias. Row-parallel layers end a tensor-parallel region: a sum over ranks, then the bias."""

    name: str
    label: str
    reads: str  # the component whose output it reads: fused code merges the products that read the same
    inputs: int
    outputs: int
    bias: bool = False
    shard: Shard = "column"
    kv_heads: int = 0
    scales_scores: bool = False  # its output is the queries that attention multiplies with keys
    hf: str = ""

    def weights(self) -> Iterator[Weight]:
        row = self.shard == "row"
        init: Init = "residual" if row else "normal"
        tp_dim = None if self.shard == "replicated" else int(row)
        weight = Weight(
            f"{self.name}.weight", (self.outputs, self.inputs), tp_dim, self.kv_heads, not row, matmul_token_share=1.0
        )
        traits: dict[str, Any] = {"ends_branch": row, "scales_scores": self.scales_scores}
        yield replace(weight, init=init, hf=f"{self.hf}.weight", **traits)
        if self.bias:  # of a row-parallel layer: whole, and added after the sum over ranks
            bias = Weight(f"{self.name}.bias", (self.outputs,), None if row else tp_dim, self.kv_heads, not row)
            yield replace(bias, init="zeros", role="vector", hf=f"{self.hf}.bias", **traits)


@dataclass(frozen=True)
class Norm:
    """Over vectors of `width`; inside attention over each of several per token, `total` numbers in all."""

    name: str
    label: str
    width: int
    kind: str = "rms"
    bias: bool = False
    total: int = 0  # 0: the residual stream
    source: int = 0  # numbers per token of the tensor that its input is a part of (0: it is the whole)
    shard: Shard = "replicated"  # of these vectors
    role: Role = "vector"
    scales_scores: bool = False
    feeds_router: bool = False  # a router of experts reads its output
    of_branch: bool = False  # of what attention or MLP gives, before it is added to the residual stream
    hf: str = ""

    def weights(self) -> Iterator[Weight]:
        whole = Weight(f"{self.name}.weight", (self.width,), in_tp_region=self.total > 0, init="ones", role=self.role)
        yield replace(whole, scales_scores=self.scales_scores, hf=f"{self.hf}.weight")
        if self.bias:
            yield replace(whole, name=f"{self.name}.bias", init="zeros", hf=f"{self.hf}.bias")


@dataclass(frozen=True)
class Rotary(WithoutWeights):
    """Rotary embedding of `width` numbers per token."""

    label: str
    width: int
    shard: Shard = "column"
    after_norm: bool = False  # its input is the output of a norm


@dataclass(frozen=True)
class Copy(WithoutWeights):
    """A copy of `width` numbers per token, sharded by heads: parts of heads put side by side."""

    label: str
    width: int


@dataclass(frozen=True)
class Sinks:
    """A learned score for each query head, which joins the softmax's sum and is dropped. Costs: see `Attention`."""

    heads: int

    def weights(self) -> Iterator[Weight]:
        yield Weight("attention.sinks", (self.heads,), 0, in_tp_region=True, role="vector", hf="self_attn.sinks")


@dataclass(frozen=True)
class Attention(WithoutWeights):
    """softmax(q·kᵀ)·v over the keys that a query may see."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    full_share: float = 0.0  # of the layers: those without the window; the same in a block of every layer
    softcap: float = 0.0
    sinks: bool = False

    @property
    def flops_per_key(self) -> int:
        """Of one query: q·kᵀ and p·v."""
        return 2 * self.heads * (self.qk_dim + self.v_dim)

    @property
    def fused(self) -> bool:
        """Whether SDPA and flash attention compute it."""
        return not (self.softcap or self.sinks)

    @property
    def score_passes(self) -> int:
        """Elementwise passes over all scores before the softmax, in eager code.

        Scale and mask; a cap's /, tanh and ·; a copy with a column for the sinks.
        """
        return 2 + 3 * (self.softcap > 0) + self.sinks

    def saved_scores(self, keys: Any) -> Any:
        """fp32 numbers that eager code saves for each query and head: the softmax and its column of sinks; tanh."""
        return keys * (1 + (self.softcap > 0)) + self.sinks


@dataclass(frozen=True)
class MLP:
    """SwiGLU: down(silu(gate(x)) · up(x)), GeGLU: the same with gelu, or GELU: down(gelu(up(x)))."""

    name: str
    label: str
    reads: str
    hidden: int
    width: int
    activation: str
    bias: bool = False
    hf: str = ""

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def up(self) -> tuple[Linear, ...]:
        """gate and up, or up alone."""
        return tuple(
            Linear(
                f"{self.name}.{part}",
                f"{self.label}{part}",
                self.reads,
                self.hidden,
                self.width,
                self.bias,
                hf=f"{self.hf}.{part}_proj",
            )
            for part in (("gate", "up") if self.gated else ("up",))
        )

    @property
    def down(self) -> Linear:
        name, label, hf = f"{self.name}.down", f"{self.label}down", f"{self.hf}.down_proj"
        return Linear(name, label, self.name, self.width, self.hidden, self.bias, "row", hf=hf)

    def weights(self) -> Iterator[Weight]:
        for linear in (*self.up, self.down):
            yield from linear.weights()


@dataclass(frozen=True)
class Experts:
    """Router, dispatch to `top_k` of `count` SwiGLU experts of width `ffn`, combine."""

    name: str
    reads: str
    hidden: int
    count: int
    top_k: int
    ffn: int

    @property
    def size(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.ffn

    def weights(self) -> Iterator[Weight]:
        into, out = (self.count, self.ffn, self.hidden), (self.count, self.hidden, self.ffn)
        share = self.top_k / self.count
        yield Weight(f"{self.name}.gate", into, 1, experts=self.count, matmul_token_share=share)
        yield Weight(f"{self.name}.up", into, 1, experts=self.count, matmul_token_share=share)
        down = Weight(f"{self.name}.down", out, 2, experts=self.count, matmul_token_share=share, init="residual")
        yield replace(down, ends_branch=True)
        router = Weight(f"{self.name}.router.weight", (self.count, self.hidden), in_tp_region=True, role="router")
        yield replace(router, matmul_token_share=1.0)


@dataclass(frozen=True)
class SharedGate:
    """One number per token, whose sigmoid weighs the result of the shared experts."""

    name: str
    hidden: int

    def weights(self) -> Iterator[Weight]:
        gate = Weight(f"{self.name}.weight", (1, self.hidden), in_tp_region=True, role="router")
        yield replace(gate, matmul_token_share=1.0, hf="mlp.shared_expert_gate.weight")


@dataclass(frozen=True)
class Residual(WithoutWeights):
    """x + f(x)."""

    label: str
    inner: bool = False  # between attention and MLP
    feeds_norm: bool = True  # which saves the sum


@dataclass(frozen=True)
class Entry(WithoutWeights):
    """The residual stream as linear layers read it where no norm stands before them."""

    name: str
    label: str  # as that of the norm which others have there


Component = Linear | Norm | Rotary | Copy | Sinks | Attention | MLP | Experts | SharedGate | Residual | Entry


# --- the network ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def block(m: ModelSpec) -> tuple[Component, ...]:
    """One transformer block; where some have experts and others do not, one with experts (`ModelSpec.kinds`)."""
    m = m.kinds[0][0]
    mlp_norm = replace(stream_norm(m, "mlp_norm", "post_attention_layernorm"), feeds_router=m.experts > 0)
    return (
        before(m, stream_norm(m, "attention_norm", "input_layernorm")),
        *attention(m),
        *after(m, "attention_post_norm", "post_self_attn_layernorm"),
        Residual("attention residual", inner=True, feeds_norm=m.norm_placement != "post"),
        before(m, mlp_norm),
        *feed_forward(m),
        *after(m, "mlp_post_norm", "post_mlp_layernorm"),
        Residual("mlp residual", feeds_norm=m.norm_placement != "post"),
    )


def before(m: ModelSpec, norm: Norm) -> Norm | Entry:
    return Entry(norm.name, norm.label) if m.norm_placement == "post" else norm


def after(m: ModelSpec, name: str, hf: str) -> Iterator[Norm]:
    if m.norm_placement != "pre":
        yield replace(stream_norm(m, name, hf), of_branch=True)


def stream_norm(m: ModelSpec, name: str, hf: str, role: Role = "vector") -> Norm:
    return Norm(name, name.replace("_", " "), m.hidden, m.norm, m.norm_bias, role=role, hf=hf)


def attention(m: ModelSpec) -> Iterator[Component]:
    """Projections, head norms, rotary embedding, attention, output projection."""
    if m.kv_lora_rank:
        yield from latent_attention(m)
        return
    norm, hf = "attention_norm", "self_attn"
    if m.attention_sinks:  # a parameter of the module itself: before those of its layers
        yield Sinks(m.heads)
    query = Linear("attention.q", "query", norm, m.hidden, m.q_dim, m.qkv_bias, hf=f"{hf}.q_proj")
    yield replace(query, scales_scores=not (m.qk_norm or m.qk_norm_whole))
    for name, label in (("k", "key"), ("v", "value")):
        yield Linear(
            f"attention.{name}",
            label,
            norm,
            m.hidden,
            m.kv_dim,
            m.qkv_bias,
            "kv_heads",
            m.kv_heads,
            hf=f"{hf}.{name}_proj",
        )
    if m.qk_norm_whole:
        for name, label, width in (("q", "query", m.q_dim), ("k", "key", m.kv_dim)):
            whole = Norm(f"attention.{name}_norm", f"{label} norm", width, total=width, hf=f"{hf}.{name}_norm")
            yield replace(whole, scales_scores=name == "q")
    if m.qk_norm:
        q_norm = Norm("attention.q_norm", "query norm", m.head_dim, total=m.q_dim, shard="column", hf=f"{hf}.q_norm")
        yield replace(q_norm, role="head_gain", scales_scores=True)
        k_norm = Norm("attention.k_norm", "key norm", m.head_dim, total=m.kv_dim, shard="kv_heads", hf=f"{hf}.k_norm")
        yield replace(k_norm, role="head_gain")
    if m.positions == "rope":
        normed = m.qk_norm or m.qk_norm_whole
        yield Rotary("rotary query", m.q_dim, after_norm=normed)
        yield Rotary("rotary key", m.kv_dim, "kv_heads", after_norm=normed)
    traits = m.sliding_window, full_share(m), m.attention_softcap, m.attention_sinks
    yield Attention(m.heads, m.kv_heads, m.head_dim, m.head_dim, *traits)
    yield Linear("attention.out", "attention out", "attention", m.q_dim, m.hidden, m.out_bias, "row", hf=f"{hf}.o_proj")


def full_share(m: ModelSpec) -> float:
    return m.full_layers / m.layers if m.layer_types else 0.0


def latent_attention(m: ModelSpec) -> Iterator[Component]:
    """Multi-head latent attention: keys and values of all heads are projections of one latent vector per token."""
    norm, hf, qk_dim = "attention_norm", "self_attn", m.head_dim + m.rope_head_dim
    latent = Linear("attention.kv_a", "latent", norm, m.hidden, m.kv_lora_rank + m.rope_head_dim, shard="replicated")
    kv_norm = Norm("attention.kv_norm", "latent norm", m.kv_lora_rank, total=m.kv_lora_rank, source=latent.outputs)
    q_norm = Norm("attention.q_norm", "query latent norm", m.q_lora_rank, total=m.q_lora_rank)
    if m.q_lora_rank:
        yield Linear(
            "attention.q_a", "query latent", norm, m.hidden, m.q_lora_rank, shard="replicated", hf=f"{hf}.q_a_proj"
        )
    else:
        query = Linear("attention.q", "query", norm, m.hidden, m.heads * qk_dim, hf=f"{hf}.q_proj")
        yield replace(query, scales_scores=True)
    yield replace(latent, hf=f"{hf}.kv_a_proj_with_mqa")
    if m.q_lora_rank:
        yield replace(q_norm, hf=f"{hf}.q_a_layernorm")
    yield replace(kv_norm, hf=f"{hf}.kv_a_layernorm")
    if m.q_lora_rank:
        query = Linear("attention.q_b", "query", q_norm.name, m.q_lora_rank, m.heads * qk_dim, hf=f"{hf}.q_b_proj")
        yield replace(query, scales_scores=True)
    width = m.heads * (m.head_dim + m.v_head_dim)
    yield Linear("attention.kv_b", "key, value", kv_norm.name, m.kv_lora_rank, width, hf=f"{hf}.kv_b_proj")
    yield Rotary("rotary query", m.heads * m.rope_head_dim)
    yield Rotary("rotary key", m.rope_head_dim, "replicated")
    yield Copy("heads", m.heads * (2 * qk_dim + m.v_head_dim))
    yield Attention(m.heads, m.heads, qk_dim, m.v_head_dim, m.sliding_window, full_share(m))
    inputs = m.heads * m.v_head_dim
    yield Linear("attention.out", "attention out", "attention", inputs, m.hidden, shard="row", hf=f"{hf}.o_proj")


def feed_forward(m: ModelSpec) -> Iterator[Component]:
    if not m.experts:
        yield MLP("mlp", "", "mlp_norm", m.hidden, m.ffn, m.mlp, m.mlp_bias, hf="mlp")
        return
    yield Experts("mlp", "mlp_norm", m.hidden, m.experts, m.top_k, m.expert_ffn)
    if m.shared_experts:
        width = m.shared_experts * m.expert_ffn
        yield MLP("mlp.shared", "shared ", "mlp_norm", m.hidden, width, m.mlp, hf="mlp.shared_experts")
    if m.shared_gate:
        yield SharedGate("mlp.shared_gate", m.hidden)


def saved_logits(m: ModelSpec) -> int:
    """Copies of a chunk of logits that the loss holds beside what softmax needs: the derivative of the cap."""
    return int(m.final_softcap > 0)


def logit_passes(m: ModelSpec) -> int:
    """Elementwise passes over the logits beside softmax: /, tanh, · and derivative of a cap, and their product."""
    return 5 * (m.final_softcap > 0)


def embedding_weights(m: ModelSpec) -> Iterator[Weight]:
    yield Weight("embed.weight", (m.vocab, m.hidden), 0, role="embedding", hf="model.embed_tokens.weight")
    if m.positions == "learned":
        yield Weight("positions.weight", (m.context, m.hidden), role="embedding")


def head_weights(m: ModelSpec) -> Iterator[Weight]:
    """Last norm and head; a tied head is no weight of its own."""
    yield from stream_norm(m, "norm", "model.norm", role="last_norm").weights()
    if m.scalar_head:
        score = Weight(SCORE, (1, m.hidden), gathered=True, matmul_token_share=1.0, init="score", role="head")
        yield replace(score, hf="score.weight")
    elif not m.tie_embeddings:
        yield Weight("head.weight", (m.vocab, m.hidden), 0, matmul_token_share=1.0, role="head", hf="lm_head.weight")


@functools.lru_cache(maxsize=256)
def root_weights(m: ModelSpec) -> tuple[Weight, ...]:
    """Outside blocks."""
    return (*embedding_weights(m), *head_weights(m))


@functools.lru_cache(maxsize=256)
def block_weights(m: ModelSpec) -> tuple[Weight, ...]:
    """Of one block, named within it, in the order of `GPT(m).named_parameters()`; of each kind, where blocks differ."""
    found = {weight.name: weight for kind, _ in m.kinds for component in block(kind) for weight in component.weights()}
    return tuple(found.values())


def layer_weights(m: ModelSpec, layer: int) -> Iterator[Weight]:
    """Of one block, named within the network."""
    inside = block_weights(m.at(layer))
    return (replace(weight, name=f"blocks.{layer}.{weight.name}", layer=layer) for weight in inside)


def weights(m: ModelSpec) -> list[Weight]:
    """All parameters, as `GPT(m).named_parameters()` has them."""
    inner = [weight for layer in range(m.layers) for weight in layer_weights(m, layer)]
    return [*embedding_weights(m), *inner, *head_weights(m)]


@functools.lru_cache(maxsize=256)
def by_inside_name(m: ModelSpec) -> dict[str, Weight]:
    """Weights by their name within a block, or within the network."""
    return {weight.name: weight for weight in (*embedding_weights(m), *block_weights(m), *head_weights(m))}


def find(m: ModelSpec, name: str) -> Weight:
    """The weight of a name within the network."""
    return by_inside_name(m)[name.split(".", 2)[2] if name.startswith("blocks.") else name]


# --- queries over the list -----------------------------------------------------------------------------------------


def linears(m: ModelSpec) -> list[Linear]:
    """Of one block, routers and routed experts aside; of each kind, where blocks differ."""
    found: dict[str, Linear] = {}
    for kind, _ in m.kinds:
        for component in block(kind):
            parts = (*component.up, component.down) if isinstance(component, MLP) else (component,)
            found |= {part.name: part for part in parts if isinstance(part, Linear)}
    return list(found.values())


@functools.lru_cache(maxsize=256)
def attention_core(m: ModelSpec) -> Attention:
    return next(component for component in block(m) if isinstance(component, Attention))


def attention_backend(m: ModelSpec, device: str) -> str:
    """`model.attention` on a kind of device; on a GPU 'auto' is resolved by measurements (model/attention.py)."""
    if m.attention == "auto" and device == "cpu":
        return "sdpa" if attention_core(m).fused else "reference"
    return m.attention


def experts(m: ModelSpec) -> Experts | None:
    return next((component for component in block(m) if isinstance(component, Experts)), None)


def readers(m: ModelSpec, source: Norm | Entry) -> int:
    """Products that read the output of a norm; routed experts read what the router has dispatched."""
    routers = 1 + m.shared_gate if isinstance(source, Norm) and source.feeds_router else 0
    return sum(linear.reads == source.name for linear in linears(m)) + routers


@dataclass(frozen=True)
class TokenCache:
    """What the KV cache keeps of a token in one layer: `vectors` of `width` numbers for each of `heads`."""

    heads: int
    width: int
    vectors: int = 2  # a key and a value


def token_cache(m: ModelSpec) -> TokenCache:
    if m.kv_lora_rank:  # the latent vector and one rotary key, for all heads
        return TokenCache(1, m.kv_lora_rank + m.rope_head_dim, vectors=1)
    return TokenCache(m.kv_heads, m.head_dim)


def decode_flops_per_key(m: ModelSpec) -> int:
    """Of one query and layer while decoding: latent attention works in the latent space (absorbed projections)."""
    if m.kv_lora_rank:
        return 2 * m.heads * (2 * m.kv_lora_rank + m.rope_head_dim)
    return attention_core(m).flops_per_key
