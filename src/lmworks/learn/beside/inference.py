"""Inference beside the engine."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row, numbers


def decode_step(module: ModuleType) -> list[Row]:
    """The engine's paged attention, with one block for the whole sequence."""
    import torch

    from ...kernels.inference.paged_attention import AttentionMetadata, LayerCache, reference

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
    from ...engine.core.request import Request, Sequence
    from ...engine.core.sampling_params import SamplingParams
    from ...engine.core.scheduler import Scheduler
    from ...spec import EngineSpec

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

    from ...kernels.inference.top_k_top_p import TruncationParams, reference

    logits, rows = numbers(1000) * 2, []
    for top_k, top_p in ((40, 1.0), (0, 0.9), (40, 0.9)):
        yours = int((module.truncated(logits, 0.8, top_k, top_p) > 0).sum())
        tables = [torch.tensor([value]) for value in (0.8, float(top_k), top_p, 0.0)]
        threshold = reference(logits[None], TruncationParams._make([*tables, torch.tensor([0])]))
        rows.append(Row(f"tokens kept of 1,000: top_k {top_k}, top_p {top_p}", yours, int((logits >= threshold).sum())))
    return rows


def int8(module: ModuleType) -> list[Row]:
    from ...kernels.inference.quantized import int8_dequantize, int8_quantize

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
    "decode_step": decode_step,
    "continuous_batching": continuous_batching,
    "top_k_top_p": top_k_top_p,
    "int8": int8,
}
