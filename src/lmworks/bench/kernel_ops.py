"""The operations of a training step as `lmworks bench kernels` measures them: what each must move and compute at least,
and who can do it.

An op is one function: it gives its cases at the shape of a model. Bytes and FLOPs are those of the best conceivable
implementation: every input is read once, every result written once, and nothing in between touches memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import rms_norm, rope, swiglu
from ..kernels.training import (
    adamw,
    add_norm,
    cross_entropy,
    cublas,
    flash_attention,
    float8,
    swiglu_fp8,
)
from ..model.attention import Pattern, flex, flex_block_mask
from ..model.rope import tables
from ..plan.flops import keys_per_query
from ..spec import ModelSpec

Work = Callable[[], object]
FORWARD, BOTH = "forward", "forward + backward"
DOCUMENT = 1024  # tokens of one, where several share a sequence
LONGER = (2048, 8192, 32_768)  # positions at which attention is measured on a GPU beside the model's own
UPDATED = 2**28  # weights of one update at most: beyond that its time grows with them and its rate does not


@dataclass(frozen=True)
class Place:
    """Where and at which shape: a model's, with so many sequences."""

    name: str
    model: ModelSpec
    batch: int
    seq: int
    device: torch.device
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Case:
    op: str  # as `kernels.dispatch` knows it
    part: str
    shape: dict[str, int]  # by which an implementation is chosen
    bytes: float
    flops: float
    make: Callable[[], Mapping[str, Work]]  # what is timed, by implementation; memory is taken here
    choices: tuple[str, ...] = ()  # implementations that the op itself may take: the fastest is recorded


def both_ways(
    op: str,
    shape: dict[str, int],
    bytes_: tuple[float, float],
    flops: tuple[float, float],
    inputs: Callable[[], list[Tensor]],
    ways: Mapping[str, Callable[..., Any]],
    choices: tuple[str, ...],
) -> Iterator[Case]:
    """A differentiable op: its forward pass, and both. `bytes_` and `flops` are of either alone."""
    yield Case(op, FORWARD, shape, bytes_[0], flops[0], partial(works, inputs, ways, FORWARD), choices)
    yield Case(op, BOTH, shape, sum(bytes_), sum(flops), partial(works, inputs, ways, BOTH), choices)


def works(inputs: Callable[[], list[Tensor]], ways: Mapping[str, Callable[..., Any]], part: str) -> dict[str, Work]:
    leaves = [x.requires_grad_() for x in inputs()]
    gradients: list[Tensor] = []  # of the results, drawn by whoever runs first: all get the same
    return {name: partial(run, way, leaves, gradients, part) for name, way in ways.items()}


def run(way: Callable[..., Any], leaves: list[Tensor], gradients: list[Tensor], part: str) -> object:
    """The graph is recorded in either case, as in training."""
    results = way(*leaves)
    if part == FORWARD:
        return results
    results = results if isinstance(results, tuple) else (results,)
    if not gradients:
        gradients += [torch.randn_like(result) if result.dim() else torch.ones_like(result) for result in results]
    return torch.autograd.grad(results, leaves, gradients)


def with_compiled(
    place: Place, ways: dict[str, Callable[..., Any]], formula: str = "torch"
) -> dict[str, Callable[..., Any]]:
    """The formula by Inductor too. Not on a CPU, where it takes half a minute to build and is chosen nowhere."""
    if place.device.type == "cpu":
        return ways
    way = ways[formula]
    return {**ways, "compile": torch.compile(lambda *inputs: way(*inputs), dynamic=False)}


def of_device(place: Place, names: tuple[str, ...]) -> tuple[str, ...]:
    return names if place.device.type == "cuda" else ("torch",)


def implementations(place: Place, op: Callable[..., Any], names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """An op of ours in every implementation that this device has."""
    return {name: partial(op, implementation=name) for name in of_device(place, names)}


# --- ops ------------------------------------------------------------------------------------------------


def attention(place: Place) -> Iterator[Case]:
    """Causal attention: PyTorch's kernels by name, what it takes by itself, and ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ways = implementations(place, flash_attention.flash_attention, flash_attention.IMPLEMENTATIONS)
    choices = tuple(ways)
    if place.device.type == "cuda":
        for name in ("cudnn", "flash", "efficient"):
            ways[name] = partial(with_backend, sdpa_kernel, SDPBackend.__members__[f"{name.upper()}_ATTENTION"])
    longer = LONGER if place.device.type == "cuda" and place.model.context >= min(LONGER) else ()
    for seq in sorted({place.seq, *longer}):
        yield from attention_cases("flash_attention", place, seq, keys_per_query(seq), ways, choices)


def with_backend(only: Callable[..., Any], backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with only(backend):
        return flash_attention.with_sdpa(q, k, v, window=0, bounds=None)


def sparse_attention(place: Place) -> Iterator[Case]:
    """Documents that share a sequence: FlexAttention (on a CPU a mask), and ours."""
    batch, seq, length = place.batch, place.seq, min(DOCUMENT, place.seq // 2)
    documents = (torch.arange(seq, device=place.device) // length).repeat(batch, 1)
    ways = implementations(place, partial(flash_attention.flash_attention, documents=documents),
                           flash_attention.IMPLEMENTATIONS)  # fmt: skip
    if place.device.type == "cuda":  # what PyTorch has for it, and the step takes otherwise
        pattern = Pattern(documents=documents)
        mask = flex_block_mask(pattern, batch, seq, seq, place.device)
        ways["torch"] = partial(flex, pattern=pattern, block_mask=mask)
    keys = keys_per_query(length)
    yield from attention_cases("sparse_attention", place, seq, keys, ways, tuple(ways))


def attention_cases(
    op: str, place: Place, seq: int, keys: float, ways: Mapping[str, Callable[..., Any]], choices: tuple[str, ...]
) -> Iterator[Case]:
    """Two products forward, five backward, as scores are made again; all scores that are seen, `keys` of a query."""
    model, batch = place.model, max(1, place.tokens // seq)
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    flops = 4.0 * batch * seq * heads * head_dim * keys
    read = place.dtype.itemsize * batch * seq * head_dim * 2.0 * (heads + kv_heads)  # q, k, v and the result

    def inputs() -> list[Tensor]:
        return [place.drawn(batch, seq, count, head_dim) for count in (heads, kv_heads, kv_heads)]

    shape = {"seq": seq, "head_dim": head_dim}
    yield from both_ways(op, shape, (read, 2 * read), (flops, 2.5 * flops), inputs, ways, choices)


def norm(place: Place) -> Iterator[Case]:
    """Forward reads x and writes y; backward reads x and a gradient and writes one."""
    if place.model.norm != "rms":
        return
    tokens, hidden = place.tokens, place.model.hidden
    x = place.dtype.itemsize * tokens * hidden
    ways = implementations(place, partial(rms_norm.rms_norm, eps=1e-5), rms_norm.IMPLEMENTATIONS)
    choices, ways = tuple(ways), with_compiled(place, ways)
    if place.device.type == "cuda":  # beside the others, not one of the choices: it has to be built
        ways[rms_norm.NATIVE] = partial(rms_norm.rms_norm, eps=1e-5, implementation=rms_norm.NATIVE)

    def inputs() -> list[Tensor]:
        return [place.drawn(tokens, hidden), place.drawn(hidden)]

    shape = {"tokens": tokens, "hidden": hidden}
    yield from both_ways("rms_norm", shape, (2 * x, 3 * x), (0, 0), inputs, ways, choices)


def residual_norm(place: Place) -> Iterator[Case]:
    """Reads two and writes two; backward reads two gradients and the sum, and writes one gradient for both."""
    if place.model.norm != "rms":
        return
    tokens, hidden = place.tokens, place.model.hidden
    x = place.dtype.itemsize * tokens * hidden
    ways = implementations(place, partial(add_norm.add_rms_norm, eps=1e-5), add_norm.IMPLEMENTATIONS)
    choices, ways = tuple(ways), with_compiled(place, ways)

    def inputs() -> list[Tensor]:
        return [place.drawn(tokens, hidden), place.drawn(tokens, hidden), place.drawn(hidden)]

    shape = {"tokens": tokens, "hidden": hidden}
    yield from both_ways("add_rms_norm", shape, (4 * x, 4 * x), (0, 0), inputs, ways, choices)


def rotation(place: Place) -> Iterator[Case]:
    """Queries and keys in and out, and a table of cosines and sines (fp32) that all heads share."""
    model, tokens = place.model, place.tokens
    if model.positions != "rope":
        return
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    cos, sin = tables(model, torch.arange(place.seq, device=place.device))
    moved = 2.0 * place.dtype.itemsize * tokens * (heads + kv_heads) * head_dim + 8.0 * place.seq * head_dim

    def inputs() -> list[Tensor]:
        return [place.drawn(place.batch, place.seq, count, head_dim) for count in (heads, kv_heads)]

    ways = implementations(place, partial(rope.rotate_both, cos=cos, sin=sin), rope.IMPLEMENTATIONS)
    choices, ways = tuple(ways), with_compiled(place, ways)
    shape = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    yield from both_ways("rope", shape, (moved, moved), (0, 0), inputs, ways, choices)


def gated(place: Place) -> Iterator[Case]:
    """Reads gate and up and writes their product; backward reads three and writes two."""
    if place.model.mlp != "swiglu":
        return
    tokens, ffn = place.tokens, place.model.ffn
    x = place.dtype.itemsize * tokens * ffn
    ways = implementations(place, swiglu.swiglu, swiglu.IMPLEMENTATIONS)
    choices, ways = tuple(ways), with_compiled(place, ways)

    def inputs() -> list[Tensor]:
        return [place.drawn(tokens, ffn), place.drawn(tokens, ffn)]

    shape = {"tokens": tokens, "ffn": ffn}
    yield from both_ways("swiglu", shape, (3 * x, 5 * x), (0, 0), inputs, ways, choices)


def gated_in_eight_bits(place: Place) -> Iterator[Case]:
    """The same beside products of 8 bits, both ways: gate and up are read, their product is written, and in the
    backward pass with a gradient three are; twice, as a scale is known only then. Five are written then, three turned.
    """
    if place.model.mlp != "swiglu":
        return
    tokens, ffn = place.tokens, place.model.ffn
    moved = (2.0 * (2 + 3) * place.dtype.itemsize + 1 + 5) * tokens * ffn

    def make() -> Mapping[str, Work]:
        gate, up, grad = (place.drawn(tokens, ffn) for _ in range(3))

        def both(there: Callable[..., Any], back: Callable[..., Any]) -> object:
            values, scale = there(gate, up)
            return values, back(grad, gate, up, scale)

        ours = {} if place.device.type == "cpu" else {"triton": partial(both, swiglu_fp8.forward, swiglu_fp8.backward)}
        formulas = compiled(place, swiglu_fp8.forward_reference), compiled(place, swiglu_fp8.backward_reference)
        return {"torch": partial(both, *formulas), **ours}

    shape = {"tokens": tokens, "ffn": ffn}
    yield Case(swiglu_fp8.OP, BOTH, shape, moved, 0, make, of_device(place, swiglu_fp8.IMPLEMENTATIONS))


def joined(place: Place) -> Iterator[Case]:
    """What an MLP has beside its products, at the end of them: GELU, its gradient, and the sum that follows."""
    if place.model.mlp != "gelu":
        return
    tokens, hidden, ffn = place.tokens, place.model.hidden, place.model.ffn
    shape = {"hidden": hidden, "ffn": ffn}
    narrow, wide, weight = tokens * hidden, tokens * ffn, hidden * ffn
    ops: tuple[tuple[str, float, Callable[..., Any], tuple[tuple[int, ...] | None, ...]], ...] = (
        ("linear_gelu", narrow + 2 * wide, cublas.linear_gelu_reference, ((tokens, hidden), (ffn, hidden), None)),
        ("linear_dgelu", narrow + 2 * wide, cublas.linear_dgelu_reference,
         ((tokens, hidden), (hidden, ffn), (tokens, ffn))),
        ("linear_add", 2 * narrow + wide, cublas.linear_add_reference,
         ((tokens, ffn), (hidden, ffn), None, (tokens, hidden))),
    )  # fmt: skip
    for op, moved, formula, shapes in ops:
        make = partial(joining, place, getattr(cublas, op), formula, shapes)
        bytes_, flops = place.dtype.itemsize * (moved + weight), 2.0 * tokens * weight
        yield Case(op, FORWARD, shape, bytes_, flops, make, of_device(place, cublas.IMPLEMENTATIONS))


def joining(
    place: Place, op: Callable[..., Any], formula: Callable[..., Any], shapes: tuple[tuple[int, ...] | None, ...]
) -> Mapping[str, Work]:
    given = [None if shape is None else place.drawn(*shape) for shape in shapes]
    return by_cublas(partial(compiled(place, formula), *given), partial(op, *given), place)


def by_cublas(formula: Work, in_a_way: Callable[[int], object], place: Place) -> Mapping[str, Work]:
    """By all ways that cuBLAS knows, where it is there. Beside them the formula."""
    ways = {} if place.device.type == "cpu" else {name: partial(in_a_way, way) for way, name in enumerate(cublas.WAYS)}
    return {"torch": formula, **ways}


def compiled(place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
    """As a compiled block has it; on a CPU as it is."""
    return function if place.device.type == "cpu" else torch.compile(function, dynamic=False)


def loss(place: Place) -> Iterator[Case]:
    """Head and cross-entropy, forward and backward: three products; in chunks (ours), and unfused beside them."""
    tokens, vocab, hidden = place.tokens, place.model.vocab, place.model.hidden
    moved = place.dtype.itemsize * 2.0 * (tokens + vocab) * hidden  # states and weights, and their gradients

    def make() -> Mapping[str, Work]:
        targets = torch.randint(0, vocab, (tokens,), device=place.device)
        ours = implementations(place, cross_entropy.linear_cross_entropy, cross_entropy.IMPLEMENTATIONS)
        ways = with_compiled(place, {**ours, "unfused": cross_entropy.reference}, "unfused")
        called = {name: partial(with_targets, way, targets) for name, way in ways.items()}
        return works(lambda: [place.drawn(tokens, hidden), place.drawn(vocab, hidden)], called, BOTH)

    shape = {"tokens": tokens, "vocab": vocab, "hidden": hidden}
    choices = of_device(place, cross_entropy.IMPLEMENTATIONS)
    yield Case("linear_cross_entropy", BOTH, shape, moved, 6.0 * tokens * vocab * hidden, make, choices)


def with_targets(way: Callable[..., Tensor], targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return way(hidden, weight, targets)


def eight_bits(place: Place) -> Iterator[Case]:
    """A weight of the MLP to e4m3: with one scale everything is read twice; and back."""
    rows, columns = place.model.ffn, place.model.hidden
    count, wide = rows * columns, place.dtype.itemsize
    shape = {"rows": rows, "columns": columns}
    ops: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("quantize", 2 * wide + 1, {}),
        ("quantize, transposed", 2 * wide + 1, {"transposed": True}),
        ("quantize_rows", wide + 1, {"by_row": True}),
    )
    for op, width, changes in ops:
        make = partial(quantizing, place, rows, columns, changes)
        choices = () if "transposed" in changes else of_device(place, float8.IMPLEMENTATIONS)
        yield Case(op, FORWARD, shape, width * count, 0, make, choices)
    back = partial(dequantizing, place, rows, columns)
    yield Case("dequantize", FORWARD, shape, (1 + wide) * count, 0, back, of_device(place, float8.IMPLEMENTATIONS))


def quantizing(place: Place, rows: int, columns: int, changes: dict[str, Any]) -> Mapping[str, Work]:
    x = place.drawn(rows, columns)
    ways = implementations(place, partial(float8.quantize, **changes), float8.IMPLEMENTATIONS)
    if not changes:
        ways = with_compiled(place, ways)
    return {name: partial(way, x) for name, way in ways.items()}


def dequantizing(place: Place, rows: int, columns: int) -> Mapping[str, Work]:
    small = float8.quantize(place.drawn(rows, columns))
    ways = implementations(place, partial(float8.dequantize, dtype=place.dtype), float8.IMPLEMENTATIONS)
    return {name: partial(way, small) for name, way in ways.items()}


def update(place: Place) -> Iterator[Case]:
    """AdamW: reads weight, gradient and two moments, writes all but the gradient. In fp32, and with bf16 weights that
    keep 16 more bits beside them."""
    count = min(UPDATED, place.model.params)
    shape = {"weights": count}
    yield Case("adamw", "fp32", shape, 28.0 * count, 0, partial(updating, place, count, torch.float32))
    if place.device.type == "cuda":
        yield Case("adamw", "split master", shape, 26.0 * count, 0, partial(updating, place, count, torch.bfloat16))


def updating(place: Place, count: int, dtype: torch.dtype) -> Mapping[str, Work]:
    weight = torch.zeros(count, dtype=dtype, device=place.device)
    grad = torch.ones_like(weight)
    mean, square = torch.zeros(count, device=place.device), torch.zeros(count, device=place.device)
    low = None if dtype == torch.float32 else torch.zeros(count, dtype=torch.int16, device=place.device)
    slot = adamw.Slot(weight, grad, torch.ones((), device=place.device), 0, mean, square, low)
    ours = "triton" if place.device.type == "cuda" else "torch"
    found: dict[str, Work] = {ours: partial(adamw.adamw, [slot], adamw.Rule(1e-3), implementation=ours)}
    if dtype == torch.float32:
        parameter = torch.nn.Parameter(weight)
        parameter.grad = grad
        found["fused"] = torch.optim.AdamW([parameter], fused=True).step
    return found


# Each gives no case where a model does without it: GPT-2 has no SwiGLU.
OPS: dict[str, Callable[[Place], Iterator[Case]]] = {
    "linear_cross_entropy": loss,
    "attention": attention,
    "sparse_attention": sparse_attention,
    "rms_norm": norm,
    "add_rms_norm": residual_norm,
    "rope": rotation,
    "swiglu": gated,
    "swiglu_fp8": gated_in_eight_bits,
    "gelu": joined,
    "fp8": eight_bits,
    "adamw": update,
}
