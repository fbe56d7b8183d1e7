"""What a training code base does that the spec of a run does not say: how it holds tensors and which kernels it has.

The planner is held against runs of other people's code. Their step differs from ours in a few facts, and these are
all of them; a run of our own trainer is one entry among the others. Constants of time are fitted and live in
`fitted.toml`.
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
    low: int = 0  # or the bits that make such a weight an fp32 number
    # Passes over the gradients beside the update's: their norm, then read and written to scale them. An update that
    # scales them itself saves the second; PyTorch's still writes them back.
    clips: int = 3
    # Kernels of a block.
    stream: int = 4  # bytes of one number of the residual stream; products are as wide as the precision in use
    cast: bool = False  # weights are fp32 and every layer casts them, as autocast does
    fused: bool = False  # norms, rotary embedding, activation and residual sums are one pass each
    # A block is one graph to its compiler: it runs again as a whole, and what products in 8 bits take is not kept.
    graph: bool = False
    sums: bool = False  # the gradient of a bias is a pass of its own, where norms and the like are fused
    attention: str = "flash"  # or "scores": every score is held, as before flash attention
    flash: str = ""  # which flash attention, as rates.toml names them ("": what PyTorch takes on this GPU)
    dropout: bool = False  # its masks are kept
    loss: str = "chunked"  # logits never whole; "plain": whole, in fp32 as well; "fused": whole, once; or "compiled"
    in_place: bool = False  # gradients take the place of logits on a GPU, in one kernel
    joined: bool = False  # GELU, its gradient and the sums of a block are ends of products on a GPU
    wide_ends: bool = False  # the last LayerNorm and the head's gradient in fp32, over chunks twice as large: ours once
    logit_bytes: int = 0  # of one logit when the loss is highest (0: as its kind has it, see closed_form.py)
    every_second: bool = False  # selective recompute keeps every second product, not all
    stand_in: int = 0  # bytes a weight of what autograd is handed where a product adds to the gradient itself
    narrow_experts: bool = True  # with products in 8 bits, those of routed experts are too
    casts: float = 5.0  # bytes moved for every number of a product's operands that is cast to 8 bits
    # Times that products of one GPU take over those of code with more between them: see DENSE.
    dense: float = 1.0
    # What the data-parallel traffic of a step hides behind.
    overlap: bool = True
    gather: int = 0  # bytes of a parameter on its way to a gather (0: as the precision in use)
    reduce: int = 4  # bytes of a gradient on its way
    held_back: bool = False  # sharded gradients meet after the last micro-batch of a step, and are whole until then
    bucket: float = math.inf  # weights that are gathered or reduced at once, where that is less than a block
    # ZeRO-3 of 2021: gathers tensor by tensor, copies every rank's part by itself, and again for what is computed again
    piecewise: bool = False
    async_tp: bool = False  # tensor-parallel traffic runs behind the products it feeds
    again: float = 0.0  # share of a block's products that selective recompute computes again all the same


# Whether our own loss does so now: as kernels/measured.toml has it, which a test compares. Runs that were measured
# before keep what they had, see `as_it_ran`.
IN_PLACE = True
JOINED = True  # likewise, whether GELU and the sum after the MLP are epilogues of products: gelu_mlp.py

WIDE_SUMS = "triton, fp32 sums"  # how runs of 15 November 2026 name the loss that they had

# Compiled, with bf16 weights, our steps have little between two products that would let the GPU cool. In profiles of
# seven of them on one H200 (15 November 2026, benchmarks/results/train_gpu.json) all products together took 1.07 times
# what the constants of earlier runs give where they are 58 % of the step (GPT-2), 1.10 at 65 % (1B and 1.5B), 1.12 at
# 53 % beside much attention (8B, fp8) and 1.20 at 73 % (8B): 1.12 in the mean.
DENSE = 1.12

DEEPSPEED = 5e8  # its default reduce_bucket_size, in weights

OWN: Any = {"clips": 2, "cast": True, "held_back": True, "narrow_experts": False}
EAGER = Software("lmworks", **OWN)
COMPILED = Software("lmworks-compile", fused=True, graph=True, sums=True, **OWN)

SOFTWARE = {
    software.name: software
    for software in (
        EAGER,
        COMPILED,
        # FSDP2 with fp32 shards gathered in bf16; logits whole. Its selective recompute saves every second product of a
        # block: keys, attention's output and the second half of SwiGLU are computed again.
        Software("torchtitan", stream=2, loss="plain", flash="fa2", every_second=True, again=0.36),
        # A compiler that is only asked to prefer it keeps them.
        Software("torchtitan-compile", stream=2, fused=True, loss="plain", flash="fa2", every_second=True),
        Software("torchtitan-2025", stream=2, fused=True, loss="compiled", every_second=True),
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
            piecewise=True,
            bucket=DEEPSPEED,
        ),
        Software("megatron", 2, 4, 4, stream=2, fused=True, loss="fused", stand_in=2),
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
            piecewise=True,
            bucket=DEEPSPEED,
        ),
        # FSDP1 over MPT with flash attention, all gathers and sums in bf16; logits and their gradients too.
        Software("llm-foundry", stream=2, fused=True, loss="plain", logit_bytes=4, flash="fa1", reduce=2),
        # Only met in tables: ZeRO over a plain model, the Trainer's autocast, one compiled file.
        Software("deepspeed", 2, 2, 4, stream=2, loss="plain", reduce=2, bucket=DEEPSPEED),
        Software("huggingface", cast=True, loss="plain"),
        Software("nanogpt", cast=True, fused=True, sums=True, loss="plain"),
    )
}


def software_of(spec: RunSpec) -> Software:
    """Our own trainer, as this run uses it."""
    own = COMPILED if spec.parallel.compile else EAGER
    return replace(kept_in(own, spec.precision), async_tp=spec.parallel.async_tp)


def kept_in(own: Software, kept: PrecisionSpec) -> Software:
    """Our own trainer of today in these formats."""
    own = replace(own, reduce=2 if kept.reduce == "bf16" else 4, in_place=IN_PLACE)
    if kept.weights == "bf16":  # and with them gradients and the residual stream; nothing is left to cast
        dense = DENSE if own.fused else 1.0
        low = 2 if kept.master else 0
        return replace(own, weights=2, gradients=2, low=low, clips=1, stream=2, cast=False, dense=dense, joined=JOINED)
    return replace(own, cast=kept.compute != "fp32")


def as_it_ran(own: Software, loss: str, clips: int) -> Software:
    """Our own trainer as it was when a run was measured: how it clipped, and whose loss it had: "torch", "triton" or
    `WIDE_SUMS`. GELU and sums were passes of their own in all of them."""
    return replace(own, in_place=loss != "torch", wide_ends=loss == WIDE_SUMS, clips=clips, joined=False)
