"""Training on one GPU: tokens/s, MFU and memory of the trainer's own steps, beside their floor, the planner and peers.

    python benchmarks/train_gpu.py                          every row, its first variants first, within --minutes
    python benchmarks/train_gpu.py --row 1.5b               all variants of a row
    python benchmarks/train_gpu.py --row 8b --variant "selective"
    python benchmarks/train_gpu.py --predict                what the planner expects; needs no GPU

Each variant is `lmworks bench train` in a process of its own with a hard limit, so that one that fails or hangs costs
the others nothing; results/train_gpu.json is written after each. What the planner expects is printed before.

Peers' figures were measured on one NVIDIA H200 with torch 2.11.0+cu130: nanoGPT at its default branch (compile, bf16
autocast, fused AdamW), torchtitan 0.2.2 with compile, and transformers' Llama with compile in bf16, which also runs
here in the same job (`--peer`). MFU counts causal attention once, over the datasheet's 989 (fp8: 1979) TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, commit, write_result

from lmworks.bench.power import power_text
from lmworks.bench.roofline import PeakRates, step_roofline
from lmworks.plan.devices.machine import Machine
from lmworks.plan.memory.reserve import reserved
from lmworks.plan.memory.sheet import memory
from lmworks.plan.predict import predict
from lmworks.spec import LMWorksError, RunSpec, SpecError, load_run
from lmworks.spec.hardware import catalogue

GPU = "H200-SXM-141GB"
RESULT = RESULTS / "train_gpu.json"
BEST = PeakRates("measured", {"bf16": 763e12, "fp8": 1443e12}, 4.27e12)  # of such a card: 8192³, and a copy
LIMIT_S = 150  # of one variant; compiling takes most of it
COMPILE = "parallel.compile=true"
BF16 = "precision.dtype=bf16"
HALF = (BF16, "precision.weights=bf16")  # with the low half of an fp32 master beside each weight
CHANCE = (*HALF, "precision.master=false", "precision.rounding=stochastic", "precision.states=bf16")
EIGHT = tuple("precision.dtype=fp8" if one == BF16 else one for one in CHANCE)
SELECTIVE = "parallel.recompute=selective"
FIT = "within="
PEER = "peer"


@dataclass(frozen=True)
class Row:
    work: str
    spec: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]  # the most promising first
    peer: str
    peer_tokens: int
    peer_gib: float
    aim_tokens: int
    aim_gib: float | None = None
    steps: int = 20


def within(gib: float) -> tuple[str, ...]:
    """Recompute as little as keeps the whole run within so many GiB, by the planner; see `overrides`."""
    return (f"{FIT}{gib:g}",)


ROWS = {
    "gpt2": Row(
        "GPT-2 124M, 64 × 1024",
        ("gpt2-small", "model.vocab=50304", "data.micro_batch=64", "data.seq=1024", COMPILE),
        {
            "no biases, as nanoGPT's benchmark": (*HALF, "model.bias=false"),
            "bf16 weights + master": HALF,
            "fp32 weights": (BF16,),
            "flash": (*HALF, "model.attention=flash"),
            "eager": (BF16, "parallel.compile=false"),
        },
        "nanoGPT", 529_683, 40.9, 620_000,
    ),
    "1b": Row(
        "Llama 3.2 1B shape, tied, 4 × 4096, bf16 weights",
        ("llama3-1b", "data.micro_batch=4", "data.seq=4096", COMPILE),
        {
            "bf16 weights, stochastic, bf16 states": CHANCE,
            "bf16 weights + master": HALF,
            "flash": (*CHANCE, "model.attention=flash"),
            "eager": (*CHANCE, "parallel.compile=false"),
        },
        "transformers + compile", 49_236, 39.0, 66_000,
    ),
    "1.5b": Row(
        "1.5B shape, untied, 4 × 4096, fp32 master",
        ("llama3-1b", "model.tie_embeddings=false", "data.micro_batch=4", "data.seq=4096", COMPILE),
        {
            "bf16 weights + master, within 35.5 GiB": (*HALF, *within(35.5)),
            "bf16 weights + master": HALF,
            "fp32 weights": (BF16,),
            "bf16 weights + master, selective": (*HALF, SELECTIVE),
            "bf16 weights + master, bf16 states": (*HALF, "precision.states=bf16"),
        },
        "torchtitan + compile", 60_446, 46.8, 65_000, 36.0,
    ),
    "8b": Row(
        "Llama 3 8B, 2 × 8192, bf16 weights and states, memory free",
        ("llama3-8b", "data.micro_batch=2", "data.seq=8192", COMPILE),
        {
            "no recompute": CHANCE,
            "within 100 GiB": (*CHANCE, *within(100)),
            "selective": (*CHANCE, SELECTIVE),
            "nearest": tuple(one for one in CHANCE if "rounding" not in one),
        },
        "torchtitan + compile, selective recompute", 10_570, 80.5, 11_300, steps=8,
    ),
    "8b-75": Row(
        "Llama 3 8B, 2 × 8192, bf16 weights and states, at most 75 GiB",
        ("llama3-8b", "data.micro_batch=2", "data.seq=8192", COMPILE),
        {
            "within 74.9 GiB, 20 GiB wait in host memory": (*CHANCE, "parallel.offload_activations=20", *within(74.9)),
            "within 74.9 GiB": (*CHANCE, *within(74.9)),
            "within 72 GiB": (*CHANCE, *within(72)),
            "full": (*CHANCE, "parallel.recompute=full"),
        },
        "torchtitan + compile, selective recompute", 10_570, 80.5, 10_700, 75.0, steps=8,
    ),
    "8b-fp8": Row(
        "Llama 3 8B, 2 × 8192, fp8, memory free",
        ("llama3-8b", "data.micro_batch=2", "data.seq=8192", COMPILE),
        {
            "tensorwise, fp8 head": (*EIGHT, "precision.fp8_head=true"),
            "tensorwise": EIGHT,
            "tensorwise, within 100 GiB": (*EIGHT, *within(100)),
            "rowwise": (*EIGHT, "precision.fp8_scaling=rowwise"),
        },
        "torchtitan + compile + float8", 14_255, 80.5, 15_500, steps=8,
    ),
    "moe": Row(
        "Qwen3-30B-A3B, 8 of 48 layers, 4 × 4 × 4096, bf16 weights and states",
        ("qwen3-30b-a3b", "model.layers=8", "data.micro_batch=4", "data.seq=4096", "data.global_batch=16"),
        {"eager": CHANCE, "compile": (*CHANCE, COMPILE), "eager, fp32 weights": (BF16,)},
        "transformers, grouped_mm", 45_688, 93.7, 67_000, steps=6,
    ),
}  # fmt: skip


class Table:
    """Results, on disk after each: a lent machine may go at any moment. A variant that is measured again replaces."""

    def __init__(self) -> None:
        kept = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
        self.found: list[dict[str, Any]] = [one for one in kept if "variant" in one]

    def add(self, result: dict[str, Any]) -> None:
        key = result["row"], result["variant"]
        self.found = [one for one in self.found if (one["row"], one["variant"]) != key]
        self.found.append({**result, "commit": commit()})
        write_result("train_gpu", {"rows": self.found})


def overrides(row: Row, variant: str) -> list[str]:
    """What a variant changes, with the budget that a limit on memory comes to."""
    given = [one for one in row.variants[variant] if not one.startswith(FIT)]
    limits = [float(one.removeprefix(FIT)) for one in row.variants[variant] if one.startswith(FIT)]
    if not limits:
        return given

    def asked(half_gibs: int) -> list[str]:
        return [*given, "parallel.recompute=budget", f"parallel.recompute_budget={half_gibs / 2:g}"]

    def planned(half_gibs: int) -> int:
        try:
            return memory(run_spec(row, asked(half_gibs)), "cuda").total
        except SpecError:  # less than is kept with every block computed again
            return 0

    most = bisect_right(range(1, 241), limits[0] * 2**30, key=planned)
    return asked(most) if most and planned(most) else [*given, "parallel.recompute=full"]


def run_spec(row: Row, changes: list[str]) -> RunSpec:
    first, *rest = row.spec
    return load_run(first, [*rest, *changes, f"cluster.gpu={GPU}", "cluster.device=cuda"])


def expected(row: Row, changes: list[str]) -> dict[str, Any]:
    """The planner's word, before anything ran."""
    try:
        spec = run_spec(row, changes)
        said = predict(spec, Machine.of(catalogue()[GPU]))
    except LMWorksError as error:
        return {"note": str(error)}
    allocated = said.memory.total / 2**30
    time_s = said.time.total if said.time else None
    rate = said.time.tokens_per_s if said.time else None
    return {
        "floor_tokens_per_s": spec.tokens_per_step / step_roofline(spec, BEST, "cuda").seconds,
        "step_s": time_s,
        "tokens_per_s": rate,
        "allocated_gib": allocated,
        "reserved_gib": float(reserved(allocated)),
    }


def words(said: dict[str, Any]) -> str:
    if "note" in said:
        return f"the planner does not say: {said['note']}"
    rate = f"{said['tokens_per_s']:,.0f} tokens/s" if said["tokens_per_s"] else "unknown speed"
    return f"planned {rate} of at most {said['floor_tokens_per_s']:,.0f}, {said['allocated_gib']:.1f} GiB"


def measure(row: Row, changes: list[str], limit_s: float, profile: bool) -> dict[str, Any]:
    arguments = [*row.spec, *changes, "cluster.device=cuda", "--steps", str(row.steps), "--json"]
    arguments += ["--profile"] * profile
    return answer_of([sys.executable, "-m", "lmworks", "bench", "train", *arguments], limit_s)


def answer_of(command: list[str], limit_s: float) -> dict[str, Any]:
    """The JSON that a command prints, or why there is none."""
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment
        )  # which kills it: a trainer catches what is softer
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][-500:]}
    return dict(json.loads(done.stdout[done.stdout.index("{") :]))


def take(name: str, variant: str, table: Table, profile: bool) -> None:
    row, began = ROWS[name], time.perf_counter()
    changes = overrides(row, variant)
    said = expected(row, changes)
    print(f"{row.work} [{variant}]: {words(said)}", flush=True)
    facts = measure(row, changes, LIMIT_S, profile)
    took = time.perf_counter() - began
    peer = {"name": row.peer, "tokens_per_s": row.peer_tokens, "gib": row.peer_gib}
    aim = {"tokens_per_s": row.aim_tokens, "gib": row.aim_gib}
    table.add(
        {"row": name, "work": row.work, "variant": variant, "spec": [*row.spec, *changes]}
        | {"planned": said, "peer": peer, "aim": aim, "took_s": took, **facts}
    )
    print(f"  {outcome(row, facts)} ({took:.0f} s in all)", flush=True)


def outcome(row: Row, facts: dict[str, Any]) -> str:
    if "failed" in facts:
        return f"failed: {facts['failed']}"
    gib = facts["memory"]["allocated_bytes"] / 2**30
    floors = ", ".join(f"{at['reached']:.0%} of the {name} floor" for name, at in facts["floors"].items())
    power = facts["power"]
    clock = f"; {power['clock_mhz']:,.0f} MHz {power_text(power)}" if power else ""
    met = facts["tokens_per_s"] >= row.aim_tokens and (row.aim_gib is None or gib <= row.aim_gib)
    return (
        f"{facts['tokens_per_s']:,.0f} tokens/s, MFU {facts['mfu'] or 0:.1%}, {gib:.1f} GiB, {floors}; {row.peer} "
        f"{row.peer_tokens:,}: {facts['tokens_per_s'] / row.peer_tokens:.2f}×; aim "
        f"{row.aim_tokens:,}{f' and {row.aim_gib:g} GiB' if row.aim_gib else ''}: {'met' if met else 'not met'}{clock}"
    )


# --- the peer that can run here -------------------------------------------------------------------------


def hugging_face_1b() -> Any:
    """transformers' Llama of the 1B shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
        rope_theta=500_000.0,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=BFLOAT16, attn_implementation="sdpa")


def hugging_face_moe() -> Any:
    """transformers' Qwen3-MoE of the row "moe"."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False, use_cache=False,
        rope_theta=1_000_000.0, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    )  # fmt: skip
    kernels = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    return Qwen3MoeForCausalLM._from_config(config, dtype=BFLOAT16, **kernels)


BFLOAT16 = "bfloat16"
PEERS = {"1b": (hugging_face_1b, 1, True), "moe": (hugging_face_moe, 4, False)}  # passes a step, compiled


def hugging_face(row: str, batch: int = 4, seq: int = 4096, steps: int = 12, warm_up: int = 4) -> dict[str, Any]:
    """bf16 weights and states, fused AdamW."""
    import torch

    make, passes, compiled = PEERS[row]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make()
        tokens = torch.randint(0, model.config.vocab_size, (batch, seq))
    step = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for number in range(warm_up + steps):
        if number == warm_up:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(passes):
            (step(input_ids=tokens, labels=tokens).loss / passes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step_s = statistics.median(seconds[warm_up:])
    allocated = torch.cuda.max_memory_allocated()
    return {"step_s": step_s, "tokens_per_s": passes * batch * seq / step_s, "memory": {"allocated_bytes": allocated}}


def take_peer(table: Table, row: str) -> None:
    began = time.perf_counter()
    facts = answer_of([sys.executable, __file__, "--peer", row], LIMIT_S)
    took = time.perf_counter() - began
    compiled = " + compile" if PEERS[row][2] else ""
    table.add({"row": row, "variant": f"peer: transformers{compiled}", "took_s": took, **facts})
    rate = facts.get("failed") or format(facts["tokens_per_s"], ",.0f")
    print(f"transformers{compiled}, {row}: {rate} ({took:.0f} s)")


# --- the command ----------------------------------------------------------------------------------------


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(row, variant): the first of every row, then every second, and so on."""
    rows = {options.row: ROWS[options.row]} if options.row else ROWS
    pairs = [(name, variant, place) for name, row in rows.items() for place, variant in enumerate(row.variants)]
    pairs.sort(key=lambda pair: pair[2])
    return [(name, variant) for name, variant, _ in pairs if options.variant in (None, variant)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS)
    parser.add_argument("--variant")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing that may end later")
    parser.add_argument("--profile", action="store_true", help="keep the kernels of a step, too")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--peer", help="run transformers' model of this row alone; prints JSON")
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(hugging_face(options.peer)))
        return
    pairs = wanted(options)
    if not pairs:
        parser.error(f"--variant {options.variant!r} is in no row that was asked for; --predict lists them all")
    if options.predict:
        for name, variant in pairs:
            print(f"{name:8} {variant:40} {words(expected(ROWS[name], overrides(ROWS[name], variant)))}")
        return
    table, ends = Table(), time.perf_counter() + 60 * options.minutes
    if not options.variant:  # after the first variant of every row
        rows = list(dict.fromkeys(name for name, _ in pairs))
        pairs[len(rows) : len(rows)] = [(name, PEER) for name in rows if name in PEERS]
    for number, (name, variant) in enumerate(pairs):
        if number and time.perf_counter() + LIMIT_S / 2 > ends:
            print(f"no time left for {len(pairs) - number} variants, from {name} [{variant}] on")
            break
        take_peer(table, name) if variant == PEER else take(name, variant, table, options.profile)


if __name__ == "__main__":
    main()
