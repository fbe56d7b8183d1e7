"""What fill-in-the-middle costs left to right, and what it teaches: models of 0.43M parameters on the standard library.

    python benchmarks/fim_loss.py [--steps 700] [--seeds 3]      # half an hour on two slow cores

For each seed one run without infilling and one with data.fim.rate = 0.5, otherwise the same: initial weights, windows,
order, steps. Held-out loss is left to right for both. Infilling: the rest of a line, 1 to 12 characters, of held-out
files, greedily. `prefix_first` and `suffix_first`: the first tokens of the answer are the middle, as many as it has, by
the order of the prompt; without infilling the model continues the prefix. `stopped`: suffix first, and end-of-text
follows. `… first token` and `… given it`: the first token of the middle alone is right; the rest of a longer middle is,
where the prompt already has its first token. They tell attaching to the end of the prefix from going on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
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


def right_answers(run: Path, fim: bool, asked: list[tuple[list[int], list[int], list[int]]]) -> dict[str, float]:
    """Shares of the tasks by the order of the prompt: the middle; and the middle with nothing after it."""
    found = {}
    with LLM(run, device="cpu") as llm:
        assert llm.tokenizer is not None
        marks = Sentinels.of(RunSpec().data.fim, llm.tokenizer)
        for name in ("prefix_first", "suffix_first"):
            prompts = [
                marks.prompt(prefix, suffix, name == "suffix_first") if fim else prefix for prefix, _, suffix in asked
            ]
            middles = [middle for _, middle, _ in asked]
            answers = answers_of(llm, prompts, middles)
            after_first = answers_of(
                llm,
                [[*prompt, middle[0]] for prompt, middle in zip(prompts, middles, strict=True)],
                [middle[1:] for middle in middles],
            )
            pairs = list(zip(answers, middles, strict=True))
            found |= {
                name: share(answer[: len(middle)] == middle for answer, middle in pairs),
                f"{name}, first token": share(answer[:1] == middle[:1] for answer, middle in pairs),
                f"{name}, given it": share(
                    answer[: len(middle) - 1] == middle[1:]
                    for answer, middle in zip(after_first, middles, strict=True)
                    if middle[1:]
                ),
                f"{name}, stopped": share(answer == [*middle, llm.tokenizer.eot] for answer, middle in pairs),
            }
    return found


def answers_of(llm: LLM, prompts: list[list[int]], middles: list[list[int]]) -> list[list[int]]:
    """Greedy answers, a token longer than the middles so that an end-of-text after them shows."""
    params = [SamplingParams(temperature=0, max_tokens=len(middle) + 1) for middle in middles]
    return [result.token_ids for result in llm.generate(prompts, params, progress=False)]


def share(right: Iterable[bool]) -> float:
    found = list(right)
    return sum(found) / len(found)


def one_run(job: tuple[float, int, int]) -> dict[str, Any]:
    rate, seed, steps = job
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        began, run = time.time(), Path(folder) / "run"
        Trainer(spec_of(rate, seed, steps), run, quiet=True).run()
        loss = [step["val_loss"] for step in read_metrics(RunFolder.open(run).metrics_path) if step.get("val_loss")][-1]
        found = {"rate": rate, "seed": seed, "val_loss": loss, **right_answers(run, rate > 0, tasks())}
    print(found, round(time.time() - began), "s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    resolve(DATA)  # prepared once
    jobs = [(rate, seed, given.steps) for seed in range(given.seeds) for rate in RATES]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        rows = pool.map(one_run, jobs, chunksize=1)
    summary: dict[str, Any] = {}
    for rate in RATES:
        for name in [name for name in rows[0] if name not in ("rate", "seed")]:
            values = [row[name] for row in rows if row["rate"] == rate]
            summary[f"{name} at {rate:g}"] = [statistics.mean(values), statistics.stdev(values) if values[1:] else 0.0]
    pairs = [b["val_loss"] - a["val_loss"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
    summary["difference of val_loss, by seed"] = pairs
    print(summary)
    write_result("fim_loss", {**vars(given), "data": DATA, "tasks": TASKS, "runs": rows, "mean and deviation": summary})


if __name__ == "__main__":
    main()
