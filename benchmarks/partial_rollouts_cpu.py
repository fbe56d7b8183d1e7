"""Engine steps of a round with and without partial rollouts, on a small random model whose answers are long-tailed.

    python benchmarks/partial_rollouts_cpu.py

Weights are not trained: what is counted are steps of the engine, which take about the same time on a GPU however many
of its sequences still run. Writes results/partial_rollouts_cpu.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from common import write_result

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.model import GPT
from lmworks.spec import RunSpec

SHARES = (0.0, 0.25, 0.5, 1.0)
ROUNDS, SKIPPED = 8, 3  # the first ones fill what is in flight
PROMPTS, SAMPLES, LONGEST = 16, 4, 192
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 258, "context": 256, "init_std": 0.1}


def spec_of(folder: Path, share: float) -> RunSpec:
    sizes = {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": LONGEST}
    align = {"method": "grpo", "rewards": ["length(words=9)"], "partial_rollouts": share, **sizes}
    return RunSpec.from_dict(
        {
            "model": MODEL,
            "data": {"path": str(folder / "prompts.jsonl"), "tokenizer": "bytes", "seq": 256, "micro_batch": 4},
            "align": align,
            "checkpoint": {"init": str(folder / "model")},
            "optim": {"steps": ROUNDS},
        }
    )


def write_inputs(folder: Path) -> None:
    """A model that ends an answer with a constant probability: lengths are geometric."""
    lines = (json.dumps({"prompt": f"{number}="}) for number in range(999))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    model = GPT(spec_of(folder, 0.0).model, seed=1)
    with torch.no_grad():
        model.embed.weight[:, 0] = 1.0
        model.head.weight[256, 0] += 0.3
    model.save_hf(folder / "model")


def measure(folder: Path, share: float) -> dict[str, float]:
    trainer = OnlineTrainer(spec_of(folder, share), folder / f"run-{share}", quiet=True)
    trainer.build()
    sampler, metrics = trainer.rounds.sampler, trainer.rollout_engine.engine.metrics
    lengths: list[int] = []
    for number in range(ROUNDS):
        if number == SKIPPED:
            steps, rows, lengths = metrics.steps, metrics.computed_sequences, []
        sampler.begin_round(number)
        lengths += [len(one.token_ids) for one in sampler.sample(number)]
        sampler.end_round(number, ROUNDS)
    counted = metrics.steps - steps
    return {
        "share": share,
        "steps_a_round": counted / (ROUNDS - SKIPPED),
        "sequences_a_step": (metrics.computed_sequences - rows) / counted,
        "mean_length": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "carried_over": sampler.metrics.get("partial/carried_over", 0.0),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["LMWORKS_CACHE"] = f"{name}/cache"
        write_inputs(Path(name))
        rows = [measure(Path(name), share) for share in SHARES]
    for row in rows:
        print({key: round(value, 3) for key, value in row.items()})
    sizes = {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": LONGEST}
    write_result("partial_rollouts_cpu", {**sizes, "rows": rows})


if __name__ == "__main__":
    main()
