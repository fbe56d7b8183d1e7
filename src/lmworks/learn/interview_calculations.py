"""What the calculations of interview.toml come to, by the product's own functions, and known wrong answers beside it.

The wrong ones are mostly the same functions with what their author overlooked: another stage of ZeRO, all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..evals.metrics import pass_at_k
from ..plan import flops
from ..plan.case import Case
from ..plan.cluster_request import ClusterRequest, run_on_cluster
from ..plan.collective_algorithms.compare import bus_share
from ..plan.collective_algorithms.schedules import schedule
from ..plan.exact.collectives import collectives
from ..plan.memory.rank_weights import Place, Resident, rank_weights
from ..plan.memory.sheet import saved_by_blocks
from ..plan.pipelines.bubble import ideal_idle
from ..plan.pipelines.schedule import durations
from ..plan.reliability import RATES, mtbf, young
from ..plan.serving.batching import queueing_seconds
from ..plan.serving.served_model import Cache, ServedModel
from ..plan.software import SOFTWARE
from ..record.formatting import short
from ..scaling.law_file import read_law
from ..scaling.optimum import FlopRule, optimum
from ..spec import Gpu, ModelSpec, components
from ..spec.hardware import catalogue

BF16, FP32 = 2, 4  # bytes
H100 = "H100-SXM-80GB"
SEQ = 4096  # tokens of a sequence, where the question says so


@dataclass(frozen=True)
class Worked:
    expected: float
    wrong: Mapping[str, float]  # by the names that the question's mistakes have
    facts: Mapping[str, str] = field(default_factory=dict)  # figures of its formula


def model_of(preset: str) -> ModelSpec:
    return ModelSpec.from_dict({"preset": preset})


def peak_of(gpu: Gpu) -> float:
    """FLOP/s in bf16."""
    return 1e12 * gpu.bf16_tflops


def billions(count: float) -> str:
    return f"{count / 1e9:.4g}·10⁹"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


# --- data parallelism and memory -------------------------------------------------------------------------


def sent(collective: str, ranks: int) -> float:
    """Bytes that a rank of a ring sends for each byte of the buffer."""
    return schedule(collective, "ring", ranks).most_sent


def states(model: str, ranks: int = 1, stage: int = 0) -> Resident:
    """bf16 weights and gradients, an fp32 copy and Adam's moments, as DeepSpeed holds them."""
    case = Case(model_of(model), Gpu(), SOFTWARE["deepspeed"], SEQ, dp_shard=ranks, zero=stage)
    return rank_weights(case, Place()).resident


def ddp(model: str, ranks: int) -> Worked:
    gradients = BF16 * model_of(model).params
    wrong = {"half": gradients * sent("reduce_scatter", ranks), "to_everyone": gradients * (ranks - 1)}
    return Worked(gradients * sent("all_reduce", ranks), wrong, {"gradients": gigabytes(gradients)})


def zero(model: str, ranks: int, stage: int) -> Worked:
    found, whole = states(model, ranks, stage), states(model)
    wrong = {
        "unsharded": whole.total,
        "all_sharded": whole.total / ranks,
        "stage_below": states(model, ranks, stage - 1).total,
        "no_master": found.total - found.master,
    }
    facts = {
        "weights": gigabytes(found.parameters), "gradients": gigabytes(found.gradients),
        "optimizer": gigabytes(found.master + found.optimizer),
    }  # fmt: skip
    return Worked(found.total, wrong, facts)


def memory_30b(model: str) -> Worked:
    found = states(model)
    wrong = {"no_master": found.optimizer, "all_states": found.total}
    return Worked(found.master + found.optimizer, wrong, {"parameters": billions(model_of(model).params)})


def activations(model: str, micro_batch: int, tokens: int) -> Worked:
    """As torchtitan keeps them: its residual stream is bf16."""
    shape = model_of(model)

    def kept(recompute: str) -> float:
        case = Case(shape, catalogue()[H100], SOFTWARE["torchtitan"], tokens, micro_batch, recompute=recompute)
        return float(saved_by_blocks(case))

    expected = kept("full")
    wrong = {"everything": kept("none"), "one_layer": expected / shape.layers, "fp32": expected * FP32 / BF16}
    return Worked(expected, wrong, {"layers": str(shape.layers), "hidden": str(shape.hidden)})


def rlhf(model: str) -> Worked:
    trained, scored = states(model).total, ServedModel.of(model_of(model)).weight_bytes("bf16")
    wrong = {"all_trained": 4 * trained, "frozen_critic": trained + 3 * scored, "weights": 4 * scored}
    return Worked(2 * trained + 2 * scored, wrong, {"parameters": billions(model_of(model).params)})


# --- communication and parallelism -----------------------------------------------------------------------


def all_collectives(model: str, ranks: int) -> Worked:
    weights = BF16 * model_of(model).params
    wrong = {"like_ddp": weights * sent("all_reduce", ranks), "one_pass": weights * sent("all_gather", ranks)}
    expected = weights * (2 * sent("all_gather", ranks) + sent("reduce_scatter", ranks))
    return Worked(expected, wrong, {"weights": gigabytes(weights)})


def rounds_us(algorithm: str, ranks: int, nbytes: float, alpha: float, beta: float) -> float:
    """µs of an all-reduce: each round costs α, and β for the bytes of its largest message."""
    plan = schedule("all_reduce", algorithm, ranks)
    return sum(alpha + beta * nbytes * max(len(move.chunks) for move in turn) / plan.chunks for turn in plan.rounds)


def ring_tree(ranks: int, kib: int, alpha: int) -> Worked:
    nbytes, beta = 1024 * kib, 1e6 / 25e9
    expected = rounds_us("ring", ranks, nbytes, alpha, beta)
    wrong = {
        "half": expected / 2,
        "bandwidth_alone": rounds_us("ring", ranks, nbytes, 0, beta),
        "one_latency": alpha + rounds_us("ring", ranks, nbytes, 0, beta),
        "tree": rounds_us("tree", ranks, nbytes, alpha, beta),
    }
    return Worked(
        expected / 1e6, {name: value / 1e6 for name, value in wrong.items()}, {"rounds": str(2 * (ranks - 1))}
    )


def scaling_stalls(model: str, ranks: int, gbit: int) -> Worked:
    gradients, rate = BF16 * model_of(model).params, gbit * 1e9 / 8
    seconds = gradients * sent("all_reduce", ranks) / rate
    wrong = {"bits": seconds / 8, "half": seconds / 2, "fp32": seconds * FP32 / BF16}
    return Worked(seconds, wrong, {"gradients": gigabytes(gradients), "rate": gigabytes(rate)})


def bandwidth(ranks: int, ms: int) -> Worked:
    rate, share = 1e9 / (ms / 1e3), bus_share("all_reduce", ranks)
    return Worked(share * rate, {"algbw": rate, "half": share * rate / 2}, {"rate": gigabytes(rate)})


def tensor_parallel(model: str, tokens: int) -> Worked:
    request = ClusterRequest(cluster="8xh100", tp=8, seq=tokens, micro_batch=1, global_batch=1, zero=0)
    run = run_on_cluster(model, ["parallel.sp=false"], request)
    layers = [one for one in collectives(run) if one.group == "tp" and one.count == run.model.layers]
    expected = float(sum(one.bytes for one in layers))
    wrong = {"forward": expected / 2, "one_a_layer": expected / 4, "fp32": expected * FP32 / BF16, "cut": expected / 8}
    return Worked(expected, wrong, {"layers": str(run.model.layers), "hidden": str(run.model.hidden)})


def idle(schedule: str, stages: int, chunks: int, micro_batches: int) -> float:
    return ideal_idle(schedule, stages, chunks, micro_batches, durations())[0]


def bubble(stages: int, micro_batches: int) -> Worked:
    expected = idle("1f1b", stages, 1, micro_batches)
    return Worked(expected, {"over_work": (stages - 1) / micro_batches, "utilisation": 1 - expected})


def zero_bubble(stages: int, chunks: int, micro_batches: int) -> Worked:
    expected = idle("interleaved", stages, chunks, micro_batches)
    plain = idle("1f1b", stages, 1, micro_batches)
    return Worked(expected, {"plain": plain, "divided": plain / chunks, "utilisation": 1 - expected})


# --- training at scale -----------------------------------------------------------------------------------


def thousand_gpus(model: str, tokens: int, gpus: int, mfu: int) -> Worked:
    """`tokens` in 10¹², `mfu` in percent."""
    each = flops.model_flops_per_token(model_of(model), SEQ)
    peak = peak_of(catalogue()[H100])
    expected = each * tokens * 1e12 / (gpus * peak * mfu / 100)
    facts = {"parameters": billions(model_of(model).params), "peak": short(peak)}
    return Worked(expected, {"forward": expected / 3, "peak": expected * mfu / 100, "one_gpu": expected * gpus}, facts)


def throughput(micro_batch: int, ranks: int) -> Worked:
    """Of 2²² tokens a step."""
    request = ClusterRequest(
        cluster=f"{ranks}xh100", seq=SEQ, micro_batch=micro_batch, global_batch=2**22 // SEQ, zero=1
    )
    expected = run_on_cluster("llama3-8b", [], request).accumulation
    return Worked(expected, {"no_micro_batch": expected * micro_batch, "no_ranks": expected * ranks})


def utilisation(model: str, tokens: int) -> Worked:
    shape, peak = model_of(model), peak_of(catalogue()[H100])
    each = flops.model_flops_per_token(shape, SEQ)
    expected = each * tokens / peak
    with_recompute = expected * flops.hardware_flops_per_token(shape, SEQ, "full") / each
    wrong = {"forward": expected / 3, "recomputed": with_recompute}
    return Worked(expected, wrong, {"parameters": billions(shape.params), "peak": short(peak)})


def hardware(gpu: str) -> Worked:
    found = catalogue()[gpu]
    peak, rate = peak_of(found), 1e9 * found.bandwidth_gbs
    wrong = {"sparse": 2 * peak / rate, "bits": peak / rate / 8}
    return Worked(peak / rate, wrong, {"peak": f"{short(peak)}FLOP/s", "rate": f"{short(rate)}B/s"})


def flash_attention(model: str, tokens: int) -> Worked:
    core = components.attention_core(model_of(model))
    expected = float(FP32 * core.heads * tokens * core.saved_scores(tokens))
    wrong = {"one_head": expected / core.heads, "half": expected / 2, "kv_heads": expected * core.kv_heads / core.heads}
    return Worked(expected, wrong, {"heads": str(core.heads)})


def attention(model: str, tokens: int) -> Worked:
    shape = model_of(model)
    scores, whole = flops.attention_flops_per_token(shape, tokens), flops.forward_flops_per_token(shape, tokens)
    products = whole - scores
    wrong = {"no_mask": 2 * scores / (products + 2 * scores), "one_product": scores / 2 / (products + scores / 2)}
    facts = {
        "layers": str(shape.layers), "hidden": str(shape.hidden), "scores": billions(scores),
        "products": billions(products), "parameters": billions(products / 2),
    }  # fmt: skip
    return Worked(scores / whole, wrong, facts)


def compute_optimal(budget: int) -> Worked:
    """By Chinchilla's law, fitted again (Besiroglu et al. 2024); the budget in 10²¹ FLOP."""
    law = read_law("chinchilla")
    found = optimum(law.law, law.law.theta(law.params)[None], 1e21 * budget, FlopRule())
    n, d = float(found.n[0]), float(found.d[0])
    wrong = {"tokens": d, "forward": math.sqrt(3) * n, "no_six": math.sqrt(6) * n}
    return Worked(n, wrong, {"ratio": f"{d / n:.0f}"})


def resume(gpus: int, save_s: int) -> Worked:
    apart = mtbf(gpus, RATES["llama3"])
    expected = float(young(save_s, apart))
    wrong = {"no_two": expected / math.sqrt(2), "one_gpu": expected * math.sqrt(gpus)}
    return Worked(expected, wrong, {"apart": f"{apart / 3600:.3g} h"})


def scheduling(gpus: int, days: int) -> Worked:
    apart = mtbf(gpus, RATES["llama3"])
    stops = 86_400 * days / apart
    return Worked(
        float(stops), {"a_day": float(stops / days), "one_gpu": float(stops / gpus)}, {"apart": f"{apart / 3600:.3g} h"}
    )


# --- inference -------------------------------------------------------------------------------------------


def with_all_heads(model: ModelSpec) -> ModelSpec:
    return model.replace(kv_heads=model.heads)


def kv_cache(model: str, sequences: int, tokens: int) -> Worked:
    shape = model_of(model)

    def held(model: ModelSpec) -> float:
        return sequences * float(Cache.of(model).held(tokens))

    expected = held(shape)
    wrong = {"keys_alone": expected / 2, "all_heads": held(with_all_heads(shape)), "one_layer": expected / shape.layers}
    facts = {name: str(getattr(shape, name)) for name in ("layers", "kv_heads", "head_dim")}
    return Worked(expected, wrong, facts)


def batching(model: str, gpu: str, tokens: int) -> Worked:
    shape, memory = model_of(model), 0.9 * 1e9 * catalogue()[gpu].memory_gb
    weights = ServedModel.of(shape).weight_bytes("bf16")
    cache = Cache.of(shape)
    wrong = {
        "no_weights": cache.sequences(memory, tokens),
        "all_heads": Cache.of(with_all_heads(shape)).sequences(memory - weights, tokens),
    }
    facts = {"memory": gigabytes(memory), "weights": gigabytes(weights), "each": gigabytes(float(cache.held(tokens)))}
    return Worked(cache.sequences(memory - weights, tokens), wrong, facts)


def speculative(model: str, gpu: str) -> Worked:
    weights, found = ServedModel.of(model_of(model)).weight_bytes("bf16"), catalogue()[gpu]
    wrong = {
        "compute": 2 * model_of(model).params / peak_of(found),
        "one_byte": weights / 2 / (1e9 * found.bandwidth_gbs),
    }
    facts = {"weights": gigabytes(weights), "rate": f"{found.bandwidth_gbs:,.0f} GB/s"}
    return Worked(weights / (1e9 * found.bandwidth_gbs), wrong, facts)


def quantization(model: str) -> Worked:
    shape = model_of(model)
    served = ServedModel.of(shape)
    wrong = {"half_a_byte": shape.params / 2, "int8": served.weight_bytes("int8"), "bf16": served.weight_bytes("bf16")}
    kept = served.head.weights() + served.tables
    return Worked(served.weight_bytes("int4"), wrong, {"linear": billions(shape.params - kept), "kept": billions(kept)})


def slo(busy: int, service_ms: int) -> Worked:
    """`busy` in percent."""
    share, service = busy / 100, service_ms / 1e3
    wrong = {"mean": float(queueing_seconds(share, service)), "median": float(queueing_seconds(share, service, 0.5))}
    return Worked(float(queueing_seconds(share, service, 0.99)), wrong)


def code_models(samples: int, correct: int, k: int) -> Worked:
    expected = pass_at_k(samples, correct, k)
    wrong = {"plug_in": 1 - (1 - correct / samples) ** k, "pass_1": pass_at_k(samples, correct, 1)}
    return Worked(expected, wrong, {"wrong": str(samples - correct)})


CALCULATIONS: dict[str, Callable[..., Worked]] = {
    "ddp": ddp,
    "zero": zero,
    "thousand_gpus": thousand_gpus,
    "throughput": throughput,
    "memory_30b": memory_30b,
    "activations": activations,
    "collectives": all_collectives,
    "ring_tree": ring_tree,
    "scaling_stalls": scaling_stalls,
    "bandwidth": bandwidth,
    "tensor_parallel": tensor_parallel,
    "bubble": bubble,
    "zero_bubble": zero_bubble,
    "hardware": hardware,
    "utilisation": utilisation,
    "flash_attention": flash_attention,
    "attention": attention,
    "compute_optimal": compute_optimal,
    "resume": resume,
    "scheduling": scheduling,
    "kv_cache": kv_cache,
    "batching": batching,
    "speculative": speculative,
    "quantization": quantization,
    "slo": slo,
    "rlhf": rlhf,
    "code_models": code_models,
}
