"""Training on a CPU beside a plain PyTorch loop over Hugging Face's GPT-2 of the same shape.

10M parameters, vocabulary 8192, context 256, fp32, no dropout; the same batches, AdamW, decay groups and clipping on
both sides. Each side lives in a process of its own: in one they would share a heap, and the lean side would pay for the
page faults of the other. Speed: they take turns step by step, so that both see the same machine; the figure is the
median of paired ratios. Memory: highest resident set above what the imports took. Ours is the trainer's own step
(`Trainer.train_step`), from one configuration for both figures.

    python benchmarks/train_cpu.py            # about five minutes on two cores
    python benchmarks/train_cpu.py --quick    # fewer turns, nothing written
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from common import write_result

from lmworks.data import Batch, Batches
from lmworks.plan.flops import model_flops_per_token
from lmworks.spec import RunSpec, load_run
from lmworks.train import Trainer
from lmworks.train.device import reset_resident_peak, resident_peak

BATCHES = (4, 8)
PRESET = "cpu-10m"


def run_spec(batch: int, compile: bool) -> RunSpec:
    return load_run(
        PRESET,
        [
            f"data.micro_batch={batch}",
            "data.path=stdlib:bpe:8192",
            "data.seq=256",
            f"parallel.compile={str(compile).lower()}",
        ],
    )


def ours(spec: RunSpec) -> Callable[[list[Batch]], None]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(spec, f"{folder}/run", quiet=True)
    trainer.build()

    def step(batches: list[Batch]) -> None:
        trainer.train_step(batches)

    return step


def peer(spec: RunSpec) -> Callable[[list[Batch]], None]:
    """The loop one would write in ten minutes around transformers' GPT-2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel

    m, o = spec.model, spec.optim
    config = GPT2Config(
        vocab_size=m.vocab, n_positions=m.context, n_embd=m.hidden, n_layer=m.layers, n_head=m.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    count = sum(p.numel() for p in model.parameters())
    if count != m.params:
        raise SystemExit(f"the peer has {count:,} parameters, ours {m.params:,}: not the same shape")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)

    def step(batches: list[Batch]) -> None:
        for batch in batches:
            # transformers shifts labels itself; given the tokens as labels it trains on one token less a row
            model(input_ids=batch.tokens, labels=batch.tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


SIDES = {"ours": ours, "peer": peer}


def batches_of(spec: RunSpec) -> Batches:
    return Batches(spec.data, seed=spec.seed)


def serve(side: str, batch: int, compile: bool) -> None:
    """A side in its own process: a step for every line on standard input, answered with its seconds."""
    spec = run_spec(batch, compile)
    if side == "peer":
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (imports are not the loop's memory)
    data = Batches(spec.data, seed=spec.seed)
    base = reset_resident_peak()
    step = SIDES[side](spec)
    for cursor, _ in enumerate(sys.stdin):
        batches = data.at(cursor)
        began = time.perf_counter()
        step(batches)
        print(json.dumps({"seconds": time.perf_counter() - began, "bytes": resident_peak() - base}), flush=True)


class Side:
    def __init__(self, name: str, batch: int, flags: list[str]) -> None:
        command = [sys.executable, __file__, "--serve", name, "--batch", str(batch), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def time_interleaved_steps(batch: int, turns: int, flags: list[str]) -> dict[str, Any]:
    """Step time and peak memory of both sides, alternating."""
    spec = run_spec(batch, bool(flags))
    sides = {name: Side(name, batch, flags) for name in SIDES}
    warm = {name: side.step()["seconds"] for name, side in sides.items()}
    for side in sides.values():
        side.step()
    times: dict[str, list[float]] = {name: [] for name in sides}
    peak = {}
    for turn in range(turns):
        for name in sorted(sides, reverse=turn % 2 == 1):  # who goes first alternates too
            answer = sides[name].step()
            times[name].append(answer["seconds"])
            peak[name] = answer["bytes"]
    for side in sides.values():
        side.close()
    ratios = sorted(p / o for p, o in zip(times["peer"], times["ours"], strict=True))
    flops = model_flops_per_token(spec.model, spec.data.seq) * spec.tokens_per_step
    step_s = {name: statistics.median(values) for name, values in times.items()}
    return {
        "batch": batch,
        "step_s": step_s,
        "tokens_per_s": {name: spec.tokens_per_step / s for name, s in step_s.items()},
        "gflops": {name: flops / s / 1e9 for name, s in step_s.items()},
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "first_step_s": warm,
        "peak_bytes": peak,
        "memory_ratio": peak["ours"] / peak["peer"],
    }


def gemm_limit(tokens: int, width: int) -> dict[str, float]:
    """Measured GFLOP/s of fp32 products: the model's own MLP shape, and a large square one."""
    rates = {}
    for name, (m, k, n) in {"mlp": (tokens, width, 4 * width), "square": (1024, 1024, 1024)}.items():
        a, b = torch.randn(m, k), torch.randn(k, n)
        best = min(timed(lambda a=a, b=b: a @ b) for _ in range(30))
        rates[name] = 2 * m * k * n / best / 1e9
    return rates


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": ("aten::_scaled_dot",),
    "optimizer": ("aten::_fused_adamw",),
    "norms": ("aten::native_layer_norm", "aten::_fused_rms_norm"),
    "activation": ("aten::gelu",),
    "softmax and loss": ("aten::_log_softmax", "aten::exp_", "aten::scatter_add_", "aten::gather"),
    "clipping": ("aten::_foreach", "aten::linalg_vector_norm"),
    "bias gradients": ("aten::sum",),
}


def where_time_goes(batch: int, compile: bool) -> dict[str, float]:
    """Share of self time by kind of operation in our step, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    spec = run_spec(batch, compile)
    data, step = Batches(spec.data, seed=spec.seed), ours(spec)
    step(data.at(0))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        for cursor in range(1, 4):
            step(data.at(cursor))
    shares = dict.fromkeys([*KINDS, "rest (copies, adds, fills, Python)"], 0.0)
    for event in trace.key_averages():
        kind = next((k for k, names in KINDS.items() if event.key.startswith(names)), None)
        shares[kind or "rest (copies, adds, fills, Python)"] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: share / total for kind, share in sorted(shares.items(), key=lambda item: -item[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile our blocks (the peer stays plain)")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.batch, options.compile)
        return
    turns = 6 if options.quick else options.turns
    flags = ["--compile"] if options.compile else []
    rows = []
    for batch in BATCHES:
        row = time_interleaved_steps(batch, turns, flags)
        row["gemm_limit_gflops"] = gemm_limit(batch * 256, 256)
        rows.append(row)
        print(
            f"batch {batch} × 256: ours {row['tokens_per_s']['ours']:,.0f} tokens/s "
            f"({row['gflops']['ours']:.1f} GFLOP/s; GEMM limit {row['gemm_limit_gflops']['mlp']:.0f} at its MLP shape, "
            f"{row['gemm_limit_gflops']['square']:.0f} square), peer {row['tokens_per_s']['peer']:,.0f}: "
            f"{row['speed_ratio']:.2f}× the speed (quartiles {row['speed_ratio_quartiles'][0]:.2f}–"
            f"{row['speed_ratio_quartiles'][1]:.2f}); peak memory {row['peak_bytes']['ours'] / 2**20:.0f} MiB against "
            f"{row['peak_bytes']['peer'] / 2**20:.0f}: {row['memory_ratio']:.2f}×; first step "
            f"{row['first_step_s']['ours']:.1f} s",
            flush=True,
        )
    shares = where_time_goes(8, options.compile)
    print("where our step's time goes:", ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()))
    if not options.quick:
        peer_name = "plain PyTorch loop over transformers' GPT2LMHeadModel (sdpa)"
        result = {"peer": peer_name, "compile": options.compile, "turns": turns, "rows": rows, "time_shares": shares}
        print(write_result("train_cpu", result))


if __name__ == "__main__":
    main()
