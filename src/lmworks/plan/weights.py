"""Every weight of a model by name and shape, in the order of the network: what sharding cuts, known without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..spec import ModelSpec

ROOT = -1  # the unit of weights outside blocks: embedding, last norm, head


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    unit: int  # the block it belongs to, or ROOT

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.size // self.rows

    @property
    def size(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product


def weights(model: ModelSpec) -> list[Weight]:
    """As `GPT(model).named_parameters()` has them; a tied head is no weight of its own."""
    found = [Weight("embed.weight", (model.vocab, model.hidden), ROOT)]
    if model.positions == "learned":
        found.append(Weight("positions.weight", (model.context, model.hidden), ROOT))
    for layer in range(model.layers):
        found += [Weight(f"blocks.{layer}.{name}", shape, layer) for name, shape in block(model)]
    found += [Weight(f"norm.{name}", shape, ROOT) for name, shape in norm(model)]
    if not model.tie_embeddings:
        found.append(Weight("head.weight", (model.vocab, model.hidden), ROOT))
    return found


Named = Iterator[tuple[str, tuple[int, ...]]]


def block(m: ModelSpec) -> Named:
    yield from within("attention_norm", norm(m))
    for name, wide in (("q", m.q_dim), ("k", m.kv_dim), ("v", m.kv_dim)):
        yield from within(f"attention.{name}", linear(m.hidden, wide, m.qkv_bias))
    yield from within("attention.out", linear(m.q_dim, m.hidden, m.bias))
    if m.qk_norm:
        yield "attention.q_norm.weight", (m.head_dim,)
        yield "attention.k_norm.weight", (m.head_dim,)
    yield from within("mlp_norm", norm(m))
    if not m.experts:
        yield from within("mlp", mlp(m, m.ffn))
        return
    yield "mlp.gate", (m.experts, m.expert_ffn, m.hidden)
    yield "mlp.up", (m.experts, m.expert_ffn, m.hidden)
    yield "mlp.down", (m.experts, m.hidden, m.expert_ffn)
    yield "mlp.router.weight", (m.experts, m.hidden)
    if m.shared_experts:
        yield from within("mlp.shared", mlp(m, m.shared_experts * m.expert_ffn))


def mlp(m: ModelSpec, width: int) -> Named:
    for name in ("gate", "up") if m.mlp == "swiglu" else ("up",):
        yield from within(name, linear(m.hidden, width, m.bias))
    yield from within("down", linear(width, m.hidden, m.bias))


def norm(m: ModelSpec) -> Named:
    yield "weight", (m.hidden,)
    if m.norm == "layer" and m.bias:
        yield "bias", (m.hidden,)


def linear(inputs: int, outputs: int, bias: bool) -> Named:
    yield "weight", (outputs, inputs)
    if bias:
        yield "bias", (outputs,)


def within(prefix: str, named: Named) -> Named:
    return ((f"{prefix}.{name}", shape) for name, shape in named)
