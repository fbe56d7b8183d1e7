"""Low-rank adapters (LoRA, DoRA, QLoRA): their keys, and their weights as components.py describes the network's.

    LoRA     y = W·x + scale · B·A·x                     W frozen, A (rank, in) and B (out, rank) trained
    DoRA     y = m / ‖W + scale · B·A‖ · (W·x + scale · B·A·x)    the norm of each output row, m trained as well
    QLoRA    either, over frozen weights in 4 or 8 bits

Several named adapters can stand over one base: the one that a run trains (`RunSpec.adapters`), and with reinforcement
learning those of a critic and of a reward model, each with a scalar head of its own (`ScalarAdapter`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from . import components
from .components import Weight
from .errors import SpecError
from .schema import Section, opt

if TYPE_CHECKING:
    from .model import ModelSpec
    from .run import RunSpec

BASES = ("", "int8", "nf4")
DEFAULT_ADAPTER = "default"  # as PEFT names the first
CRITIC_ADAPTER, REWARD_ADAPTER = "critic", "reward"
ADAPTERS = "adapters"  # the module of a linear layer that holds them: blocks.0.attention.q.adapters.default.lora_A
SCALAR_HEADS = "scalar_heads"  # the module of a network that holds those of adapters: scalar_heads.critic.weight
NF4_BLOCK, NF4_GROUP = 64, 256  # numbers with one scale; scales with one scale of their own
MAX_PIECES = 8  # of a quantized weight
ROUTED = ("mlp.router", "mlp.gate", "mlp.up", "mlp.down")  # of a mixture of experts


@dataclass(frozen=True)
class LoraSpec(Section):
    """Low-rank adapters: the weights of the model are frozen, and W + scale · B · A is trained through A and B."""

    section: ClassVar[str] = "lora"

    rank: int = opt(0, "rank of the adapters (0: all weights are trained)", ge=0)
    alpha: float = opt(0.0, "scale = alpha / rank (0: twice the rank)", ge=0)
    targets: list[str] = opt(
        [], "linear layers that get an adapter, e.g. attention.q, mlp.down, or attention for all of it (empty: all)"
    )
    rslora: bool = opt(False, "scale = alpha / √rank")
    dora: bool = opt(False, "train the norm of every output row as well (DoRA)")
    base: str = opt("", "format of the frozen weights (empty: precision.weights; nf4: QLoRA)", choices=BASES)
    init: str = opt("", "folder of an adapter in PEFT's format to start from (empty: A random, B zero)")

    def check(self) -> None:
        if not self.alpha:
            self.derive("alpha", 2.0 * self.rank)
        if not self.rank:
            given = {"base": self.base, "dora": self.dora, "rslora": self.rslora, "init": self.init}
            for key, value in given.items():
                if value:
                    raise SpecError(f"lora.{key} needs adapters: set lora.rank, e.g. 16")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class ScalarAdapter:
    """An adapter with a scalar head over the base of a policy: a critic, which is trained, or a reward model."""

    name: str
    lora: LoraSpec
    trained: bool


def adapter_of(name: str) -> str:
    """The adapter that a weight belongs to; empty for the weights of the base."""
    _, found, rest = name.partition(f".{ADAPTERS}.")
    if not found:
        _, found, rest = name.partition(f"{SCALAR_HEADS}.")
    return rest.partition(".")[0] if found else ""


def check_lora(run: RunSpec) -> None:
    """Targets that the model has, and layouts in which weights can be frozen."""
    lora, layout = run.lora, run.parallel
    if not lora.rank:
        return
    target_linears(run.model, lora)
    if run.model.mlp_layers:
        raise SpecError("lora.rank does not go with model.mlp_layers: layers that differ have no adapters")
    if layout.engine == "deepspeed":
        raise SpecError("lora.rank needs parallel.engine = 'native': DeepSpeed would train all weights")
    if layout.strategy == "fsdp1":
        raise SpecError("lora.rank does not combine with parallel.strategy = 'fsdp1'; use 'fsdp2'")
    if lora.base:
        check_base_pieces(run)
    if lora.init and run.align.needs_reference and not run.align.reference:
        raise SpecError(
            f"lora.init with align.method = {run.align.method!r}: name the model that the adapter made as "
            "align.reference (`lmworks checkpoint merge` writes it)"
        )
    if run.precision.dtype == "fp8":
        raise SpecError("lora.rank does not combine with precision.dtype = 'fp8'; use 'bf16'")


def check_base_pieces(run: RunSpec) -> None:
    tp = run.parallel.tp
    for name, pieces in uneven_pieces(run.model, tp).items():
        raise SpecError(
            f"lora.base = {run.lora.base!r} quantizes {name} in {pieces} pieces, which parallel.tp = {tp} does not "
            "divide"
        )


def uneven_pieces(model: ModelSpec, tp: int) -> dict[str, int]:
    """Quantized weights whose pieces `tp` ranks cannot share evenly, and how many pieces each has."""
    linears = {f"{linear.name}.weight" for linear in components.linears(model)}
    sharded = [w for w in components.block_weights(model) if w.name in linears and w.sharded(tp) is not None]
    pieces = {weight.name: quantized_pieces(weight, weight.shape)[1] for weight in sharded}
    return {name: count for name, count in pieces.items() if count % tp}


def target_linears(model: ModelSpec, lora: LoraSpec) -> list[components.Linear]:
    """The linear layers of a block that get an adapter."""
    linears = components.linears(model)
    for target in lora.targets:
        if not any(matches(linear.name, target) for linear in linears):
            routed = model.experts and target in ROUTED
            why = "routed experts have no adapters" if routed else "this model has no such linear layer"
            raise SpecError(f"lora.targets: {target!r}: {why}; use {', '.join(linear.name for linear in linears)}")
    return [linear for linear in linears if not lora.targets or any(matches(linear.name, t) for t in lora.targets)]


def matches(name: str, target: str) -> bool:
    """A layer's name, or one that stands before its dot."""
    return f"{name}.".startswith(f"{target}.")


def adapter_weights(linear: components.Linear, lora: LoraSpec, adapter: str) -> Iterator[Weight]:
    """A, B and DoRA's magnitudes of one layer, named within its block.

    Tensor parallelism shards B (and the magnitudes) as the rows of a column-parallel weight, A as the columns of a
    row-parallel one. The other matrix is replicated, and a rank has a part of its gradient.
    """
    prefix, row = f"{linear.name}.{ADAPTERS}.{adapter}.", linear.shard == "row"
    rows = 0 if linear.shard in ("column", "kv_heads") else None
    down = Weight(f"{prefix}lora_A", (lora.rank, linear.inputs), 1 if row else None, in_tp_region=not row)
    up = Weight(f"{prefix}lora_B", (linear.outputs, lora.rank), rows, linear.kv_heads, in_tp_region=True, init="zeros")
    yield from (down, up)
    if lora.dora:
        yield Weight(f"{prefix}magnitude", (linear.outputs,), rows, linear.kv_heads, in_tp_region=True)


def quantized_pieces(weight: Weight, local: tuple[int, ...]) -> tuple[int, int]:
    """(dim, pieces): how the shard of shape `local` is cut, each piece quantized on its own.

    A whole weight is cut into 8 along the dimension that tensor parallelism shards (or 4, 2, 1, as it divides), so that
    ranks hold whole pieces, and numbers do not depend on the layout.
    """
    if weight.tp_dim is None:
        return 0, 1
    whole, dim = weight.shape, weight.tp_dim
    pieces = next(count for count in (MAX_PIECES, 4, 2, 1) if whole[dim] % count == 0)
    return dim, pieces * local[dim] // whole[dim]


def quantized_parts(weight: Weight, local: tuple[int, ...], base: str) -> tuple[tuple[int, int], ...]:
    """(numbers, bytes of each) of what a shard of a frozen weight is stored in by the format `lora.base`: codes, then
    scales (kernels/nf4.py, model/quantized_weight.py)."""
    dim, pieces = quantized_pieces(weight, local)
    size = math.prod(local) // pieces
    if base == "int8":
        return (pieces * size, 1), (pieces * local[0] // (pieces if dim == 0 else 1), 4)
    blocks = -(-size // NF4_BLOCK)
    return (
        (pieces * blocks * NF4_BLOCK // 2, 1),
        (pieces * blocks, 1),
        (pieces * -(-blocks // NF4_GROUP), 4),
        (pieces, 4),
    )


def quantized_bytes(weight: Weight, local: tuple[int, ...], base: str) -> int:
    return sum(count * each for count, each in quantized_parts(weight, local, base))


def block_adapter_weights(model: ModelSpec, lora: LoraSpec, adapters: tuple[str, ...]) -> Iterator[Weight]:
    """Of one block, in the order of its layers."""
    for linear in target_linears(model, lora) if lora.rank else ():
        for adapter in adapters:
            yield from adapter_weights(linear, lora, adapter)
