"""Mixture of experts: a router sends each token to a few of many MLPs.

Tokens are grouped by expert, every expert multiplies its rows in one run, and the results are permuted back
(`kernels.training.permute`).

Load balancing, so that not all tokens go to few experts: `balance_loss`, an auxiliary loss of each sequence, and
`balance_bias` (DeepSeek-V3, arXiv 2412.19437), a bias of the choice that follows the counts
of each step. The loss reaches the gradient without passing through the model's result (see `InjectBalanceLoss`), so
that a part of a pipeline, which returns hidden states alone, has it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..kernels.swiglu import swiglu
from ..kernels.training.permute import permute, unpermute
from ..spec import ModelSpec

if TYPE_CHECKING:
    from .gpt import GPT


class Router(nn.Linear):
    """Logits of the experts. Initial weights are a function of (seed, name), see `gpt.init_weights`."""

    def reset_parameters(self) -> None:
        pass


class MoE(nn.Module):
    """Every token goes to its top_k experts and all shared ones (`route`).

    `capacity` bounds the tokens of one sequence that an expert takes in training: later ones are dropped.
    Evaluation and generation drop nothing, as a token must get the same result whatever the length of its text.
    """

    choice_bias: Tensor | None

    def __init__(self, spec: ModelSpec, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.experts, self.top_k, self.capacity = spec.experts, spec.top_k, spec.capacity
        self.balance_loss, self.balance_rate = spec.balance_loss, spec.balance_bias
        self.scores, self.norm_topk, self.routed_scale = spec.router, spec.norm_topk, spec.routed_scale
        self.expert_groups, self.top_groups = spec.expert_groups, spec.top_groups
        self.router = Router(spec.hidden, spec.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(spec.experts, spec.expert_ffn, spec.hidden))
        self.up = nn.Parameter(torch.empty(spec.experts, spec.expert_ffn, spec.hidden))
        self.down = nn.Parameter(torch.empty(spec.experts, spec.hidden, spec.expert_ffn))
        self.shared = shared
        self.shared_gate = Router(spec.hidden, 1, bias=False) if spec.shared_gate else None
        # A buffer: it is saved with the model, always fp32, and no optimizer or sharding touches it.
        self.register_buffer("choice_bias", torch.zeros(spec.experts) if spec.choice_bias else None)
        self.dispatch: Callable[[MoE, Tensor, Tensor], Tensor] = dispatch_locally  # how rows reach their experts
        # What the main loss is multiplied by before the backward pass; None: 1 / tokens of the pass, as for a mean.
        self.balance_scale: float | None = None
        self.balance_share = 1.0  # 1/n where n ranks compute the same tokens and their gradients are summed
        self.sum_over_sequence: Callable[[Tensor], Tensor] = identity  # over ranks that hold parts of a sequence
        self.expert_counts: Tensor | None = None  # (experts): choices of tokens trained on since the last step
        self.load: Tensor | None = None  # (experts): those of the last step, of all ranks

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, hidden)
        flat = x.flatten(0, 1)
        scores, chosen, weights = self.route(flat)
        with torch.no_grad():
            selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True).view(*x.shape[:2], -1)
            counts = selected.sum(dim=1)  # (batch, experts)
        weights = weights.type_as(flat)
        balance = self.balance_term(self.probabilities(scores).view_as(selected), counts) if self.balance_loss else None
        weights = InjectBalanceLoss.apply(weights, balance, counts.sum(dim=0), self)

        expert_of_pair, accepted = chosen.flatten(), counts
        limited = self.capacity > 0 and self.training and torch.is_grad_enabled()
        if limited:  # a pair that is dropped goes behind all experts
            limit = math.ceil(self.capacity * x.shape[1] * self.top_k / self.experts)
            within_capacity = selected.cumsum(dim=1) <= limit
            expert_of_pair = torch.where(
                within_capacity.flatten(0, 1).gather(-1, chosen).flatten(), expert_of_pair, self.experts
            )
            accepted = (selected & within_capacity).sum(dim=1)
        order = expert_of_pair.argsort(stable=True)  # (token, choice) pairs, expert after expert
        back = order.argsort()
        rows = permute(flat, order, back, self.top_k, compute_dtype(flat))  # (pairs, hidden)
        result = self.dispatch(self, rows, accepted.sum(dim=0))
        if limited:
            result = F.pad(result, (0, 0, 0, order.shape[0] - result.shape[0]))
        out = unpermute(result, weights, order, back, self.top_k).view_as(x)
        if self.shared is None:
            return out
        if self.shared_gate is None:
            return out + self.shared(x)
        return out + torch.sigmoid(self.shared_gate(x)) * self.shared(x)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens (tokens, hidden): scores of all experts (tokens, experts), the chosen ones, and the weights of
        their results (tokens, top_k), all in fp32."""
        logits = self.router(flat).float()
        scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(dim=-1)
        with torch.no_grad():
            chosen = self.choose(scores)
        weights = scores.gather(-1, chosen)
        if self.norm_topk:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return scores, chosen, weights if self.routed_scale == 1 else weights * self.routed_scale

    def choose(self, scores: Tensor) -> Tensor:
        """The top_k experts of each token, (tokens, top_k): of all, or of its best groups alone.

        A group is as good as its best expert, or with sigmoid scores as its best two together (DeepSeek-V2 and V3).
        """
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.expert_groups > 1:
            groups = scores.unflatten(-1, (self.expert_groups, -1))
            best = groups.topk(2 if self.scores == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(self.top_groups).indices, True)
            scores = groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scores that sum to 1 over the experts, for the balance loss."""
        return scores if self.scores == "softmax" else scores / scores.sum(dim=-1, keepdim=True)

    def balance_term(self, probs: Tensor, counts: Tensor) -> Tensor:
        """balance_loss · Σ over sequences of tokens · experts/top_k · Σₑ fₑ·Pₑ, which is 1 a token when all is even.

        f is the share of a sequence's tokens that chose expert e (no gradient), P the mean of its probability.
        """
        both = torch.stack((counts.float(), probs.sum(dim=1)))  # (2, batch, experts)
        counts, mass = self.sum_over_sequence(both).unbind()
        share = (counts / counts.sum(dim=-1, keepdim=True)).detach()  # = f / top_k
        return self.balance_loss * self.experts * (share * mass).sum()


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products run in: rows are moved in it, not in the wider type that autocast would make it from."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class InjectBalanceLoss(torch.autograd.Function):
    """Identity of the routing weights. Its backward pass counts the choices, and gives the balance loss its gradient.

    A backward pass runs once for every token that is trained on, so recomputation does not count twice.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, balance: Tensor | None, counts: Tensor, moe: MoE) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.moe = moe
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        moe, (counts,) = ctx.moe, ctx.saved_tensors
        moe.expert_counts = counts if moe.expert_counts is None else moe.expert_counts + counts
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        scale = 1 / grad.shape[0] if moe.balance_scale is None else moe.balance_scale
        injected = torch.full((), scale * moe.balance_share, device=grad.device)
        return grad, injected, None, None


def identity(x: Tensor) -> Tensor:
    return x


def dispatch_locally(moe: MoE, rows: Tensor, counts: Tensor) -> Tensor:
    """All experts are here: rows (pairs, hidden), grouped by expert, and how many each gets."""
    return run_experts(moe, rows, counts if supports_grouped_mm(moe, rows) else counts.tolist())


def run_experts(moe: MoE, rows: Tensor, sizes: list[int] | Tensor) -> Tensor:
    """SwiGLU of the experts that this module holds, each over its run of rows.

    Sizes on the device (`supports_grouped_mm`): the result has all rows, zeros behind the runs; else it ends with them.
    """
    return grouped_experts(moe, rows, sizes) if isinstance(sizes, Tensor) else each_expert(moe, rows, sizes)


def supports_grouped_mm(moe: MoE, rows: Tensor) -> bool:
    """Whether PyTorch multiplies all runs in one kernel, which takes their sizes on the device."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not rows.shape[0]:
        return False
    return torch.cuda.get_device_capability(rows.device) >= (9, 0) and not any(size % 8 for size in moe.down.shape[1:])


def grouped_experts(moe: MoE, rows: Tensor, sizes: Tensor) -> Tensor:
    """As products of a group each, without a synchronisation of the host."""
    ends = sizes.cumsum(0, dtype=torch.int32)
    # Nobody writes what is behind the runs: zeros, here for the gradients and below for the result.
    there = torch.arange(len(rows), device=rows.device).unsqueeze(1) < ends[-1] if moe.capacity else None
    rows = rows if there is None else torch.where(there, rows, 0)
    gate, up, down = (weight.to(rows.dtype).transpose(1, 2) for weight in (moe.gate, moe.up, moe.down))
    inner = swiglu(F.grouped_mm(rows, gate, offs=ends), F.grouped_mm(rows, up, offs=ends))
    result = F.grouped_mm(inner, down, offs=ends)
    return result if there is None else torch.where(there, result, 0)


def each_expert(moe: MoE, rows: Tensor, sizes: list[int]) -> Tensor:
    """One expert after the other.

    `unbind`, as the gradient of weight[expert] would be a zeroed tensor of all experts, once for each of them.
    """
    runs = rows[: sum(sizes)].split(sizes)
    # An expert without tokens gets a gradient of zeros, so that ranks agree on which parameters have one.
    needed = [size > 0 or torch.is_grad_enabled() for size in sizes]
    results = [
        F.linear(F.silu(F.linear(run, gate)) * F.linear(run, up), down)
        for run, gate, up, down, wanted in zip(
            runs, moe.gate.unbind(), moe.up.unbind(), moe.down.unbind(), needed, strict=True
        )
        if wanted
    ]
    return torch.cat([rows[:0], *results])


# --- what the training loop calls ---------------------------------------------------------------------


def moe_layers(model: GPT) -> list[MoE]:
    """Asked several times in every step: a dense model is not searched."""
    return [module for module in model.modules() if isinstance(module, MoE)] if model.spec.experts else []


def set_balance_scale(model: GPT, scale: float) -> None:
    """Before a backward pass: what the main loss (a sum over tokens) is multiplied by, 1 / global tokens and so on."""
    for moe in moe_layers(model):
        moe.balance_scale = scale


@torch.no_grad()
def update_balance(model: GPT, group: ProcessGroup | None = None) -> None:
    """After an optimizer step: add up the choices of all ranks in `group`, which see other tokens of the same layers,
    and make experts with more than the mean less likely by balance_bias, those with fewer more likely."""
    layers = moe_layers(model)
    if not layers:
        return
    device = layers[0].router.weight.device
    none = torch.zeros(layers[0].experts, dtype=torch.int64, device=device)
    expert_counts = torch.stack([none if moe.expert_counts is None else moe.expert_counts for moe in layers])
    if group is not None:
        dist.all_reduce(expert_counts, group=group)
    for moe, load in zip(layers, expert_counts, strict=True):
        moe.expert_counts, moe.load = None, load
        if moe.choice_bias is not None:
            moe.choice_bias += moe.balance_rate * (load.float().mean() - load).sign()


def expert_load(model: GPT) -> float:
    """Choices of the busiest expert over the mean, in the worst layer of the last step; 1 is even."""
    loads = [moe.load.float() for moe in moe_layers(model) if moe.load is not None]
    return max((float(load.max() / load.mean()) for load in loads if load.any()), default=1.0)
