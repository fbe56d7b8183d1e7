"""Every weight of a model by name and shape, in the order of the network: what sharding cuts, known without torch.

A rank may hold a stage of a pipeline and a slice of each weight: `stage_weights` says which, as
`parallel.tensor_parallel` and `parallel.expert_parallel` cut them. Data parallelism comes after that and cuts what is
left (`shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...spec import ModelSpec, ParallelSpec, RunSpec
from ..pipelines.stages import Stage

ROOT = -1  # the unit of weights outside blocks: embedding, last norm, head


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    unit: int  # the block it belongs to, or ROOT
    expert: bool = False  # other experts lie on other ranks: its gradient meets over "edp"
    partial: bool = False  # whole on every tensor-parallel rank, each of which finds a part of its gradient

    @property
    def inside(self) -> str:
        """Its name within the block, or within the network."""
        return self.name if self.unit == ROOT else self.name.split(".", 2)[2]

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


def weights(model: ModelSpec, stage: Stage | None = None) -> list[Weight]:
    """As `GPT(model).named_parameters()` has them, of all or of one stage; a tied head is no weight of its own."""
    first, last = (stage.first, stage.last) if stage else (True, True)
    found = []
    if first or (last and model.tie_embeddings):
        found.append(Weight("embed.weight", (model.vocab, model.hidden), ROOT))
    if first and model.positions == "learned":
        found.append(Weight("positions.weight", (model.context, model.hidden), ROOT))
    for layer in stage.layers if stage else range(model.layers):
        found += [Weight(f"blocks.{layer}.{name}", shape, layer) for name, shape in block(model)]
    if last:
        found += [Weight(f"norm.{name}", shape, ROOT) for name, shape in norm(model)]
        if not model.tie_embeddings:
            found.append(Weight("head.weight", (model.vocab, model.hidden), ROOT))
    return found


def stage_weights(spec: RunSpec, stage: Stage | None = None) -> list[Weight]:
    """What tensor and expert parallelism leave of each weight, before data parallelism: alike on all their ranks."""
    return [local_weight(weight, spec.model, spec.parallel) for weight in weights(spec.model, stage)]


def local_weight(weight: Weight, model: ModelSpec, layout: ParallelSpec) -> Weight:
    shape = list(weight.shape)
    expert = layout.ep > 1 and weight.inside in EXPERTS
    if expert:
        shape[0] //= layout.ep
    if layout.tp > 1:
        dim = tensor_dim(weight.inside, model, layout.tp)
        if dim is not None:
            shape[dim] //= layout.tp
        elif is_partial(weight.inside, layout.sp):
            weight = replace(weight, partial=True)
    return replace(weight, shape=tuple(shape), expert=expert)


EXPERTS = {"mlp.gate": 1, "mlp.up": 1, "mlp.down": 2}  # (experts, …) → the dimension of their ffn
COLUMNS = ("embed", "head", "attention.q", "mlp.gate", "mlp.up", "mlp.shared.gate", "mlp.shared.up")  # cut by output
ROWS = ("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight")  # cut by input
KEYS = ("attention.k", "attention.v")  # cut by heads, or whole where ranks outnumber them


def tensor_dim(inside: str, model: ModelSpec, tp: int) -> int | None:
    """The dimension that tensor parallelism cuts; None: the weight is whole on every rank."""
    module = inside.rpartition(".")[0]
    if inside in EXPERTS:
        return EXPERTS[inside]
    if module in COLUMNS or (module in KEYS and model.kv_heads % tp == 0):
        return 0
    return 1 if inside in ROWS else None


def is_partial(inside: str, sp: bool) -> bool:
    """Of a whole weight. With sequence parallelism every rank sees its own positions, so that goes for all of them."""
    module = inside.rpartition(".")[0]
    return sp or module in (*KEYS, "attention.q_norm", "attention.k_norm", "mlp.router")


Named = Iterator[tuple[str, tuple[int, ...]]]


def block(m: ModelSpec) -> Named:
    yield from prefixed("attention_norm", norm(m))
    for name, wide in (("q", m.q_dim), ("k", m.kv_dim), ("v", m.kv_dim)):
        yield from prefixed(f"attention.{name}", linear(m.hidden, wide, m.qkv_bias))
    yield from prefixed("attention.out", linear(m.q_dim, m.hidden, m.bias))
    if m.qk_norm:
        yield "attention.q_norm.weight", (m.head_dim,)
        yield "attention.k_norm.weight", (m.head_dim,)
    yield from prefixed("mlp_norm", norm(m))
    if not m.experts:
        yield from prefixed("mlp", mlp(m, m.ffn))
        return
    yield "mlp.gate", (m.experts, m.expert_ffn, m.hidden)
    yield "mlp.up", (m.experts, m.expert_ffn, m.hidden)
    yield "mlp.down", (m.experts, m.hidden, m.expert_ffn)
    yield "mlp.router.weight", (m.experts, m.hidden)
    if m.shared_experts:
        yield from prefixed("mlp.shared", mlp(m, m.shared_experts * m.expert_ffn))


def mlp(m: ModelSpec, width: int) -> Named:
    for name in ("gate", "up") if m.mlp == "swiglu" else ("up",):
        yield from prefixed(name, linear(m.hidden, width, m.bias))
    yield from prefixed("down", linear(width, m.hidden, m.bias))


def norm(m: ModelSpec) -> Named:
    yield "weight", (m.hidden,)
    if m.norm == "layer" and m.bias:
        yield "bias", (m.hidden,)


def linear(inputs: int, outputs: int, bias: bool) -> Named:
    yield "weight", (outputs, inputs)
    if bias:
        yield "bias", (outputs,)


def prefixed(prefix: str, named: Named) -> Named:
    return ((f"{prefix}.{name}", shape) for name, shape in named)
