"""Our step on two CPU ranks beside a hand-written minimal PyTorch loop that does the same, for DDP and FSDP2.

    python benchmarks/parallel_cpu.py [--save]

Both run the same network in the same processes and take turns, a few steps each, so that whatever else the machine does
hits both alike. What differs is all that is around the model: the layout, the norm under any layout, the loss
normalised by global tokens, metrics agreed across ranks. Aim: within 5% (ratio of medians ≤ 1.05).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks, two cores

import torch
import torch.distributed as dist
from common import write_result
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lmworks.data import resolve
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import RunSpec, load_run
from lmworks.train import Trainer

RANKS, ROUNDS, STEPS, WARM = 2, 8, 4, 3


def hand_written(spec: RunSpec, strategy: str) -> Any:
    """What one would type: wrap, loop, clip, step."""
    model = GPT(spec.model, seed=spec.seed)
    if strategy == "fsdp2":
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        wrapped: torch.nn.Module = model
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.optim.lr, betas=(0.9, 0.95), fused=True)
    tokens = spec.tokens_per_step // RANKS

    def step(batches: list[Any]) -> float:
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if strategy == "fsdp2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            else:
                wrapped.require_backward_grad_sync = last  # type: ignore[assignment]
            _, loss = wrapped(batch.tokens, batch.targets, reduction="sum", keep_logits=False)
            (loss / tokens).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / spec.tokens_per_step

    return step


def work(rank: int, strategy: str, changes: list[str], folder: str) -> tuple[dict[str, list[float]], ...]:
    spec = load_run("cpu-10m", [*changes, f"parallel.strategy={strategy}", f"parallel.dp={RANKS}"])
    trainer = Trainer(spec, Path(folder) / strategy, quiet=True)
    trainer.build()
    theirs = hand_written(spec, strategy)
    seconds: dict[str, list[float]] = {"ours": [], "hand-written": []}
    losses: dict[str, list[float]] = {"ours": [], "hand-written": []}
    for round_ in range(ROUNDS + 1):
        for name in ("ours", "hand-written") if round_ % 2 else ("hand-written", "ours"):
            for index in range(STEPS):
                cursor = round_ * STEPS + index
                batches = trainer.batches.at(cursor)
                dist.barrier()
                began = time.perf_counter()
                if name == "ours":
                    loss = trainer.train_step(batches)["loss"]
                    trainer.step += 1
                else:
                    loss = theirs(batches)
                if round_:
                    seconds[name].append(time.perf_counter() - began)
                losses[name].append(loss)
    return seconds, losses


def measure(strategy: str, changes: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        seconds, losses = on_ranks(RANKS, work, strategy, changes, folder, timeout=900)[0]
    ours, theirs = (statistics.median(seconds[name]) for name in ("ours", "hand-written"))
    first = abs(losses["ours"][0] - losses["hand-written"][0]) / losses["ours"][0]
    return {
        "strategy": strategy,
        "ours_s": ours,
        "hand_written_s": theirs,
        "ratio": ours / theirs,
        "ratio_of_fastest": min(seconds["ours"]) / min(seconds["hand-written"]),
        "steps": len(seconds["ours"]),
        "first_loss_difference": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/parallel_cpu.json")
    arguments = parser.parse_args()
    resolve("stdlib:bytes")
    changes = ["model.vocab=512", "data.path=stdlib:bytes", "data.seq=256", "data.micro_batch=2", "data.global_batch=8"]
    changes += ["optim.schedule=constant", "optim.warmup=0", "optim.lr=3e-4", "optim.weight_decay=0"]
    rows = [measure(strategy, changes) for strategy in ("ddp", "fsdp2")]
    print(f"{'':8} {'ours':>9} {'hand-written':>13} {'ratio':>7} {'fastest':>8}")
    for row in rows:
        print(
            f"{row['strategy']:8} {row['ours_s']:8.3f}s {row['hand_written_s']:12.3f}s {row['ratio']:7.3f} "
            f"{row['ratio_of_fastest']:8.3f}"
        )
    if arguments.save:
        case = {"model": "cpu-10m with 512 tokens", "ranks": RANKS, "changes": changes, "aim": "ratio ≤ 1.05"}
        print(write_result("parallel_cpu", {"case": case, "rows": rows}))


if __name__ == "__main__":
    main()
