"""Many small models trained at once on one device: parameters of M models stacked along a first dimension.

Every product of a layer is one batched product (bmm) of M matrices, attention runs over M × batch sequences, and the
update takes learning rate, decay, β2 and warm-up of each model from tensors with M entries. Models of one stack share
their shape and batch size; each has its own weights and data order. A model's result does not depend on which others
are in its stack, up to rounding.

The network is that of `lmworks train` (pre-norm, RMSNorm, rotary embedding, SwiGLU, untied head) and the update its
AdamW; tests/tune/test_stacked_models.py holds both to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
EPS = 1e-5  # of the norms


@dataclass(frozen=True)
class Shape:
    layers: int = 3
    hidden: int = 192
    heads: int = 3
    mlp: int = 512
    vocab: int = 256  # bytes
    rope_theta: float = 10_000.0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, m = self.hidden, self.mlp
        block = {"attn_norm": (h,), "q": (h, h), "k": (h, h), "v": (h, h), "out": (h, h)}
        block |= {"mlp_norm": (h,), "gate": (m, h), "up": (m, h), "down": (h, m)}
        blocks = {f"{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()}
        return {"embed": (self.vocab, h), **blocks, "norm": (h,), "head": (self.vocab, h)}

    @property
    def params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class Update:
    """Hyper-parameters of AdamW, one entry a model: (models,)."""

    lr: Tensor
    warmup: Tensor  # share of all steps
    weight_decay: Tensor
    beta2: Tensor
    beta1: float = 0.9
    eps: float = 1e-8
    clip: float = 1.0
    min_lr_ratio: float = 0.1

    def rate(self, step: int, steps: int) -> Tensor:
        """Of step 1, 2 … `steps`: a linear warm-up, then a cosine down to a tenth."""
        rise = (self.warmup * steps).round()
        share = ((step - rise) / (steps - rise).clamp(min=1)).clamp(0, 1)
        decay = self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + torch.cos(math.pi * share))
        return self.lr * torch.where(step <= rise, step / rise.clamp(min=1), decay)


def initial_weights(shape: Shape, seeds: list[int], device: torch.device) -> Weights:
    """Of each model by its own seed: normal, 0.02, and smaller before a residual sum; norms are ones."""
    stacked: dict[str, list[Tensor]] = {name: [] for name in shape.shapes}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, size in shape.shapes.items():
            std = 0.02 / math.sqrt(2 * shape.layers) if name.endswith((".out", ".down")) else 0.02
            drawn = torch.randn(size, generator=generator) * std
            stacked[name].append(torch.ones(size) if len(size) == 1 else drawn)
    return {name: torch.stack(each).to(device).requires_grad_() for name, each in stacked.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """x: (models, tokens, hidden)."""
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return (scaled * weight[:, None]).type_as(x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.mT)


def rotary(shape: Shape, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = shape.hidden // shape.heads
    frequency = shape.rope_theta ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(seq, device=device)[:, None] * frequency
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)


def losses(weights: Weights, tokens: Tensor, shape: Shape) -> Tensor:
    """Mean loss of each model on its own tokens: (models, batch, seq + 1) → (models,)."""
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    models, batch, seq = inputs.shape
    cos, sin = rotary(shape, seq, inputs.device)
    offset = torch.arange(models, device=inputs.device)[:, None, None] * shape.vocab
    x = F.embedding(inputs + offset, weights["embed"].flatten(0, 1)).flatten(1, 2)  # (models, batch · seq, hidden)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))

    def heads(y: Tensor) -> Tensor:
        return y.view(models * batch, seq, shape.heads, -1).transpose(1, 2)

    def turn(y: Tensor) -> Tensor:
        half = y.shape[-1] // 2
        swapped = torch.cat((y[..., half:], y[..., :half]), -1)
        return (y * cos + swapped * sin).type_as(y)

    for layer in range(shape.layers):
        w = {name.partition(".")[2]: weights[name] for name in weights if name.startswith(f"{layer}.")}
        y = norm(x, w["attn_norm"])
        q, k, v = turn(heads(linear(y, w["q"]))), turn(heads(linear(y, w["k"]))), heads(linear(y, w["v"]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(models, batch * seq, -1)
        x = x + linear(y, w["out"])
        y = norm(x, w["mlp_norm"])
        x = x + linear(F.silu(linear(y, w["gate"])) * linear(y, w["up"]), w["down"])
    logits = linear(norm(x, weights["norm"]), weights["head"])
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1), reduction="none")
    return each.view(models, -1).mean(1)


class StackedAdamW:
    """AdamW with decoupled decay on matrices, after the gradient of each model is clipped to its own norm."""

    def __init__(self, weights: Weights, update: Update) -> None:
        self.weights, self.update = weights, update
        self.mean = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @torch.no_grad()
    def step(self, step: int, steps: int) -> None:
        """`step` counts from 1."""
        rule, rate = self.update, self.update.rate(step, steps)
        grads = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads.values()]).sum(0).sqrt()
        factor = (rule.clip / (norms + 1e-6)).clamp(max=1.0)
        for name, grad in grads.items():
            weight, mean, square = self.weights[name], self.mean[name], self.square[name]
            column = (-1, *(1,) * (weight.ndim - 1))
            grad = grad * factor.view(column)
            beta2 = rule.beta2.view(column)
            mean.lerp_(grad, 1 - rule.beta1)
            square.mul_(beta2).add_((1 - beta2) * grad.square())
            if weight.ndim > 2:
                weight.mul_(1 - rate.view(column) * rule.weight_decay.view(column))
            root = (square / (1 - beta2**step)).sqrt_().add_(rule.eps)
            weight.sub_(rate.view(column) * (mean / (1 - rule.beta1**step)) / root)
            self.weights[name].grad = None


def windows(seeds: Tensor, step: int, batch: int, limit: int) -> Tensor:
    """Where each model's sequences of a step begin, (models, batch): a hash of seed, step and row (splitmix64), so that
    a data order does not depend on the other models of the stack."""
    row = torch.arange(batch, device=seeds.device)
    x = (seeds[:, None] * 1_000_003 + step) * 1_000_003 + row
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return x.remainder(limit)
