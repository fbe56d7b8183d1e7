"""Calibrated rounding (GPTQ): int4 weights that minimise the output error of a layer.

Plain rounding treats every weight alike. But the inputs x of a layer differ in scale and are correlated; what matters
is ‖(W − Ŵ)·x‖² = Σ over rows δ·H·δᵀ with H = Σ x·xᵀ from calibration text. GPTQ (Frantar et al. 2022, arXiv 2210.17323)
rounds the columns of W in order, and compensates each rounding error in the columns that follow, weighted by H. With
the Cholesky factor U of H⁻¹ = Uᵀ·U:

    e = (w_j − q_j·s) / U_jj          w_k ← w_k − e · U_jk   for k > j

The scale of a group is chosen when its first column is reached, for the weights as compensated so far: the one of a few
fractions of the largest weight with the smallest error, columns weighted by H_jj.

Blocks are processed in order, each with inputs from the quantized blocks before it, with H of one block in memory; then
the head, which is never int4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.inference import quantized
from ...model.attention import dense
from ...model.gpt import GPT, Block, Linear, default_positions
from ...model.moe import MoE
from .quantized_model import (
    HEAD,
    QuantLinear,
    Scheme,
    group_size,
    layer_scheme,
    quantize_experts,
    replace_layer,
    round_to_nearest,
)

DAMPING = 0.01  # added to H's diagonal, relative to its mean
COLUMNS = 128  # of a block: errors reach later columns in one product
FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of the largest weight
SAMPLE_ROWS = 1024  # inputs of a layer for its output error


@dataclass
class InputStats:
    """Input statistics of a layer: second moments of fit batches, and sample rows of the others."""

    sample: list[Tensor] = field(default_factory=list)  # (rows, in)
    second_moment: Tensor | None = None  # Σ x·xᵀ (in, in) fp32
    amax: float = 0.0
    squares: float = 0.0
    count: int = 0

    def update(self, x: Tensor, fitted: bool, moments: bool) -> None:
        rows = x.detach().flatten(0, -2).float()
        self.amax = max(self.amax, float(rows.abs().max()))
        self.squares += float(rows.square().sum(dtype=torch.float64))
        self.count += rows.numel()
        room = SAMPLE_ROWS - sum(map(len, self.sample))
        if not fitted and room > 0:
            self.sample.append(rows[:room])
        if fitted and moments:
            outer = rows.t() @ rows
            self.second_moment = outer if self.second_moment is None else self.second_moment.add_(outer)

    def rows(self) -> Tensor:
        return torch.cat(self.sample)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(1, self.count))


@dataclass(frozen=True)
class LayerReport:
    """Relative output error of a layer, ‖ŷ − y‖ / ‖y‖, on inputs that it was not fitted to."""

    name: str
    error: float
    rounded_error: float  # with plain rounding
    amax: float  # largest input
    rms: float  # root of the inputs' mean square
    group: int  # int4: inputs that share a scale; else 0


Make = Callable[[str, Linear, InputStats], QuantLinear]


@torch.no_grad()
def quantize_layers(
    model: GPT, scheme: Scheme, batches: list[Tensor], group: int, make: Make | None = None
) -> Iterator[LayerReport]:
    """Quantize a network in place, block after block, on token batches (rows, seq), two at least.

    `make` replaces the quantizer of a layer, for tests.
    """
    chosen = make or (lambda name, layer, seen: calibrated(layer_scheme(scheme, name), layer, seen, group))
    states = [embedded(model, tokens) for tokens in batches]
    for number, block in model.blocks.items():
        assert isinstance(block, Block)
        runner = BlockRunner(model, block)
        linears = {name: layer for name, layer in block.named_modules() if isinstance(layer, Linear)}
        mixtures = {"mlp": block.mlp} if isinstance(block.mlp, MoE) else {}
        seen = runner.collect_stats(states, {**linears, **mixtures}, moments=scheme.name == "int4")
        for name, layer in linears.items():
            full = f"blocks.{number}.{name}"
            new = chosen(full, layer, seen[name])
            yield report(full, scheme, layer, new, seen.pop(name), group)
            replace_layer(model, full, new)
        for name, moe in mixtures.items():
            yield round_experts(f"blocks.{number}.{name}.experts", scheme, moe, seen.pop(name))
        states = [runner.run(x) for x in states]
    if model.head is not None and model.norm is not None:
        normed = InputStats()
        for i, x in enumerate(states):
            normed.update(model.norm(x), i < num_fit_batches(states), moments=False)
        new = chosen(HEAD, model.head, normed)
        yield report(HEAD, layer_scheme(scheme, HEAD), model.head, new, normed, group)
        replace_layer(model, HEAD, new)


def round_experts(name: str, scheme: Scheme, moe: MoE, seen: InputStats) -> LayerReport:
    """All experts of a layer, to nearest; the error is that of their weighted sum."""
    x = seen.rows().to(moe.router.weight.dtype).unsqueeze(0)
    wanted = moe(x).float()
    quantize_experts(scheme, moe)
    error = float((moe(x).float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return LayerReport(name, error, error, seen.amax, seen.rms, 0)


def num_fit_batches(states: list[Tensor]) -> int:
    """Batches for rounding; the last quarter is for output errors."""
    return len(states) - max(1, len(states) // 4)


def embedded(model: GPT, tokens: Tensor) -> Tensor:
    assert model.embed is not None
    x: Tensor = model.embed(tokens.to(model.device))
    return x if model.positions is None else x + model.positions(default_positions(x, None))


@dataclass(frozen=True)
class BlockRunner:
    """One block of a network, run by itself on states (rows, seq, hidden)."""

    model: GPT
    block: Block

    def run(self, x: Tensor) -> Tensor:
        spec = self.model.spec
        rotary = self.model.rotary(default_positions(x, None))[self.model.layers().index(self.block)]
        result: Tensor = self.block(x, rotary, dense(spec, x.device))
        return result

    def collect_stats(
        self, states: list[Tensor], linears: Mapping[str, nn.Module], moments: bool
    ) -> dict[str, InputStats]:
        """Input statistics of each linear layer of the block."""
        seen = {name: InputStats() for name in linears}
        fitted = num_fit_batches(states)

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _module, inputs: seen[name].update(inputs[0], number < fitted, moments)

        hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in linears.items()]
        try:
            for number, x in enumerate(states):  # noqa: B007 (the hooks read it)
                self.run(x)
        finally:
            for one in hooks:
                one.remove()
        return seen


def report(name: str, scheme: Scheme, layer: Linear, new: QuantLinear, seen: InputStats, group: int) -> LayerReport:
    x = seen.rows()
    plain = new if scheme.name != "int4" else round_to_nearest(scheme, layer, group)
    found = new.in_features // new.scale.shape[1] if scheme.name == "int4" else 0
    return LayerReport(name, output_error(layer, new, x), output_error(layer, plain, x), seen.amax, seen.rms, found)


def output_error(layer: Linear, new: QuantLinear, x: Tensor) -> float:
    """On inputs x (rows, in), in the dtype of the layer."""
    x = x.to(layer.weight.dtype)
    wanted = layer(x).float()
    return float((new(x).float() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def calibrated(scheme: Scheme, layer: Linear, seen: InputStats, group: int) -> QuantLinear:
    """GPTQ for int4; plain rounding is enough for int8 and fp8."""
    if scheme.name != "int4" or seen.second_moment is None:
        return round_to_nearest(scheme, layer, group)
    found = group_size(layer.weight.shape[1], group)
    q, scale = gptq(layer.weight.detach().float(), seen.second_moment, found)
    bias = None if layer.bias is None else layer.bias.detach()
    return QuantLinear(scheme, quantized.int4_pack(q, found), scale, bias)


def gptq(weight: Tensor, second_moment: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight (out, in) → q (out, in) int8, scale (out, in / group) bf16."""
    weight = weight.clone()
    upper, importance = factor(second_moment)
    q = torch.empty_like(weight, dtype=torch.int8)
    scales: list[Tensor] = []
    for start in range(0, weight.shape[1], COLUMNS):
        end = min(start + COLUMNS, weight.shape[1])
        errors = torch.empty_like(weight[:, start:end])
        for j in range(start, end):
            if j % group == 0:
                scales.append(best_scale(weight[:, j : j + group], importance[j : j + group]))
            scale = scales[-1].float()
            q[:, j] = (weight[:, j] / scale).round().clamp(-8, 7).to(torch.int8)
            errors[:, j - start] = error = (weight[:, j] - q[:, j] * scale) / upper[j, j]
            weight[:, j + 1 : end] -= torch.outer(error, upper[j, j + 1 : end])
        weight[:, end:] -= errors @ upper[start:end, end:]
    return q, torch.stack(scales, dim=1)


def factor(second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of H⁻¹ with H damped, and the relative diagonal of H."""
    moment = second_moment.double()
    diagonal = moment.diagonal()
    mean = diagonal.mean().clamp(min=1e-30)
    diagonal += DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True).float(), (diagonal / mean).float()


def best_scale(weight: Tensor, importance: Tensor) -> Tensor:
    """Scale (out) in bf16 of a group (out, group) with the smallest error, columns weighted by importance (group)."""
    whole = (weight.abs().amax(dim=1) / 7).clamp(min=quantized.TINY)
    best, least = whole.bfloat16(), torch.full_like(whole, torch.inf)
    for fraction in FRACTIONS:
        scale = (whole * fraction).bfloat16()
        wide = scale.float().unsqueeze(1)
        off = weight - (weight / wide).round().clamp(-8, 7) * wide
        error = (off.square() * importance).sum(dim=1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def loss_on(model: GPT, batches: list[Tensor]) -> float:
    """Mean over all next tokens, in nats."""
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens in batches:
            here = tokens.to(model.device)
            logits = model(here[:, :-1])
            total += float(F.cross_entropy(logits.flatten(0, 1).float(), here[:, 1:].flatten(), reduction="sum"))
            count += here[:, 1:].numel()
    return total / max(1, count)
