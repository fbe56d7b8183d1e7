"""Properties of a training code base that the spec of a run does not say: how it stores tensors, which kernels it has.

The planner is validated on runs of other code bases, whose step differs from ours in these properties; our own trainer
is one entry. Fitted constants of time are in `fitted.toml`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..spec import PrecisionSpec, RunSpec


@dataclass(frozen=True)
class Software:
    name: str
    # Bytes of one parameter on the rank that holds it.
    weights: int = 4
    gradients: int = 4
    master: int = 0  # an fp32 copy of weights that are held in fewer bytes
    low_bytes: int = 0  # or the low bits that complete such a weight to fp32
    # Passes over the gradients beside the update's: their norm, then a read and a write to scale them. A fused update
    # saves the second; PyTorch's still writes them back.
    clip_passes: int = 3
    # Kernels of a block.
    stream: int = 4  # bytes per element of the residual stream; GEMMs have the precision in use
    cast: bool = False  # weights are fp32 and every layer casts them, as autocast does
    fused: bool = False  # norms, rotary embedding, activation and residual adds are one kernel each
    # A block is one compiled graph: it is recomputed as a whole, and inputs of fp8 GEMMs are not saved.
    graph: bool = False
    bias_grad_pass: bool = False  # a bias gradient is a separate kernel in fused code
    attention: str = "flash"  # or "scores": all scores are stored
    flash: str = ""  # version, as in rates.toml ("": PyTorch's default on this GPU)
    dropout: bool = False  # its masks are saved
    loss: str = "chunked"  # "plain": all logits, in fp32 too; "fused": all, once; or "compiled"
    in_place: bool = False  # the loss kernel overwrites logits with gradients on a GPU
    grouped_experts: bool = False  # all experts of a layer are one product on a GPU
    epilogue_fusion: bool = False  # GELU, its gradient and residual adds are GEMM epilogues on a GPU
    fp32_head: bool = False  # last LayerNorm and head gradient in fp32, chunks twice as large: ours before
    logit_bytes: int = 0  # per logit at the peak of the loss (0: by kind of loss, see memory/peak_memory.py)
    saves_alternate_gemms: bool = False  # selective recompute saves every second GEMM, not all
    wgrad_placeholder: int = 0  # bytes per weight of autograd's dummy gradient with wgrad fusion
    fp8_experts: bool = True  # under fp8, GEMMs of routed experts are fp8 too
    casts: float = 5.0  # bytes moved per GEMM operand element cast to fp8; modelled
    # Transformer Engine's (its user guide, "FP8 primer", and cast_transpose_fusion.cu): norms and activations write
    # their fp8 output and its transpose, other operands are cast and transposed in one kernel, and an operand is cast
    # once for both products that read it, a weight once a step.
    fused_casts: bool = False
    # A rank holds whole experts, over neighbouring ranks, tensor-parallel ones included, and its tokens under sequence
    # parallelism are its own part of them (Megatron Core's parallel folding: --expert-tensor-parallel-size 1).
    whole_experts: bool = False
    # A token travels once to each rank that holds some of its experts, and once over the network to each machine
    # (DeepEP, HybridEP), not once for each expert (NCCL's all-to-all).
    dispatch_once: bool = False
    fused_experts: bool = False  # products, activation and casts of experts are one kernel: TE's op fuser
    # Biases of experts (GPT-OSS's), added in fp32 and expert by expert (Megatron Core's `TEGroupedMLP._apply_bias`).
    adds_expert_biases: bool = False
    overlapped_dispatch: bool = False  # beside the pass of another micro-batch: --overlap-moe-expert-parallel-comm
    one_graph: bool = False  # a CUDA graph of all passes, or one program of XLA: the host launches no kernels
    # Factor on GEMMs of one GPU: see DENSE_GEMM_SLOWDOWN.
    gemm_slowdown: float = 1.0
    overlap: bool = True  # data-parallel communication with compute
    gather: int = 0  # bytes per parameter in an all-gather (0: those of the precision in use)
    reduce: int = 4  # bytes per gradient element in a reduction
    delayed_reduction: bool = False  # sharded gradients are reduced after the last micro-batch only
    bucket: float = math.inf  # parameters per collective, where fewer than a block
    # ZeRO-3 of 2021: gathers tensor by tensor, copies each rank's shard separately, and again for recompute.
    per_tensor_gather: bool = False
    # ZeRO-3 of DeepSpeed (runtime/zero/partitioned_param_coordinator.py, `fetch_sub_module`): a module waits for all
    # gathers under way, and then those of the next begin, stage3_prefetch_bucket_size = 5e7 weights at most, as many as
    # a large matrix has. So a gather hides behind the products of one module, not behind what has no weights.
    gathers_by_module: bool = False
    async_tp: bool = False  # tensor-parallel communication overlaps with the GEMMs it feeds; torchtitan's only
    even_stages: bool = False  # pipeline stages have as many blocks each, though the last has the head too
    selective_recompute_share: float = 0.0  # share of a block's GEMMs that selective recompute recomputes
    # Rows of the vocabulary on each tensor-parallel rank are padded to a multiple of this (Megatron's
    # --make-vocab-size-divisible-by).
    vocab_multiple: int = 0
    # DeepSpeed's BF16_Optimizer (runtime/bf16_optimizer.py): with bf16 weights, gradients are summed and reduced in
    # fp32, and optimizer states are divided among data-parallel ranks, though ZeRO is off or at stage 1.
    bf16_optimizer: bool = False


# Whether our trainer does so today: as in kernels/measured.toml, which a test compares. Earlier runs: `as_measured`.
IN_PLACE = True
EPILOGUE_FUSION = True  # of GELU and the residual add after the MLP: gelu_mlp.py

FP32_SUMS_LOSS = "triton, fp32 sums"  # name of the loss in runs of 15 November 2026

# Factor on GEMM time. Compiled steps with bf16 weights have little between two GEMMs, so that the clock drops. Source:
# profiles of seven runs on one H200 (15 November 2026, benchmarks/results/train_gpu.json): all GEMMs together took 1.07
# times what the constants of earlier runs give where they are 58 % of the step (GPT-2), 1.10 at 65 % (1B and 1.5B),
# 1.12 at 53 % beside much attention (8B, fp8) and 1.20 at 73 % (8B): 1.12 in the mean.
DENSE_GEMM_SLOWDOWN = 1.12

DEEPSPEED_BUCKET = 5e8  # its default reduce_bucket_size, in weights

LMWORKS_DEFAULTS: Any = {"clip_passes": 2, "cast": True, "delayed_reduction": True, "fp8_experts": False}
EAGER = Software("lmworks", **LMWORKS_DEFAULTS)
COMPILED = Software("lmworks-compile", fused=True, graph=True, bias_grad_pass=True, **LMWORKS_DEFAULTS)

MEGATRON = Software(
    "megatron",
    2,
    4,
    4,
    stream=2,
    fused=True,
    loss="fused",
    wgrad_placeholder=2,
    even_stages=True,
    vocab_multiple=128,
    fused_casts=True,
    whole_experts=True,
)

SOFTWARE = {
    software.name: software
    for software in (
        EAGER,
        COMPILED,
        # FSDP2 with fp32 shards gathered in bf16; logits whole. Its selective recompute saves every second product of a
        # block: keys, attention's output and the second half of SwiGLU are computed again.
        Software(
            "torchtitan",
            stream=2,
            loss="plain",
            flash="fa2",
            saves_alternate_gemms=True,
            selective_recompute_share=0.36,
        ),
        # A compiler that is only asked to prefer it keeps them.
        Software("torchtitan-compile", stream=2, fused=True, loss="plain", flash="fa2", saves_alternate_gemms=True),
        # Flash attention 2 on Hopper too; cuDNN's from October 2025 on (pytorch/torchtitan#1196, #1776): `rows.py`.
        Software("torchtitan-2025", stream=2, fused=True, loss="compiled", flash="fa2", saves_alternate_gemms=True),
        # bf16 weights, gradients summed in fp32, fp32 master weights and moments: 18 bytes a parameter.
        Software(
            "megatron-2021",
            2,
            4,
            4,
            stream=2,
            attention="scores",
            dropout=True,
            loss="plain",
            overlap=False,
            per_tensor_gather=True,
            even_stages=True,
            vocab_multiple=128,
            bucket=DEEPSPEED_BUCKET,
        ),
        MEGATRON,
        # NeMo and Megatron-Bridge: gradients are summed in 16 bits (grad_reduce_in_fp32 = False in the performance
        # recipes, github:NVIDIA-NeMo/Megatron-Bridge scripts/performance), tensor-parallel messages are overlapped.
        replace(MEGATRON, name="megatron-bridge", gradients=2, reduce=2, async_tp=True),
        Software(
            "megatron-deepspeed",
            2,
            2,
            4,
            stream=2,
            attention="scores",
            dropout=True,
            loss="plain",
            overlap=False,
            reduce=2,
            per_tensor_gather=True,
            even_stages=True,
            vocab_multiple=128,
            bucket=DEEPSPEED_BUCKET,
            bf16_optimizer=True,
        ),
        # FSDP1 over MPT with flash attention, all gathers and sums in bf16; logits and their gradients too.
        Software("llm-foundry", stream=2, fused=True, loss="plain", logit_bytes=4, flash="fa1", reduce=2),
        # Only met in tables: ZeRO over a plain model, the Trainer's autocast, one compiled file.
        Software(
            "deepspeed", 2, 2, 4, stream=2, loss="plain", reduce=2, bucket=DEEPSPEED_BUCKET, gathers_by_module=True
        ),
        Software("huggingface", cast=True, loss="plain"),
        # JAX on TPUs: fp32 weights, sharded as FSDP does (base.yml: weight_dtype, ici_fsdp_parallelism = -1), kernels
        # fused and collectives made asynchronous by XLA.
        Software("maxtext", stream=2, fused=True, loss="plain", async_tp=True, one_graph=True),
        Software("nanogpt", cast=True, fused=True, bias_grad_pass=True, loss="plain"),
    )
}


def under_bf16_optimizer(software: Software, dtype: str) -> bool:
    return software.bf16_optimizer and dtype == "bf16"


def software_of(spec: RunSpec) -> Software:
    """Our own trainer with the options of this run."""
    own = COMPILED if spec.parallel.compile else EAGER
    return with_precision(own, spec.precision)


def with_precision(own: Software, precision: PrecisionSpec) -> Software:
    """Our trainer of today with these number formats."""
    own = replace(own, reduce=2 if precision.reduce == "bf16" else 4, in_place=IN_PLACE, grouped_experts=True)
    if precision.weights == "bf16":  # gradients and residual stream are bf16 too; no casts
        dense = DENSE_GEMM_SLOWDOWN if own.fused else 1.0
        low = 2 if precision.master else 0
        return replace(
            own,
            weights=2,
            gradients=2,
            low_bytes=low,
            clip_passes=1,
            stream=2,
            cast=False,
            gemm_slowdown=dense,
            epilogue_fusion=EPILOGUE_FUSION,
        )
    return replace(own, cast=precision.dtype != "fp32")


def as_measured(own: Software, loss: str, clips: int) -> Software:
    """Our trainer at the time of a measured run: its clipping passes and its loss ("torch", "triton" or
    `FP32_SUMS_LOSS`). It had no epilogue fusion."""
    return replace(
        own, in_place=loss != "torch", fp32_head=loss == FP32_SUMS_LOSS, clip_passes=clips, epilogue_fusion=False
    )
