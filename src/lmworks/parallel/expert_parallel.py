"""Expert parallelism: each rank of an "ep" group holds some of the experts, and tokens are sent to them and back.

    rows by expert → how many go where → all-to-all → rows by expert again → experts → all-to-all back

An expert's gradient on a rank is then already the sum over its "ep" group; data parallelism adds up "edp" alone. Ranks
are those of data and context parallelism, so every one routes tokens of its own; tensor-parallel ranks route the same
ones, each within an "ep" group of its own and with its slice of every expert.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.training.permute import permute
from ..model import GPT
from ..model.moe import MoE, moe_layers, run_experts, supports_grouped_mm
from . import collectives
from .mesh import Mesh
from .sharding_plan import ShardingPlan

WEIGHTS = ("gate", "up", "down")  # (experts, …): what is sharded


def apply_expert_parallel(part: GPT, mesh: Mesh, sharding: ShardingPlan) -> None:
    """Shard the experts of every MoE layer over the axis "ep", and dispatch its tokens to them."""
    for name, layer in part.named_modules():
        if isinstance(layer, MoE):
            for weight in WEIGHTS:
                sharding.shard_weight(layer, f"{name}.", weight, "ep", 0, mesh)
            layer.dispatch = partial(dispatch_tokens, group=mesh.group("ep"))


def expert_names(part: GPT) -> set[str]:
    """Parameters of which ranks of an "ep" group hold different experts: gradients are summed over "edp" only."""
    return {
        f"{name}.{weight}"
        for name, layer in part.named_modules()
        if isinstance(layer, MoE) and layer.gate.shape[0] < layer.experts
        for weight in WEIGHTS
    }


def sum_balance_loss_over_cp(part: GPT, group: ProcessGroup) -> None:
    """Under context parallelism a rank has a part of each sequence, and the balance loss is that of whole sequences.

    The backward pass of the sum is the identity: each rank computes the whole loss, and the gradient of its own tokens,
    which data parallelism adds up.
    """
    for layer in moe_layers(part):
        layer.sum_over_sequence = partial(collectives.reduce_from_region, group=group)


def dispatch_tokens(moe: MoE, rows: Tensor, counts: Tensor, group: ProcessGroup) -> Tensor:
    """Rows (pairs, hidden), grouped by expert, through experts on other ranks: `moe.dispatch` under expert parallelism.

    Every rank takes part in every exchange, with no rows if it has none; so do experts that no token chose.
    """
    ranks, local = group.size(), moe.experts // group.size()
    given = counts.view(ranks, local)
    got = exchange_counts(counts, group)
    sizes = split(torch.cat((given.sum(dim=1), got.sum(dim=1), got.sum(dim=0))).tolist(), ranks)
    return dispatch_and_combine(moe, rows, got, sizes, group)


def exchange_counts(counts: Tensor, group: ProcessGroup) -> Tensor:
    """(ranks, local experts): how many rows come from each rank for each expert here."""
    each = [counts.shape[0] // group.size()] * group.size()
    return collectives.all_to_all(counts, each, each, group).view(group.size(), -1)


def dispatch_and_combine(
    moe: MoE, rows: Tensor, got: Tensor, sizes: tuple[list[int], list[int], list[int]], group: ProcessGroup
) -> Tensor:
    """`sizes`: rows to each rank, rows from each rank, rows of each expert here."""
    to, of, runs = sizes
    arrived = collectives.differentiable_all_to_all(
        rows[: sum(to)], of, to, group
    )  # by rank it came from, then by expert
    expert = torch.arange(len(runs), device=got.device).repeat(group.size())
    order = expert.repeat_interleave(got.flatten(), output_size=sum(of)).argsort(stable=True)
    back = order.argsort()
    rows = permute(arrived, order, back, 1, arrived.dtype)
    result = run_experts(moe, rows, got.sum(dim=0) if supports_grouped_mm(moe, rows) else runs)
    result = permute(result, back, order, 1, result.dtype)
    return collectives.differentiable_all_to_all(result, to, of, group)


def split(numbers: list[int], ranks: int) -> tuple[list[int], list[int], list[int]]:
    return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]
