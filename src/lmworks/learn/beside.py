"""What an answer computes beside what LMWorks' own function does, on the same inputs.

For exercises that are no part of a training step. The solutions of the course have the product's numbers (tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Row:
    what: str
    yours: float
    ours: float


Beside = Callable[[ModuleType], list[Row]]


def table_beside(rows: list[Row]) -> list[str]:
    cells = [("", "yours", "LMWorks"), *((row.what, number(row.yours), number(row.ours)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        "Beside LMWorks' own code:",
        *(f"  {what:<{widths[0]}}  {yours:>{widths[1]}}  {ours:>{widths[2]}}" for what, yours, ours in cells),
    ]


def numbers(*shape: int, seed: int = 0) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


# --- memory ----------------------------------------------------------------------------------------------


def model_states(budget: ModuleType) -> list[Row]:
    """The planner's sheet also has Adam's step counters, four bytes a tensor."""
    from ..plan.memory.rank_weights import resident
    from ..spec import RunSpec, components

    rows = []
    for stage in range(4):
        strategy = {0: {"dp_replicate": 4}, 3: {"strategy": "fsdp2", "dp_shard": 4}}.get(
            stage, {"strategy": "zero", "dp_shard": 4, "zero": stage}
        )
        spec = RunSpec.from_dict({"model": {"preset": "tiny"}, "parallel": strategy})
        found, weights = resident(spec, 0), components.weights(spec.model)
        states = budget.model_states(sum(one.size for one in weights), 4, stage, "fp32")
        planned = found.parameters + found.gradients + found.optimizer - 4 * len(weights)
        rows.append(Row(f"tiny in fp32, 4 ranks, ZeRO-{stage}: bytes", sum(states.values()), planned))
    return rows


def kv_cache_bytes(budget: ModuleType) -> list[Row]:
    from ..plan.serving.served_model import Cache
    from ..spec import ModelSpec

    rows = []
    for name in ("llama3-8b", "llama3-70b"):
        model = ModelSpec.from_dict({"preset": name})
        arguments = model.layers, model.heads, model.kv_heads, model.hidden
        yours = budget.kv_cache_bytes(*arguments, [1000] * 8)
        rows.append(Row(f"{name}, 8 sequences of 1,000 tokens: bytes", yours, 8 * float(Cache.of(model).held(1000))))
    return rows


# --- communication ---------------------------------------------------------------------------------------


def sent(kind: str, call: Callable[[ModuleType, Any, Any], Any], buffer: int = 840) -> Beside:
    """`call` sends a buffer of so many numbers, or the rank's part of it where all ranks gather."""

    def rows(module: ModuleType) -> list[Row]:
        import torch

        from ..plan.collective_algorithms.schedules import schedule
        from .checks.simulated_ranks import on_ranks

        found = []
        for ranks in (2, 8):
            x = torch.ones(buffer // ranks if kind == "all_gather" else buffer)
            _, network = on_ranks("bytes sent", [x] * ranks, partial(call, module))
            planned = 4 * buffer * schedule(kind, "ring", ranks).most_sent
            found.append(
                Row(f"{kind} of {4 * buffer:,} bytes over {ranks} ranks: bytes sent", max(network.bytes_sent), planned)
            )
        return found

    return rows


def zero2(module: ModuleType, x: Any, link: Any) -> Any:
    return module.zero2_step(x, x, x[: len(x) // link.ranks], 0.1, link)


def alpha_beta(cost: ModuleType) -> list[Row]:
    """Each round of a schedule costs α, and β for its largest message."""
    from ..plan.collective_algorithms.schedules import schedule

    rows, alpha, beta = [], 5.0, 1e-3  # in µs
    for name, yours in (("ring", cost.ring_seconds), ("tree", cost.tree_seconds)):
        for nbytes in (1_000, 1_000_000):
            plan = schedule("all_reduce", name, 16)
            ours = sum(
                alpha + beta * nbytes * max(len(move.chunks) for move in turn) / plan.chunks for turn in plan.rounds
            )
            rows.append(Row(f"{name} over 16 ranks, {nbytes:,} bytes: µs", yours(16, nbytes, alpha, beta), ours))
    return rows


# --- parallelism -----------------------------------------------------------------------------------------


def vocab_parallel_loss(module: ModuleType) -> list[Row]:
    import torch

    from ..kernels.training.cross_entropy import reference
    from .checks.simulated_ranks import on_ranks

    hidden, weight = numbers(16, 8), numbers(40, 8, seed=1)
    targets = torch.arange(16) * 7 % 40
    logits = list((hidden @ weight.T).chunk(4, dim=1))
    losses, _ = on_ranks("the loss", logits, lambda own, link: module.vocab_parallel_loss(own, targets, link))
    return [Row("loss of 16 tokens over 4 ranks", float(losses[0]), float(reference(hidden, weight, targets)) / 16)]


def pipeline(schedule: str, yours: Callable[[ModuleType], Any]) -> Beside:
    def rows(module: ModuleType) -> list[Row]:
        from ..plan.pipelines.schedule import Action, actions, idle_shares, simulate

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
    from ..kernels.training.attention_tile import merge

    tiles = [(numbers(1, 2, 3, 4, seed=seed), numbers(1, 2, 3, seed=seed + 1)) for seed in (0, 2)]
    yours, _ = module.merge(*tiles[0], *tiles[1])
    ours, lse = (one.clone() for one in tiles[0])
    merge(ours, lse, *tiles[1])
    return [Row("mean of |output|", float(yours.abs().mean()), float(ours.abs().mean()))]


# --- inference -------------------------------------------------------------------------------------------


def decode_step(module: ModuleType) -> list[Row]:
    """The engine's paged attention, with one block for the whole sequence."""
    import torch

    from ..kernels.inference.paged_attention import AttentionMetadata, LayerCache, reference

    q, keys, values = numbers(4, 8), numbers(16, 2, 8, seed=1), numbers(16, 2, 8, seed=2)
    yours = module.decode_step(q, keys[11], values[11], keys.clone(), values.clone(), 11)
    cache = LayerCache(*(one.transpose(0, 1).contiguous()[None] for one in (keys, values)))
    tables, lengths, starts = (torch.tensor(one, dtype=torch.int32) for one in ([[0]], [12], [0, 1]))
    ours = reference(q[None], cache, AttentionMetadata(tables, lengths, starts, 1))
    return [
        Row("mean of |output|, 4 heads, 2 KV heads, 12 tokens", float(yours.abs().mean()), float(ours.abs().mean()))
    ]


def top_k_top_p(module: ModuleType) -> list[Row]:
    import torch

    from ..kernels.inference.top_k_top_p import TruncationParams, reference

    logits, rows = numbers(1000) * 2, []
    for top_k, top_p in ((40, 1.0), (0, 0.9), (40, 0.9)):
        yours = int((module.truncated(logits, 0.8, top_k, top_p) > 0).sum())
        tables = [torch.tensor([value]) for value in (0.8, float(top_k), top_p, 0.0)]
        threshold = reference(logits[None], TruncationParams._make([*tables, torch.tensor([0])]))
        rows.append(Row(f"tokens kept of 1,000: top_k {top_k}, top_p {top_p}", yours, int((logits >= threshold).sum())))
    return rows


def int8(module: ModuleType) -> list[Row]:
    from ..kernels.inference.quantized import int8_dequantize, int8_quantize

    weight = numbers(64, 256)
    q, scale = module.quantize_int8(weight)
    yours, ours = q.float() * scale[:, None], int8_dequantize(*int8_quantize(weight))
    return [
        Row(
            "error over size of a weight, %",
            *(float(100 * (one - weight).norm() / weight.norm()) for one in (yours, ours)),
        )
    ]


BESIDE: dict[str, Beside] = {
    "model_states": model_states,
    "kv_cache_bytes": kv_cache_bytes,
    "reduce_scatter": sent("reduce_scatter", lambda module, x, link: module.ring_reduce_scatter(x, link)),
    "all_gather": sent("all_gather", lambda module, x, link: module.ring_all_gather(x, link)),
    "ring_all_reduce": sent("all_reduce", lambda module, x, link: module.ring_all_reduce(x, link)),
    "zero2": sent("all_reduce", zero2),
    "alpha_beta": alpha_beta,
    "vocab_parallel_loss": vocab_parallel_loss,
    "one_f_one_b": pipeline("1f1b", lambda module: module.one_f_one_b),
    "zero_bubble": pipeline("interleaved-zero-bubble", lambda module: module.zero_bubble),
    "merge_attention": merge_attention,
    "decode_step": decode_step,
    "top_k_top_p": top_k_top_p,
    "int8": int8,
}
