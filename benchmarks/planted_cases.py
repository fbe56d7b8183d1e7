"""The planted causes: each a program, what is planted in it, and the verdict that should come first.

Thresholds of lmworks.diagnose are fixed on the half FIT and scored once on the half SCORE, whose models, shapes and
layouts are others. The twin of a case is its program without the plant; the verdict on it should be healthy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from planted_program import Program


@dataclass(frozen=True)
class Case:
    name: str
    verdict: str
    base: Program
    plant: dict[str, Any]

    @property
    def planted(self) -> Program:
        return replace(self.base, **self.plant)


@dataclass(frozen=True)
class SpecCase:
    """A run of `lmworks train` on CPUs: a spec, overrides for both, and the overrides that plant the cause."""

    name: str
    verdict: str
    spec: str
    base: tuple[str, ...]
    plant: tuple[str, ...]


CPU = Program(hidden=256, layers=6, batch=32, seq=16)
TWO = Program(ranks=2, layout="ddp", hidden=256, layers=6, batch=64, seq=16)
GPT_CPU = Program(model="transformer", hidden=192, layers=4, batch=16, seq=32)
MOE_CPU = replace(GPT_CPU, model="moe", hidden=128)
PAIR = replace(GPT_CPU, ranks=2, layout="ddp")
WIDE = Program(hidden=448, layers=3, batch=40, seq=16)
LONG = Program(model="transformer", hidden=160, layers=5, batch=12, seq=64)
MOE_LARGE = replace(LONG, model="moe", layers=3, batch=16)
CONV_CPU = Program(model="conv", hidden=40, layers=5, batch=16, seq=16)
DEEP = Program(hidden=160, layers=12, batch=64, seq=16)
TALL = Program(model="transformer", hidden=256, layers=3, batch=16, seq=48)
EXPERTS = Program(model="moe", hidden=192, layers=3, batch=24, seq=48)
PIPE = Program(ranks=2, layout="pipeline", hidden=256, layers=4, batch=32, seq=64)
GPU = Program(device="cuda", dtype="bfloat16", hidden=4096, layers=4, batch=16, seq=512)
GPT = replace(GPU, model="transformer", hidden=3072, layers=6, batch=8, seq=1024)
MOE = replace(GPU, model="moe", hidden=2048, layers=6, batch=16, seq=1024)
CONV = replace(GPU, model="conv", hidden=512, layers=8, batch=64, seq=28)

FIT = [
    Case("slow read, mlp", "input_bound", CPU, {"read_s": 0.08}),
    Case("decode in Python, mlp", "input_bound", CPU, {"decode": 800_000}),
    Case("layer in pieces, mlp", "host_bound", replace(CPU, hidden=64, batch=256), {"pieces": 128}),
    Case("Python in every layer, mlp", "host_bound", CPU, {"python": 100_000}),
    Case("recompute, mlp", "recompute_heavy", CPU, {"recompute": True}),
    Case("norms and activations by hand, mlp", "memory_bound", replace(CPU, hidden=128, batch=128), {"unfused": True}),
    Case("all-reduce of each gradient in each pass, mlp", "comm_bound", replace(TWO, batch=8, passes=8),
         {"by_hand": True, "sync_each_pass": True}),
    Case("small batch, ddp", "comm_bound", replace(TWO, hidden=512, layers=3), {"small_batch": 2}),
    Case("small batch, fsdp2", "comm_bound", replace(TWO, layout="fsdp2", batch=128), {"small_batch": 4}),
    Case("more work on rank 1, ddp", "straggler", TWO, {"slow_rank": 1, "more_work": 1.6}),
    Case("throttled rank 0, ddp", "straggler", replace(TWO, one_core=True), {"slow_rank": 0, "throttled": True}),
    Case("slow read on rank 1, ddp", "straggler", TWO, {"slow_rank": 1, "late_read_s": 0.2}),
    Case("few micro-batches, 2 stages", "pipeline_bubble", PIPE, {"few_micro_batches": 2}),
    Case("uneven stages, 2 stages", "pipeline_bubble", PIPE, {"uneven": 1}),
    Case("slow read, transformer", "input_bound", GPT_CPU, {"read_s": 0.1}),
    Case("decode in Python, conv", "input_bound", replace(CPU, model="conv", hidden=48, batch=8),
         {"decode": 1_000_000}),
    Case("layer in pieces, transformer", "host_bound", replace(GPT_CPU, hidden=64, batch=64), {"pieces": 128}),
    Case("recompute, transformer", "recompute_heavy", GPT_CPU, {"recompute": True}),
    Case("norms and activations by hand, moe", "memory_bound", MOE_CPU, {"unfused": True}),
    Case("all-reduce of each gradient in each pass, transformer", "comm_bound",
         replace(PAIR, hidden=256, batch=4, passes=8), {"by_hand": True, "sync_each_pass": True}),
    Case("small batch, transformer, ddp", "comm_bound", replace(PAIR, hidden=384, layers=3), {"small_batch": 1}),
    Case("more work on rank 0, transformer", "straggler", PAIR, {"slow_rank": 0, "more_work": 1.5}),
    Case("throttled rank 1, transformer", "straggler", replace(PAIR, one_core=True),
         {"slow_rank": 1, "throttled": True}),
    Case("Python before the step on rank 0, fsdp2", "straggler", replace(PAIR, layout="fsdp2", batch=32),
         {"slow_rank": 0, "spin": 1_500_000}),
    Case("few micro-batches, transformer", "pipeline_bubble", replace(PIPE, model="transformer", hidden=192),
         {"few_micro_batches": 2}),
    Case("uneven stages, gpipe", "pipeline_bubble", replace(PIPE, layers=6, hidden=192, pipeline="gpipe"),
         {"uneven": 1}),
    Case("slow read, wide mlp", "input_bound", WIDE, {"read_s": 0.06}),
    Case("decode in Python, moe", "input_bound", MOE_LARGE, {"decode": 1_200_000}),
    Case("layer in pieces, conv", "host_bound", replace(CPU, model="conv", hidden=16, batch=256, layers=4),
         {"pieces": 256}),
    Case("Python in every layer, transformer", "host_bound", LONG, {"python": 200_000}),
    Case("recompute, moe", "recompute_heavy", MOE_LARGE, {"recompute": True}),
    Case("norms and activations by hand, transformer", "memory_bound", LONG, {"unfused": True}),
    Case("all-reduce of each gradient in each pass, wide mlp", "comm_bound",
         replace(WIDE, ranks=2, layout="ddp", batch=6, passes=6), {"by_hand": True, "sync_each_pass": True}),
    Case("small batch, wide mlp, ddp", "comm_bound", replace(WIDE, ranks=2, layout="ddp"), {"small_batch": 1}),
    Case("small batch, transformer, fsdp2", "comm_bound", replace(LONG, ranks=2, layout="fsdp2", batch=24),
         {"small_batch": 1}),
    Case("more work on rank 1, fsdp2", "straggler", replace(LONG, ranks=2, layout="fsdp2", batch=24),
         {"slow_rank": 1, "more_work": 1.4}),
    Case("throttled rank 1, conv", "straggler",
         replace(CPU, ranks=2, layout="ddp", model="conv", hidden=48, batch=24, one_core=True),
         {"slow_rank": 1, "throttled": True}),
    Case("Python before the step on rank 1, wide mlp", "straggler", replace(WIDE, ranks=2, layout="ddp"),
         {"slow_rank": 1, "spin": 1_000_000}),
    Case("few micro-batches, gpipe, wide", "pipeline_bubble",
         replace(PIPE, hidden=320, batch=32, seq=48, pipeline="gpipe"), {"few_micro_batches": 2}),
    Case("uneven stages, transformer", "pipeline_bubble", replace(PIPE, model="transformer", hidden=160, layers=6),
         {"uneven": 1}),
    Case("slow read, mlp on a GPU", "input_bound", GPU, {"read_s": 0.08}),
    Case("pageable batches, mlp on a GPU", "input_bound", replace(GPU, payload_mb=512), {"pageable": True}),
    Case("Python in every layer, mlp on a GPU", "host_bound", GPU, {"python": 600_000}),
    Case("layer in pieces, conv on a GPU", "host_bound", CONV, {"pieces": 64}),
    Case("finite check in every layer, mlp on a GPU", "sync_bound", replace(GPU, host_work=40_000), {"check": True}),
    Case("cache emptied, mlp on a GPU", "allocator_bound", GPU, {"empty_cache": True}),
    Case("recompute, mlp on a GPU", "recompute_heavy", GPU, {"recompute": True}),
    Case("norms and activations by hand, mlp on a GPU", "memory_bound", GPU, {"unfused": True}),
    Case("Adam tensor by tensor, mlp on a GPU", "memory_bound", replace(GPU, layers=8, batch=8),
         {"loop_optimizer": True}),
    Case("fp32 products, mlp on a GPU", "compute_bound", replace(GPU, layers=2), {"dtype": "float32"}),
]  # fmt: skip

SCORE = [
    Case("slow read, conv", "input_bound", CONV_CPU, {"read_s": 0.1}),
    Case("decode in Python, deep mlp", "input_bound", DEEP, {"decode": 900_000}),
    Case("layer in pieces, deep mlp", "host_bound", replace(DEEP, hidden=48, layers=8, batch=256), {"pieces": 128}),
    Case("Python in every layer, conv", "host_bound", CONV_CPU, {"python": 200_000}),
    Case("recompute, conv", "recompute_heavy", CONV_CPU, {"recompute": True}),
    Case("norms and activations by hand, deep mlp", "memory_bound", DEEP, {"unfused": True}),
    Case("all-reduce of each gradient in each pass, tall transformer", "comm_bound",
         replace(TALL, ranks=2, layout="ddp", batch=4, passes=6), {"by_hand": True, "sync_each_pass": True}),
    Case("small batch, moe, ddp", "comm_bound", replace(EXPERTS, ranks=2, layout="ddp"), {"small_batch": 1}),
    Case("small batch, deep mlp, fsdp2", "comm_bound",
         replace(DEEP, ranks=2, layout="fsdp2", hidden=320, layers=4, batch=96), {"small_batch": 4}),
    Case("more work on rank 0, conv", "straggler", replace(CONV_CPU, ranks=2, layout="ddp"),
         {"slow_rank": 0, "more_work": 1.5}),
    Case("throttled rank 0, tall transformer, fsdp2", "straggler",
         replace(TALL, ranks=2, layout="fsdp2", one_core=True), {"slow_rank": 0, "throttled": True}),
    Case("slow read on rank 0, moe", "straggler", replace(EXPERTS, ranks=2, layout="ddp"),
         {"slow_rank": 0, "late_read_s": 0.2}),
    Case("few micro-batches, 288 wide", "pipeline_bubble", replace(PIPE, hidden=288, seq=56), {"few_micro_batches": 2}),
    Case("uneven stages, 352 wide", "pipeline_bubble", replace(PIPE, hidden=352, seq=40), {"uneven": 1}),
    Case("slow read, conv on a GPU", "input_bound", CONV, {"read_s": 0.05}),
    Case("pageable batches, transformer on a GPU", "input_bound", replace(GPT, payload_mb=768), {"pageable": True}),
    Case("decode in Python, moe on a GPU", "input_bound", MOE, {"decode": 3_000_000}),
    Case("Python in every layer, transformer on a GPU", "host_bound", GPT, {"python": 400_000}),
    Case("small batch, transformer on a GPU", "host_bound", replace(GPT, hidden=2048, layers=8),
         {"small_batch": 1, "seq": 64}),
    Case("mean of every layer logged, transformer on a GPU", "sync_bound", replace(GPT, host_work=50_000),
         {"log_every_layer": True}),
    Case("finite check in every layer, moe on a GPU", "sync_bound", replace(MOE, host_work=30_000), {"check": True}),
    Case("cache emptied, transformer on a GPU", "allocator_bound", GPT, {"empty_cache": True}),
    Case("ragged lengths near the memory's end, mlp on a GPU", "allocator_bound", replace(GPU, memory_slack=0.1),
         {"ragged": True}),
    Case("recompute, transformer on a GPU", "recompute_heavy", GPT, {"recompute": True}),
    Case("recompute, moe on a GPU", "recompute_heavy", MOE, {"recompute": True}),
    Case("norms and activations by hand, transformer on a GPU", "memory_bound", GPT, {"unfused": True}),
    Case("Adam tensor by tensor, transformer on a GPU", "memory_bound", replace(GPT, layers=8, batch=2),
         {"loop_optimizer": True}),
    Case("fp32 products, transformer on a GPU", "compute_bound", replace(GPT, layers=2), {"dtype": "float32"}),
]  # fmt: skip

SMALL = ("model.hidden=128", "model.heads=4", "model.layers=4", "data.seq=128")
FIT_SPECS = [
    SpecCase("recompute, spec", "recompute_heavy", "cpu-3m", (*SMALL, "data.micro_batch=16"),
             ("parallel.recompute=full",)),
    SpecCase("recompute, spec with experts", "recompute_heavy", "cpu-3m",
             (*SMALL, "data.micro_batch=16", "model.experts=4", "model.top_k=2"), ("parallel.recompute=full",)),
]  # fmt: skip
SCORE_SPECS = [
    SpecCase("recompute, deeper spec", "recompute_heavy", "cpu-3m",
             ("model.hidden=96", "model.heads=6", "model.layers=8", "data.seq=192", "data.micro_batch=8"),
             ("parallel.recompute=full",)),
]  # fmt: skip
HALVES = {"fit": (FIT, FIT_SPECS), "score": (SCORE, SCORE_SPECS)}
