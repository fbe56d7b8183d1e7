"""What fill-in-the-middle costs left to right, and what it teaches: models of 0.43M parameters on the standard library.

    python benchmarks/fim_loss.py [--steps 1000] [--seeds 3]      # an hour on one slow core

For each seed one run without infilling and one with data.fim.rate = 0.5, otherwise the same: initial weights, windows,
order, steps. Held-out loss is left to right for both. Infilling: the rest of a line, 1 to 12 characters, of held-out
files, greedily. With infilling it counts if the whole answer up to end-of-text is the middle; without, the model
continues the prefix, is told the number of tokens and counts if those are right.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_result

from lmworks import RunSpec
from lmworks.data import TokenData, resolve
from lmworks.data.fim import Sentinels
from lmworks.data.tokenizer import load_tokenizer
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.llm import LLM
from lmworks.record import RunFolder
from lmworks.record.metrics import read_metrics
from lmworks.train import Trainer

DATA = "stdlib:bpe:1024+code"
RATES = (0.0, 0.5)
TASKS = 600
AROUND = 55  # tokens of context on each side


def spec_of(rate: float, seed: int, steps: int) -> RunSpec:
    return RunSpec.from_dict({
        "name": f"fim-{rate:g}-{seed}",
        "seed": seed,
        "model": {"layers": 3, "hidden": 96, "heads": 4, "vocab": 1024, "context": 128, "tie_embeddings": True},
        "data": {"path": DATA, "seq": 128, "micro_batch": 16, "fim": {"rate": rate}},
        "optim": {"steps": steps, "lr": 3e-3, "warmup": steps // 10},
        "log": {"eval_every": 0, "eval_batches": 32},
        "checkpoint": {"every": 0},
        "cluster": {"device": "cpu"},
    })  # fmt: skip


def tasks() -> list[tuple[list[int], list[int], list[int]]]:
    """Prefix, middle and suffix in tokens, of held-out files."""
    folder = resolve(DATA)
    tokenizer, data = load_tokenizer(folder), TokenData.open(folder, "val", verify=False)
    draw, found = random.Random(0), []
    while len(found) < TASKS:
        start = draw.randrange(len(data) - 400)
        text = tokenizer.decode(data.read(start, start + 400).tolist())
        at = draw.randrange(len(text) // 3, 2 * len(text) // 3)
        end = text.find("\n", at)
        middle = text[at:end]
        if end > at and len(middle) <= 12 and middle.strip() and "\ufffd" not in text:
            parts = [tokenizer.encode(part) for part in (text[:at], middle, text[end:])]
            found.append((parts[0][-AROUND:], parts[1], parts[2][:AROUND]))
    return found


def right_answers(run: Path, fim: bool, asked: list[tuple[list[int], list[int], list[int]]]) -> float:
    with LLM(run, device="cpu") as llm:
        assert llm.tokenizer is not None
        eot = llm.tokenizer.eot
        marks = Sentinels.of(RunSpec().data.fim, llm.tokenizer)
        prompts = [marks.prompt(prefix, suffix) if fim else prefix for prefix, _, suffix in asked]
        params = [
            SamplingParams(temperature=0, max_tokens=len(middle) + 1 if fim else len(middle)) for _, middle, _ in asked
        ]
        results = llm.generate(prompts, params, progress=False)
    right = 0
    for (_, middle, _), result in zip(asked, results, strict=True):
        stopped = result.answers[0].finish_reason == "stop"
        tokens = [token for token in result.token_ids if token != eot]
        right += tokens == middle and (stopped or not fim)
    return right / len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    asked, rows = tasks(), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for rate in RATES:
                began, run = time.time(), Path(folder) / f"{rate:g}-{seed}"
                Trainer(spec_of(rate, seed, given.steps), run, quiet=True).run()
                loss = [
                    step["val_loss"] for step in read_metrics(RunFolder.open(run).metrics_path) if step.get("val_loss")
                ][-1]
                filled = right_answers(run, rate > 0, asked)
                rows.append(
                    {"rate": rate, "seed": seed, "val_loss": loss, "exact_match": filled, "s": time.time() - began}
                )
                print(rows[-1], flush=True)
    summary: dict[str, Any] = {}
    for rate in RATES:
        for name in ("val_loss", "exact_match"):
            values = [row[name] for row in rows if row["rate"] == rate]
            summary[f"{name} at {rate:g}"] = [statistics.mean(values), statistics.stdev(values) if values[1:] else 0.0]
    pairs = [b["val_loss"] - a["val_loss"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
    summary["difference of val_loss, by seed"] = pairs
    print(summary)
    write_result("fim_loss", {**vars(given), "data": DATA, "tasks": TASKS, "runs": rows, "mean and deviation": summary})


if __name__ == "__main__":
    main()
