"""Parallelism beside LMWorks' own layers, losses and pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

from .rows import Beside, Row, numbers


@dataclass(frozen=True)
class SimulatedGroup:
    """What LMWorks' collectives take for a process group."""

    link: Any

    def size(self) -> int:
        return int(self.link.ranks)


def sequence_parallel(module: ModuleType) -> list[Row]:
    """LMWorks' norm and tensor-parallel region; its two collectives go around the same rings."""
    from unittest.mock import patch

    import torch.nn.functional as F

    from ...kernels.rms_norm import rms_norm
    from ...parallel import collectives
    from ...parallel.tensor_parallel import Region
    from ...spec import ModelSpec, components
    from ..checks.parallelism import rank_parts
    from ..checks.simulated_ranks import on_ranks

    spec = ModelSpec(layers=1, hidden=8, heads=1, ffn=32, mlp="gelu")
    whole = [numbers(*shape, seed=seed) for seed, shape in enumerate(((16, 8), (8,), (32, 8), (8, 32)))]

    def ours(x: Any, norm: Any, up: Any, down: Any, link: Any) -> Any:
        region = Region(cast("Any", SimulatedGroup(link)), sequence=True)
        entered = region.enter(rms_norm(x.unsqueeze(0), norm, 1e-5))
        return region.leave(F.gelu(entered @ up.T) @ down.T).squeeze(0)

    def finish_ours(norm: Any, up: Any, down: Any, link: Any) -> None:
        weights = {one.name: one for one in components.block_weights(spec)}
        for name, tensor in (("mlp_norm", norm), ("mlp.up", up), ("mlp.down", down)):
            if weights[f"{name}.weight"].has_partial_grad(link.ranks, sp=True):
                tensor.grad = link.all_reduce(tensor.grad)

    def measure(forward: Any, finish: Any, parts: Any, link: Any) -> tuple[int, int, float]:
        out = forward(*parts, link)
        there = link.network.bytes_sent[link.rank]
        out.square().mean().backward()
        back = link.network.bytes_sent[link.rank] - there
        finish(*parts[1:], link)
        return there, back, float(parts[1].grad.abs().mean())

    def around_ring(ring: Callable[[Any, Any], Any]) -> Callable[[Any, int, Any], Any]:
        return lambda x, dim, group: ring(x.movedim(dim, 0), group.link).movedim(0, dim)

    pairs = (module.sequence_parallel_mlp, module.finish_gradients), (ours, finish_ours)
    found = []
    with (
        patch.object(collectives, "all_gather", around_ring(module.ring_all_gather)),
        patch.object(collectives, "reduce_scatter", around_ring(module.ring_reduce_scatter)),
    ):
        for pair in pairs:
            parts = [rank_parts(whole, rank, 4) for rank in range(4)]
            found.append(on_ranks("sequence parallelism", parts, partial(measure, *pair))[0][0])
    names = "bytes sent, forward pass", "bytes sent, backward pass", "mean of |gradient of the norm|"
    return [Row(f"4 ranks: {name}", *one) for name, *one in zip(names, *found, strict=True)]


def expert_dispatch(module: ModuleType) -> list[Row]:
    """LMWorks' layer of experts and its dispatch, on the same simulated ranks."""
    from unittest.mock import patch

    import torch
    import torch.nn.functional as F

    from ...model.moe import MoE
    from ...parallel import collectives
    from ...parallel.expert_parallel import dispatch_tokens
    from ...spec import ModelSpec
    from ..checks.simulated_ranks import on_ranks

    ranks, local, width = 4, 2, 16
    spec = ModelSpec(layers=1, hidden=width, heads=1, experts=ranks * local, top_k=2, expert_ffn=32)
    gate, up, down = numbers(8, 32, width, seed=1), numbers(8, 32, width, seed=2), numbers(8, width, 32, seed=3)
    router, x = numbers(8, width, seed=4), list(numbers(ranks, 24, width))

    def yours(x: Any, link: Any) -> Any:
        experts = [
            lambda rows, at=at: F.linear(F.silu(rows @ gate[at].T) * (rows @ up[at].T), down[at])
            for at in range(link.rank * local, (link.rank + 1) * local)
        ]
        return module.dispatch(x, *module.route(x, router, 2), experts, link)

    def ours(x: Any, link: Any) -> Any:
        here = slice(link.rank * local, (link.rank + 1) * local)
        moe = MoE(spec)
        moe.router.weight.data = router
        moe.gate.data, moe.up.data, moe.down.data = gate[here], up[here], down[here]
        moe.dispatch = partial(dispatch_tokens, group=cast("Any", SimulatedGroup(link)))
        with torch.no_grad():
            return moe(x.unsqueeze(0)).squeeze(0)

    def all_to_all(x: Any, of: list[int], to: list[int], group: SimulatedGroup) -> Any:
        return group.link.all_to_all(x, to, of)

    with patch.object(collectives, "all_to_all", all_to_all):
        found = [on_ranks("expert parallelism", x, call) for call in (yours, ours)]
    means = (float(torch.stack(outs).abs().mean()) for outs, _ in found)
    vectors = (max(network.bytes_sent) / (4 * width) for _, network in found)
    return [Row("4 ranks, 24 tokens each, top 2: mean of |output|", *means),
            Row("vectors sent by the rank that sends the most", *vectors)]  # fmt: skip


def vocab_parallel_loss(module: ModuleType) -> list[Row]:
    import torch

    from ...kernels.training.cross_entropy import reference
    from ..checks.simulated_ranks import on_ranks

    hidden, weight = numbers(16, 8), numbers(40, 8, seed=1)
    targets = torch.arange(16) * 7 % 40
    logits = list((hidden @ weight.T).chunk(4, dim=1))
    losses, _ = on_ranks("the loss", logits, lambda own, link: module.vocab_parallel_loss(own, targets, link))
    return [Row("loss of 16 tokens over 4 ranks", float(losses[0]), float(reference(hidden, weight, targets)) / 16)]


def pipeline(schedule: str, yours: Callable[[ModuleType], Any]) -> Beside:
    def rows(module: ModuleType) -> list[Row]:
        from ...plan.pipelines.schedule import Action, actions, idle_shares, simulate

        found, times = [], {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        for stages, micro_batches in ((4, 8), (8, 32)):
            orders = [[Action(stage, *one) for one in yours(module)(stage, stages, micro_batches)]
                      for stage in range(stages)]  # fmt: skip
            idle = (100 * max(idle_shares(simulate(each, [times] * stages)))
                    for each in (orders, actions(schedule, stages, 1, micro_batches)))  # fmt: skip
            found.append(Row(f"{stages} stages, {micro_batches} micro-batches: % idle", *idle))
        return found

    return rows


def merge_attention(module: ModuleType) -> list[Row]:
    from ...kernels.training.attention_tile import merge

    tiles = [(numbers(1, 2, 3, 4, seed=seed), numbers(1, 2, 3, seed=seed + 1)) for seed in (0, 2)]
    yours, _ = module.merge(*tiles[0], *tiles[1])
    ours, lse = (one.clone() for one in tiles[0])
    merge(ours, lse, *tiles[1])
    return [Row("mean of |output|", float(yours.abs().mean()), float(ours.abs().mean()))]


BESIDE: dict[str, Beside] = {
    "sequence_parallel": sequence_parallel,
    "vocab_parallel_loss": vocab_parallel_loss,
    "expert_dispatch": expert_dispatch,
    "one_f_one_b": pipeline("1f1b", lambda module: module.one_f_one_b),
    "zero_bubble": pipeline("interleaved-zero-bubble", lambda module: module.zero_bubble),
    "merge_attention": merge_attention,
}
