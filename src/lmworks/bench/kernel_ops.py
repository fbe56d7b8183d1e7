"""The ops of a training step for `lmworks bench kernels`: minimal bytes and FLOPs of each, and its implementations.

An op is one function that yields its cases at the shape of a model. Bytes and FLOPs are those of a perfectly fused
implementation: every input is read once, every result written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import rms_norm, rope, swiglu
from ..kernels.training import adamw, cross_entropy, cublas, flash_attention, float8, permute, swiglu_fp8
from ..model.attention import Pattern, flex, flex_block_mask
from ..model.rope import tables
from ..plan.flops import keys_per_query
from ..spec import ModelSpec

TimedCall = Callable[[], object]
FORWARD, BOTH = "forward", "forward + backward"
DOCUMENT = 1024  # tokens of a document in a packed sequence
LONG_SEQS = (2048, 8192, 32_768)  # further sequence lengths of attention on a GPU
MAX_UPDATED = 2**28  # weights per update at most: above, the rate is constant


@dataclass(frozen=True)
class OpConfig:
    """A model with batch size, sequence length, device and dtype."""

    name: str
    model: ModelSpec
    batch: int
    seq: int
    device: torch.device
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Case:
    op: str  # the name in `kernels.dispatch`
    part: str
    shape: dict[str, int]  # the key of the choice of implementation
    bytes: float
    flops: float
    make: Callable[[], Mapping[str, TimedCall]]  # the timed calls by implementation; allocates memory
    choices: tuple[str, ...] = ()  # implementations that training may use: the fastest is recorded


def forward_backward_cases(
    op: str,
    shape: dict[str, int],
    bytes_: tuple[float, float],
    flops: tuple[float, float],
    inputs: Callable[[], list[Tensor]],
    variants: Mapping[str, Callable[..., Any]],
    choices: tuple[str, ...],
) -> Iterator[Case]:
    """A differentiable op: forward, and forward + backward. `bytes_` and `flops`: (forward, backward)."""
    yield Case(op, FORWARD, shape, bytes_[0], flops[0], partial(timed_calls, inputs, variants, FORWARD), choices)
    yield Case(op, BOTH, shape, sum(bytes_), sum(flops), partial(timed_calls, inputs, variants, BOTH), choices)


def timed_calls(
    inputs: Callable[[], list[Tensor]], variants: Mapping[str, Callable[..., Any]], part: str
) -> dict[str, TimedCall]:
    leaves = [x.requires_grad_() for x in inputs()]
    gradients: list[Tensor] = []  # of the results, made by the first run and shared by all
    return {name: partial(run, variant, leaves, gradients, part) for name, variant in variants.items()}


def run(variant: Callable[..., Any], leaves: list[Tensor], gradients: list[Tensor], part: str) -> object:
    """With an autograd graph in either case, as in training."""
    results = variant(*leaves)
    if part == FORWARD:
        return results
    results = results if isinstance(results, tuple) else (results,)
    if not gradients:
        gradients += [torch.randn_like(result) if result.dim() else torch.ones_like(result) for result in results]
    return torch.autograd.grad(results, leaves, gradients)


def with_compiled(
    config: OpConfig, variants: dict[str, Callable[..., Any]], formula: str = "torch"
) -> dict[str, Callable[..., Any]]:
    """Adds the formula compiled by Inductor; not on a CPU, where compiling takes half a minute."""
    if config.device.type == "cpu":
        return variants
    variant = variants[formula]
    return {**variants, "compile": torch.compile(lambda *inputs: variant(*inputs), dynamic=False)}


def device_implementations(config: OpConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    return names if config.device.type == "cuda" else ("torch",)


def implementations(config: OpConfig, op: Callable[..., Any], names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """An op of ours in every implementation for this device."""
    return {name: partial(op, implementation=name) for name in device_implementations(config, names)}


# --- ops ------------------------------------------------------------------------------------------------


def attention(config: OpConfig) -> Iterator[Case]:
    """Causal attention: PyTorch's backends by name, PyTorch's own choice, and ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    variants = implementations(config, flash_attention.flash_attention, flash_attention.IMPLEMENTATIONS)
    choices = tuple(variants)
    if config.device.type == "cuda":
        for name in ("cudnn", "flash", "efficient"):
            variants[name] = partial(with_backend, sdpa_kernel, SDPBackend.__members__[f"{name.upper()}_ATTENTION"])
    longer = LONG_SEQS if config.device.type == "cuda" and config.model.context >= min(LONG_SEQS) else ()
    for seq in sorted({config.seq, *longer}):
        yield from attention_cases("flash_attention", config, seq, keys_per_query(seq), variants, choices)


def with_backend(only: Callable[..., Any], backend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with only(backend):
        return flash_attention.sdpa(q, k, v, window=0, bounds=None)


def sparse_attention(config: OpConfig) -> Iterator[Case]:
    """Packed documents: FlexAttention (on a CPU a mask), and ours."""
    batch, seq, length = config.batch, config.seq, min(DOCUMENT, config.seq // 2)
    documents = (torch.arange(seq, device=config.device) // length).repeat(batch, 1)
    variants = implementations(config, partial(flash_attention.flash_attention, documents=documents),
                           flash_attention.IMPLEMENTATIONS)  # fmt: skip
    if config.device.type == "cuda":  # what PyTorch has for it, and the step takes otherwise
        pattern = Pattern(documents=documents)
        mask = flex_block_mask(pattern, batch, seq, seq, config.device)
        variants["torch"] = partial(flex, pattern=pattern, block_mask=mask)
    keys = keys_per_query(length)
    yield from attention_cases("sparse_attention", config, seq, keys, variants, tuple(variants))


def attention_cases(
    op: str,
    config: OpConfig,
    seq: int,
    keys: float,
    variants: Mapping[str, Callable[..., Any]],
    choices: tuple[str, ...],
) -> Iterator[Case]:
    """Two matmuls forward, five backward (scores are recomputed), over `keys` visible keys per query."""
    model, batch = config.model, max(1, config.tokens // seq)
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    flops = 4.0 * batch * seq * heads * head_dim * keys
    read = config.dtype.itemsize * batch * seq * head_dim * 2.0 * (heads + kv_heads)  # q, k, v and the result

    def inputs() -> list[Tensor]:
        return [config.randn(batch, seq, count, head_dim) for count in (heads, kv_heads, kv_heads)]

    shape = {"seq": seq, "head_dim": head_dim}
    yield from forward_backward_cases(op, shape, (read, 2 * read), (flops, 2.5 * flops), inputs, variants, choices)


def rms_norm_cases(config: OpConfig) -> Iterator[Case]:
    """Forward reads x and writes y; backward reads x and a gradient and writes one."""
    if config.model.norm != "rms":
        return
    tokens, hidden = config.tokens, config.model.hidden
    x = config.dtype.itemsize * tokens * hidden
    variants = implementations(config, partial(rms_norm.rms_norm, eps=1e-5), rms_norm.IMPLEMENTATIONS)
    choices, variants = tuple(variants), with_compiled(config, variants)
    if config.device.type == "cuda":  # beside the others, not one of the choices: it has to be built
        variants[rms_norm.NATIVE] = partial(rms_norm.rms_norm, eps=1e-5, implementation=rms_norm.NATIVE)

    def inputs() -> list[Tensor]:
        return [config.randn(tokens, hidden), config.randn(hidden)]

    shape = {"tokens": tokens, "hidden": hidden}
    yield from forward_backward_cases("rms_norm", shape, (2 * x, 3 * x), (0, 0), inputs, variants, choices)


def rope_cases(config: OpConfig) -> Iterator[Case]:
    """Queries and keys in and out, and a table of cosines and sines (fp32) that all heads share."""
    model, tokens = config.model, config.tokens
    if model.positions != "rope":
        return
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    cos, sin = tables(model, torch.arange(config.seq, device=config.device))
    moved = 2.0 * config.dtype.itemsize * tokens * (heads + kv_heads) * head_dim + 8.0 * config.seq * head_dim

    def inputs() -> list[Tensor]:
        return [config.randn(config.batch, config.seq, count, head_dim) for count in (heads, kv_heads)]

    variants = implementations(config, partial(rope.rotate_qk, cos=cos, sin=sin), rope.IMPLEMENTATIONS)
    choices, variants = tuple(variants), with_compiled(config, variants)
    shape = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    yield from forward_backward_cases("rope", shape, (moved, moved), (0, 0), inputs, variants, choices)


def swiglu_cases(config: OpConfig) -> Iterator[Case]:
    """Reads gate and up and writes their product; backward reads three and writes two."""
    if config.model.mlp != "swiglu":
        return
    tokens, ffn = config.tokens, config.model.ffn
    x = config.dtype.itemsize * tokens * ffn
    variants = implementations(config, swiglu.swiglu, swiglu.IMPLEMENTATIONS)
    choices, variants = tuple(variants), with_compiled(config, variants)

    def inputs() -> list[Tensor]:
        return [config.randn(tokens, ffn), config.randn(tokens, ffn)]

    shape = {"tokens": tokens, "ffn": ffn}
    yield from forward_backward_cases("swiglu", shape, (3 * x, 5 * x), (0, 0), inputs, variants, choices)


def unpermute_cases(config: OpConfig) -> Iterator[Case]:
    """Reads the rows of all choices and writes their sum; backward reads rows and gradient and writes rows."""
    model, tokens = config.model, config.tokens
    if not model.experts:
        return
    pairs, x = tokens * model.top_k, config.dtype.itemsize * tokens * model.hidden
    order = torch.randperm(pairs, device=config.device)
    back = order.argsort()

    def inputs() -> list[Tensor]:
        return [config.randn(pairs, model.hidden), config.randn(tokens, model.top_k)]

    call = partial(permute.unpermute, order=order, back=back, top_k=model.top_k)
    variants = implementations(config, call, permute.IMPLEMENTATIONS)
    choices, variants = tuple(variants), with_compiled(config, variants)
    shape = {"tokens": tokens, "top_k": model.top_k, "hidden": model.hidden}
    moved = (1.0 + model.top_k) * x, (1.0 + 2 * model.top_k) * x
    yield from forward_backward_cases(permute.OP, shape, moved, (0, 0), inputs, variants, choices)


def swiglu_fp8_cases(config: OpConfig) -> Iterator[Case]:
    """SwiGLU next to fp8 matmuls, forward and backward: gate and up are read, their product is written, and in the
    backward pass with a gradient three are; twice, as a scale is known only then. Five are written then, three turned.
    """
    if config.model.mlp != "swiglu":
        return
    tokens, ffn = config.tokens, config.model.ffn
    moved = (2.0 * (2 + 3) * config.dtype.itemsize + 1 + 5) * tokens * ffn

    def make() -> Mapping[str, TimedCall]:
        gate, up, grad = (config.randn(tokens, ffn) for _ in range(3))

        def both(there: Callable[..., Any], back: Callable[..., Any]) -> object:
            values, scale = there(gate, up)
            return values, back(grad, gate, up, scale)

        ours = {} if config.device.type == "cpu" else {"triton": partial(both, swiglu_fp8.forward, swiglu_fp8.backward)}
        formulas = compiled(config, swiglu_fp8.forward_reference), compiled(config, swiglu_fp8.backward_reference)
        return {"torch": partial(both, *formulas), **ours}

    shape = {"tokens": tokens, "ffn": ffn}
    yield Case(swiglu_fp8.OP, BOTH, shape, moved, 0, make, device_implementations(config, swiglu_fp8.IMPLEMENTATIONS))


def epilogue_cases(config: OpConfig) -> Iterator[Case]:
    """Matmul epilogues of an MLP: GELU, its gradient, and the residual sum."""
    if config.model.mlp != "gelu":
        return
    tokens, hidden, ffn = config.tokens, config.model.hidden, config.model.ffn
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
        make = partial(epilogue_calls, config, getattr(cublas, op), formula, shapes)
        bytes_, flops = config.dtype.itemsize * (moved + weight), 2.0 * tokens * weight
        yield Case(op, FORWARD, shape, bytes_, flops, make, device_implementations(config, cublas.IMPLEMENTATIONS))


def epilogue_calls(
    config: OpConfig, op: Callable[..., Any], formula: Callable[..., Any], shapes: tuple[tuple[int, ...] | None, ...]
) -> Mapping[str, TimedCall]:
    given = [None if shape is None else config.randn(*shape) for shape in shapes]
    return cublas_calls(partial(compiled(config, formula), *given), partial(op, *given), config)


def cublas_calls(
    formula: TimedCall, with_algorithm: Callable[[int], object], config: OpConfig
) -> Mapping[str, TimedCall]:
    """The formula, and every algorithm that cuBLAS offers, if it is available."""
    variants = (
        {}
        if config.device.type == "cpu"
        else {name: partial(with_algorithm, variant) for variant, name in enumerate(cublas.ALGORITHMS)}
    )
    return {"torch": formula, **variants}


def compiled(config: OpConfig, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as in a compiled block; eager on a CPU."""
    return function if config.device.type == "cpu" else torch.compile(function, dynamic=False)


def loss_cases(config: OpConfig) -> Iterator[Case]:
    """Head and cross-entropy, forward and backward: three matmuls; in chunks (ours) and unfused."""
    tokens, vocab, hidden = config.tokens, config.model.vocab, config.model.hidden
    moved = config.dtype.itemsize * 2.0 * (tokens + vocab) * hidden  # states and weights, and their gradients

    def make() -> Mapping[str, TimedCall]:
        targets = torch.randint(0, vocab, (tokens,), device=config.device)
        ours = implementations(config, cross_entropy.linear_cross_entropy, cross_entropy.IMPLEMENTATIONS)
        variants = with_compiled(config, {**ours, "unfused": cross_entropy.reference}, "unfused")
        called = {name: partial(with_targets, variant, targets) for name, variant in variants.items()}
        return timed_calls(lambda: [config.randn(tokens, hidden), config.randn(vocab, hidden)], called, BOTH)

    shape = {"tokens": tokens, "vocab": vocab, "hidden": hidden}
    choices = device_implementations(config, cross_entropy.IMPLEMENTATIONS)
    yield Case("linear_cross_entropy", BOTH, shape, moved, 6.0 * tokens * vocab * hidden, make, choices)


def with_targets(variant: Callable[..., Tensor], targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return variant(hidden, weight, targets)


def fp8_cases(config: OpConfig) -> Iterator[Case]:
    """A weight of the MLP to e4m3: with one scale everything is read twice; and back."""
    rows, columns = config.model.ffn, config.model.hidden
    count, wide = rows * columns, config.dtype.itemsize
    shape = {"rows": rows, "columns": columns}
    ops: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("quantize", 2 * wide + 1, {}),
        ("quantize, transposed", 2 * wide + 1, {"transposed": True}),
        ("quantize_rows", wide + 1, {"by_row": True}),
    )
    for op, width, changes in ops:
        make = partial(quantize_calls, config, rows, columns, changes)
        choices = () if "transposed" in changes else device_implementations(config, float8.IMPLEMENTATIONS)
        yield Case(op, FORWARD, shape, width * count, 0, make, choices)
    back = partial(dequantize_calls, config, rows, columns)
    yield Case(
        "dequantize",
        FORWARD,
        shape,
        (1 + wide) * count,
        0,
        back,
        device_implementations(config, float8.IMPLEMENTATIONS),
    )


def quantize_calls(config: OpConfig, rows: int, columns: int, changes: dict[str, Any]) -> Mapping[str, TimedCall]:
    x = config.randn(rows, columns)
    variants = implementations(config, partial(float8.quantize, **changes), float8.IMPLEMENTATIONS)
    if not changes:
        variants = with_compiled(config, variants)
    return {name: partial(variant, x) for name, variant in variants.items()}


def dequantize_calls(config: OpConfig, rows: int, columns: int) -> Mapping[str, TimedCall]:
    small = float8.quantize(config.randn(rows, columns))
    variants = implementations(config, partial(float8.dequantize, dtype=config.dtype), float8.IMPLEMENTATIONS)
    return {name: partial(variant, small) for name, variant in variants.items()}


def adamw_cases(config: OpConfig) -> Iterator[Case]:
    """AdamW: reads weight, gradient and two moments, writes all but the gradient. In fp32, and with bf16 weights that
    keep 16 more bits beside them."""
    count = min(MAX_UPDATED, config.model.params)
    shape = {"weights": count}
    yield Case("adamw", "fp32", shape, 28.0 * count, 0, partial(adamw_calls, config, count, torch.float32))
    if config.device.type == "cuda":
        yield Case("adamw", "split master", shape, 26.0 * count, 0, partial(adamw_calls, config, count, torch.bfloat16))


def adamw_calls(config: OpConfig, count: int, dtype: torch.dtype) -> Mapping[str, TimedCall]:
    weight = torch.zeros(count, dtype=dtype, device=config.device)
    grad = torch.ones_like(weight)
    mean, square = torch.zeros(count, device=config.device), torch.zeros(count, device=config.device)
    low = None if dtype == torch.float32 else torch.zeros(count, dtype=torch.int16, device=config.device)
    slot = adamw.ParamState(weight, grad, torch.ones((), device=config.device), 0, mean, square, low)
    ours = "triton" if config.device.type == "cuda" else "torch"
    found: dict[str, TimedCall] = {ours: partial(adamw.adamw, [slot], adamw.AdamWConfig(1e-3), implementation=ours)}
    if dtype == torch.float32:
        parameter = torch.nn.Parameter(weight)
        parameter.grad = grad
        found["fused"] = torch.optim.AdamW([parameter], fused=True).step
    return found


# Each gives no case where a model does without it: GPT-2 has no SwiGLU.
OPS: dict[str, Callable[[OpConfig], Iterator[Case]]] = {
    "linear_cross_entropy": loss_cases,
    "attention": attention,
    "sparse_attention": sparse_attention,
    "rms_norm": rms_norm_cases,
    "rope": rope_cases,
    "swiglu": swiglu_cases,
    "swiglu_fp8": swiglu_fp8_cases,
    "unpermute": unpermute_cases,
    "gelu": epilogue_cases,
    "fp8": fp8_cases,
    "adamw": adamw_cases,
}
