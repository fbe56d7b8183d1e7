"""Training on one GPU: tokens/s, MFU and memory of the trainer's own step, beside what peers reached on an H200.

The peers' figures were measured on an NVIDIA H200 with torch 2.11.0+cu130 (nanoGPT at its default branch; transformers
Llama with compile), and are quoted, not run again here. MFU: causal attention counted once, over 989 TFLOP/s.

    python benchmarks/train_gpu.py
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from common import write_result

from lmworks.plan.flops import model_flops_per_token
from lmworks.plan.predict import predict
from lmworks.spec import load_run
from lmworks.train import Trainer

WORK = {
    "GPT-2 124M, 64 × 1024": (
        ["gpt2-small", "model.vocab=50304", "data.micro_batch=64", "data.seq=1024"],
        ("nanoGPT", 529_683, 40.9),
    ),
    "Llama 3.2 1B, 4 × 4096": (
        ["llama3-1b", "data.micro_batch=4", "data.seq=4096"],
        ("transformers + compile, bf16 weights", 49_236, 39.0),
    ),
}


def measure(arguments: list[str], steps: int = 30) -> dict[str, float]:
    preset, *overrides = arguments
    spec = load_run(preset, [*overrides, "precision.dtype=bf16", "parallel.compile=true", "data.path=stdlib:bytes"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(spec, f"{folder}/run", quiet=True)
    trainer.build()
    batches = trainer.batches.at(0)
    began = time.perf_counter()
    for _ in range(5):
        trainer.train_step(batches)
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        trainer.train_step(batches)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times)
    flops = model_flops_per_token(spec.model, spec.data.seq) * spec.tokens_per_step
    return {
        "step_s": step_s,
        "tokens_per_s": spec.tokens_per_step / step_s,
        "mfu": flops / step_s / trainer.peak_flops if trainer.peak_flops else None,
        "peak_gib": trainer.memory.read() / 2**30,
        "predicted_gib": predict(spec.replace(cluster=spec.cluster.replace(device="cuda"))).memory.total / 2**30,
        "warm_up_s": warm,
    }


def main() -> None:
    rows = []
    for name, (arguments, (peer, peer_tokens, peer_gib)) in WORK.items():
        torch.cuda.empty_cache()
        row = measure(arguments)
        rows.append({"work": name, **row, "peer": peer, "peer_tokens_per_s": peer_tokens, "peer_peak_gib": peer_gib})
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "–"
        print(
            f"{name}: {row['tokens_per_s']:,.0f} tokens/s, MFU {mfu}, peak {row['peak_gib']:.1f} GiB (predicted "
            f"{row['predicted_gib']:.1f}); {peer}: {peer_tokens:,} tokens/s, {peer_gib} GiB: "
            f"{row['tokens_per_s'] / peer_tokens:.2f}×; warm-up {row['warm_up_s']:.0f} s",
            flush=True,
        )
    print(write_result("train_gpu", {"rows": rows}))


if __name__ == "__main__":
    main()
