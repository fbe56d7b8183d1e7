"""What an answer computes beside what LMWorks' own function does, on the same inputs.

For exercises that are no part of a training step. The solutions of the course have the product's numbers (tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast


@dataclass(frozen=True)
class Row:
    what: str
    yours: float | str
    ours: float | str


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


def number(value: float | str) -> str:
    if isinstance(value, str):
        return value
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

    from ..kernels.rms_norm import rms_norm
    from ..parallel import collectives
    from ..parallel.tensor_parallel import Region
    from ..spec import ModelSpec, components
    from .checks.parallelism import rank_parts
    from .checks.simulated_ranks import on_ranks

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

    from ..model.moe import MoE
    from ..parallel import collectives
    from ..parallel.expert_parallel import dispatch_tokens
    from ..spec import ModelSpec
    from .checks.simulated_ranks import on_ranks

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


# --- kernels: ours in Triton's interpreter, as the learner's --------------------------------------------


def triton_add(module: ModuleType) -> list[Row]:
    """The residual addition, which LMWorks' kernel does together with the RMSNorm after it."""
    import torch

    from ..kernels.rms_norm import add_rms_norm

    x, y = numbers(5, 200), numbers(5, 200, seed=1)
    ours, _ = add_rms_norm(x, y, torch.ones(200), 1e-6, "triton")
    return [Row("mean of |x + y|", float(module.add(x, y).abs().mean()), float(ours.abs().mean()))]


def triton_softmax(module: ModuleType) -> list[Row]:
    """LMWorks has the loss of a row without its softmax."""
    import torch

    from ..kernels.training.cross_entropy_triton import row_sums

    logits, targets = numbers(4, 1000), torch.arange(4) * 250
    log_sums, wanted = row_sums(logits, targets)
    yours = -module.softmax(logits).gather(1, targets[:, None]).log().mean()
    return [Row("cross-entropy of 4 rows of 1,000", float(yours), float((log_sums - wanted).mean()))]


def triton_matmul(module: ModuleType) -> list[Row]:
    from ..kernels.inference.linear_triton import linear

    x, weight = numbers(20, 70), numbers(50, 70, seed=1)
    yours, ours = module.matmul(x, weight.T.contiguous()), linear(x, weight)
    return [Row("mean of |x · weightᵀ|, (20, 70) times (70, 50)", *(float(one.abs().mean()) for one in (yours, ours)))]


def triton_attention(module: ModuleType) -> list[Row]:
    from ..kernels.training.flash_attention import flash_attention

    q, k, v = (numbers(2, 50, 32, seed=seed) for seed in range(3))
    ours = flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), implementation="triton")
    yours = module.attention(q, k, v)
    return [Row("mean of |output|, 2 heads, 50 positions", float(yours.abs().mean()), float(ours.abs().mean()))]


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


def continuous_batching(module: ModuleType) -> list[Row]:
    """The engine's scheduler, with the same requests, blocks and budget."""
    rows = []
    for blocks in (16, 40):
        lengths = [(3 + 7 * index % 17, 2 + 11 * index % 29, index // 3) for index in range(30)]
        yours, ours = decisions(module, lengths, blocks), engine_decisions(lengths, blocks)
        case = f"30 requests, {blocks} blocks"
        alike = sum(one == other for one, other in zip(yours, ours, strict=False))
        rows += [
            Row(f"{case}: steps", len(yours), len(ours)),
            Row(f"{case}: steps with the engine's decision", alike, len(ours)),
            Row(f"{case}: tokens computed", *(sum(sum(step.values()) for step in steps) for steps in (yours, ours))),
        ]
    return rows


def decisions(module: ModuleType, lengths: list[tuple[int, int, int]], blocks: int) -> list[dict[int, int]]:
    """Of each step: number of a request → tokens that it computes."""
    engine = module.Engine(blocks, 4, 16)
    requests = [module.Request("", *one) for one in lengths]
    steps: list[dict[int, int]] = []
    while not all(one.finished for one in requests):
        engine.waiting += [one for one in requests if one.arrival == len(steps)]
        work = engine.schedule()
        engine.compute(work)
        steps.append({requests.index(one): tokens for one, tokens in work})
    return steps


def engine_decisions(lengths: list[tuple[int, int, int]], blocks: int) -> list[dict[int, int]]:
    from ..engine.core.request import Request, Sequence
    from ..engine.core.sampling_params import SamplingParams
    from ..engine.core.scheduler import Scheduler
    from ..spec import EngineSpec

    spec = EngineSpec(block=4, blocks=blocks, context=64, max_batch_tokens=16, prefix_cache=False)
    scheduler, steps = Scheduler(spec, blocks), list[dict[int, int]]()
    sequences = [
        Sequence(Request([0] * prompt, SamplingParams(max_tokens=answer)), 0, 0, [0] * prompt, prompt, prompt + answer)
        for prompt, answer, _ in lengths
    ]
    unfinished = list(sequences)
    while unfinished:
        for sequence, (_, _, arrival) in zip(sequences, lengths, strict=True):
            if arrival == len(steps):
                scheduler.add([sequence])
        step = scheduler.schedule()
        steps.append({sequences.index(chunk.sequence): chunk.count for chunk in step.chunks})
        for sequence in [chunk.sequence for chunk in step.sampling_chunks]:
            sequence.tokens[-1] = 0
            sequence.num_known_tokens = len(sequence.tokens)
            if sequence.num_known_tokens == sequence.limit:
                scheduler.finish(sequence)
                unfinished.remove(sequence)
    return steps


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


# --- post-training ---------------------------------------------------------------------------------------


def sequence_logps(module: ModuleType) -> list[Row]:
    import torch

    from ..align.logprobs import logprobs_from_logits, sequence_logps

    logits, labels = numbers(2, 8, 16), torch.arange(16).view(2, 8)
    labels[0, :4] = -100
    following = labels[:, 1:]
    ours = sequence_logps(logprobs_from_logits(logits[:, :-1], following.clamp(min=0)), following != -100)
    yours = module.sequence_logps(logits, labels)
    return [Row(f"log-probability of answer {index}", float(yours[index]), float(ours[index])) for index in range(2)]


def dpo_loss(module: ModuleType) -> list[Row]:
    from ..align.preference_losses import dpo_loss

    inputs = numbers(8), numbers(8, seed=1), numbers(8, seed=2), numbers(8, seed=3)
    return [
        Row(f"loss of 8 pairs, β = {beta}", float(module.dpo_loss(*inputs, beta)), float(dpo_loss(*inputs, beta)[0]))
        for beta in (0.1, 0.5)
    ]


def gae(module: ModuleType) -> list[Row]:
    import torch

    from ..align.advantages import gae

    rewards, values = numbers(4, 16), numbers(4, 16, seed=1)
    pairs = zip(module.gae(rewards, values, 0.99, 0.9), gae(rewards, values, torch.ones(4, 16), 0.99, 0.9), strict=True)
    return [
        Row(f"mean of {name}", *(float(one.mean()) for one in pair))
        for name, pair in zip(("advantages", "returns"), pairs, strict=True)
    ]


def grpo_advantages(module: ModuleType) -> list[Row]:
    from ..align.advantages import group_advantages

    rewards = numbers(4, 8)
    best = (float(one.max()) for one in (module.grpo_advantages(rewards), group_advantages(rewards, 8)))
    return [Row("largest of 4 prompts × 8 answers", *best)]


def ppo_loss(module: ModuleType) -> list[Row]:
    from ..align.policy_losses import ppo_policy_loss

    logps, old, advantages = (numbers(4, 16, seed=seed) for seed in range(3))
    mask = numbers(4, 16, seed=3) > 0
    ours, _ = ppo_policy_loss(logps, old, advantages, mask)
    return [Row("loss of 4 answers", float(module.ppo_loss(logps, old, advantages, mask.float())), float(ours))]


# --- precision -------------------------------------------------------------------------------------------


def loss_scale(module: ModuleType) -> list[Row]:
    """Every seventh step overflows."""
    import torch

    from ..parallel.precision import LossScale
    from ..spec.precision import PrecisionSpec

    scaler, ours, rows = module.LossScaler(2.0**16, 3), LossScale(PrecisionSpec("fp16", loss_scale_window=3)), []
    parameter = torch.nn.Parameter(torch.zeros(1))
    for step in range(1, 21):
        parameter.grad = torch.full((1,), torch.inf if step % 7 == 0 else 1.0)
        ours.update(float(parameter.grad))
        scaler.step(torch.optim.SGD([parameter], lr=0.0), [parameter])
        if step % 5 == 0:
            rows.append(Row(f"scale after step {step}", scaler.scale, ours.scale))
    return rows


def fp8(module: ModuleType) -> list[Row]:
    import torch

    from ..kernels.training.float8 import reference

    x = numbers(64, 256)
    yours, scale = module.quantize_fp8(x)
    ours = reference(x, torch.float8_e4m3fn)
    errors = (
        float(100 * (one - x).norm() / x.norm()) for one in (yours.float() * scale, ours.values.float() * ours.scale)
    )
    return [Row("scale", float(scale), float(ours.scale)), Row("error over size of a number, %", *errors)]


def stochastic_rounding(module: ModuleType) -> list[Row]:
    import torch

    from ..kernels.training.adamw import round_to

    x, random = numbers(4096), torch.arange(4096, dtype=torch.int32) * 16
    yours, ours = module.stochastic_round(x, random), round_to(x, torch.bfloat16, random)
    return [Row("sum of 4,096 rounded numbers", float(yours.double().sum()), float(ours.double().sum()))]


# --- data and studies ------------------------------------------------------------------------------------


def pack(module: ModuleType) -> list[Row]:
    from ..data.packing import pack

    lengths = [1 + 37 * index % 101 for index in range(500)]
    return [
        Row(f"rows of {size} for 500 documents", len(module.pack(lengths, size)), len(pack(lengths, size)))
        for size in (128, 1024)
    ]


def bpe(module: ModuleType) -> list[Row]:
    """The library that LMWorks trains tokenizers with, given the same merges."""
    from tokenizers import Tokenizer, models

    from .course_files import course_sources

    words: dict[str, int] = {}
    for word in course_sources()["src/models/gpt.py"].split():
        words[word] = words.get(word, 0) + 1
    merges = module.train_bpe(words, 50)
    pieces = sorted({letter for word in words for letter in word} | {one + other for one, other in merges})
    library = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    rows = []
    for name in ("the first", "the last"):
        some = sorted(words)[:200] if name == "the first" else sorted(words)[-200:]
        ours = sum(len(library.encode(word).tokens) for word in some)
        rows.append(Row(f"tokens of {name} 200 words", sum(len(module.encode(word, merges)) for word in some), ours))
    return rows


def minhash(module: ModuleType) -> list[Row]:
    from ..curate.minhash import PROSE

    return [
        Row(f"chance to find a pair of similarity {similar}", module.chance(similar, PROSE.bands, PROSE.rows),
            PROSE.chance(similar))
        for similar in (0.5, 0.72, 0.8)
    ]  # fmt: skip


def scaling_law(module: ModuleType) -> list[Row]:
    """The constants of Hoffmann et al. as Besiroglu et al. fitted them again."""
    import math

    import numpy as np

    from ..scaling.laws import LAWS
    from ..scaling.optimum import FlopRule, optimum

    constants = {"A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}
    rows = []
    for flops in (1e20, 1e23):
        yours = module.compute_optimal(flops, *constants.values())
        theta = np.array([[math.log(1.8172), math.log(482.01), 0.3478, math.log(2085.43), 0.3658]])
        ours = optimum(LAWS["chinchilla"], theta, flops, FlopRule())
        rows.append(Row(f"{flops:g} FLOP: parameters", yours[0], float(ours.n[0])))
    return rows


def asha(module: ModuleType) -> list[Row]:
    """Which trials are promoted, while 27 of them report one after another."""
    from ..tune.stoppers import Asha, Results

    stopper, results = Asha((1, 3, 9), 3, 27), Results()
    rungs: list[dict[int, float]] = [{}, {}, {}]
    promoted: list[list[int]] = [[], []]
    for trial in range(27):
        loss = (trial * 7 % 27) / 10
        results.report(trial, 1, loss)
        rungs[0][trial] = loss
        while (next_one := stopper.promotion(results, all_started=False)) is not None:
            mine = module.promotion(rungs, set(), 3)
            promoted[0].append(-1 if mine is None else mine[0])
            promoted[1].append(next_one)
            rung = 1 if results.latest(next_one) == 1 else 2
            results.report(next_one, stopper.rungs[rung], results.losses[next_one][1])
            if rung == 2:
                results.finished.add(next_one)
            rungs[rung][next_one] = rungs[0][next_one]
    return [
        Row("promotions", len(promoted[0]), len(promoted[1])),
        Row("sum of the promoted trials' numbers, each by its turn",
            *(sum(turn * trial for turn, trial in enumerate(one, 1)) for one in promoted)),
    ]  # fmt: skip


def corrupted_rank(module: ModuleType) -> list[Row]:
    from ..train.health.replicas import find_outliers

    cases = {"2 and 5 of 8": {rank: 1 + rank * (rank in (2, 5)) for rank in range(8)}, "one of 2": {0: 1, 1: 2}}
    return [
        Row(f"{name} differ: ranks named", len(module.outliers(digests)), len(find_outliers(digests)))
        for name, digests in cases.items()
    ]


# --- profiling -------------------------------------------------------------------------------------------


def exposed_seconds(module: ModuleType) -> list[Row]:
    """Of both steps of rank 0, in the jobs that wait for messages and for the host."""
    from ..trace.breakdown import Activity
    from .checks.profiling import as_traces
    from .planted_traces import WORKSPACE_SEED, planted_jobs

    rows = []
    for letter, planted, job in planted_jobs(WORKSPACE_SEED):
        if planted not in ("comm_bound", "sync_bound"):
            continue
        rank, trace = module.read_rank(job[0]), as_traces(job)[0]
        yours = module.step_seconds(rank.events, rank.start, rank.end)
        edges = (round(1e9 * edge) - trace.origin_ns for edge in (rank.start, rank.end))
        parts = Activity(trace).breakdown(*edges)
        ours = {"busy": parts.window - parts.idle, "exposed": parts.exposed_comm, "idle": parts.idle}
        rows += [Row(f"traces/{letter}, rank 0: {part}, ms", round(1e3 * yours[part], 3), round(ours[part] / 1e6, 3))
                 for part in ours]  # fmt: skip
    return rows


def bottleneck(module: ModuleType) -> list[Row]:
    from ..diagnose.verdict import judge
    from ..trace.summary import summarise
    from .checks.profiling import as_traces
    from .planted_traces import WORKSPACE_SEED, planted_jobs

    rows = []
    for letter, _, job in planted_jobs(WORKSPACE_SEED):
        traces = as_traces(job)
        yours = module.name_bottleneck([module.read_rank(document) for document in job])
        rows.append(Row(f"traces/{letter}", yours, judge(traces, summarise(traces)).verdict))
    return rows


BESIDE: dict[str, Beside] = {
    "model_states": model_states,
    "kv_cache_bytes": kv_cache_bytes,
    "reduce_scatter": sent("reduce_scatter", lambda module, x, link: module.ring_reduce_scatter(x, link)),
    "all_gather": sent("all_gather", lambda module, x, link: module.ring_all_gather(x, link)),
    "ring_all_reduce": sent("all_reduce", lambda module, x, link: module.ring_all_reduce(x, link)),
    "zero2": sent("all_reduce", zero2),
    "alpha_beta": alpha_beta,
    "sequence_parallel": sequence_parallel,
    "vocab_parallel_loss": vocab_parallel_loss,
    "expert_dispatch": expert_dispatch,
    "one_f_one_b": pipeline("1f1b", lambda module: module.one_f_one_b),
    "zero_bubble": pipeline("interleaved-zero-bubble", lambda module: module.zero_bubble),
    "merge_attention": merge_attention,
    "triton_add": triton_add,
    "triton_softmax": triton_softmax,
    "triton_matmul": triton_matmul,
    "triton_attention": triton_attention,
    "decode_step": decode_step,
    "continuous_batching": continuous_batching,
    "top_k_top_p": top_k_top_p,
    "int8": int8,
    "sequence_logps": sequence_logps,
    "dpo_loss": dpo_loss,
    "gae": gae,
    "grpo_advantages": grpo_advantages,
    "ppo_loss": ppo_loss,
    "loss_scale": loss_scale,
    "fp8": fp8,
    "stochastic_rounding": stochastic_rounding,
    "pack": pack,
    "bpe": bpe,
    "minhash": minhash,
    "scaling_law": scaling_law,
    "asha": asha,
    "corrupted_rank": corrupted_rank,
    "exposed_seconds": exposed_seconds,
    "bottleneck": bottleneck,
}
