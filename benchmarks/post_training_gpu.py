"""A model of 190M parameters is pretrained on Python code and sums, and goes through SFT, a reward model and PPO.

Pretraining: the standard library's source and lines of sums of two numbers below 100. SFT: questions with answers of
which three of four are wrong, so that it learns the format and forgets the sums. The reward model learns from pairs of
a right and a wrong answer, and PPO from the reward model alone. 500 sums are held out of every stage; the scores are of
these, verified. Stages whose run is complete are not run again.

    python benchmarks/post_training_gpu.py --work work --save
    python benchmarks/post_training_gpu.py --work work --small      # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

from common import write_result
from post_training_cpu import curves, lmworks

from lmworks import LLM, SamplingParams

LARGEST, HELD_OUT, RIGHT = 99, 500, 0.25
ERRORS = (-20, -10, -3, -2, -1, 1, 2, 3, 10, 20)
ANSWER = re.compile(r" (\d+)\.")
LARGE = "layers = 16\nhidden = 1024\nheads = 16\nkv_heads = 8\nffn = 2816\nvocab = 258\ncontext = 512"
SMALL = "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 192\nvocab = 258\ncontext = 512"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("ppo", nargs="*", help="overrides of the PPO stage")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(exist_ok=True, parents=True)
    held_out = write_data(work)
    result: dict[str, Any] = {"scores": {}, "samples": {}, "seconds": {}, "curves": {}}
    for name, command in stages(work, options).items():
        began = time.perf_counter()
        if not (work / name / "done").exists():
            lmworks(*command)
            (work / name / "done").touch()
        result["seconds"][name] = round(time.perf_counter() - began, 1)
        result["curves"][name] = {key: thinned(values) for key, values in curves(work / name).items()}
        if name != "reward":
            answers = sample(work / name, held_out)
            result["scores"][name] = scores(answers, held_out)
            result["samples"][name] = [f"{question(a, b)}{answers[4 * i]}" for i, (a, b) in enumerate(held_out[:6])]
        print(name, result["seconds"][name], json.dumps(result["scores"].get(name)), flush=True)
    result["reward_accuracy"] = result["curves"]["reward"]["val_rewards/accuracies"][-1]
    print(json.dumps({key: result[key] for key in ("scores", "samples", "reward_accuracy")}, indent=1))
    if options.save:
        print(write_result("post_training_gpu", result))


def stages(work: Path, options: argparse.Namespace) -> dict[str, list[str | Path]]:
    small: bool = options.small
    precision = [] if small else ["precision.dtype=bf16", "precision.weights=bf16"]
    shape, rows, steps = (SMALL, 8, 20) if small else (LARGE, 64, 400)
    (work / "pretrain.toml").write_text(
        f'name = "pretrain"\n[model]\n{shape}\n[data]\npath = "{work / "shards"}"\nseq = 512\nmicro_batch = {rows}\n'
        f"global_batch = {4 * rows}\n[optim]\nlr = 6e-4\nsteps = {steps}\nwarmup = {steps // 10}\n"
        "[log]\nevery = 20\neval_every = 0\n"
    )
    if not (work / "shards").exists():
        source = work / "sums.txt" if small else "stdlib"
        lmworks("data", "prepare", source, work / "sums.txt", "--separator", "\\n\\n", "--out", work / "shards")

    def finetune(method: str, start: str, data: str, *overrides: str) -> list[str | Path]:
        return [
            "finetune", work / start, "--data", work / data, "--method", method, "--run-dir", work / method,
            "data.seq=128", "data.overlong=refuse", *overrides, *precision,
        ]  # fmt: skip

    batch = ("data.micro_batch=32", "data.global_batch=64", "optim.warmup=10")
    held_out = f"data.val_path={work / 'held-out-pairs.jsonl'}"
    count = (lambda steps: 10) if small else (lambda steps: steps)
    return {
        "pretrain": ["train", work / "pretrain.toml", "--run-dir", work / "pretrain", *precision],
        "sft": finetune("sft", "pretrain", "chats.jsonl", *batch, "optim.lr=1e-4", f"optim.steps={count(150)}"),
        "reward": finetune(
            "reward", "sft", "pairs.jsonl", *batch, held_out, "optim.lr=5e-5", f"optim.steps={count(600)}"
        ),
        "ppo": finetune(
            "ppo", "sft", "prompts.jsonl", f"align.reward_model={work / 'reward'}", "align.prompts=128",
            "align.samples=4", "align.max_tokens=8", "data.micro_batch=32", "data.global_batch=256", "align.epochs=2",
            "optim.lr=1e-5", "align.critic_lr=3e-5", "align.beta=0.02", "align.kl_target=0",
            "optim.schedule=constant", "optim.warmup=10", f"optim.steps={4 * count(120)}", *options.ppo,
        ),
    }  # fmt: skip


def question(a: int, b: int) -> str:
    return f"What is {a}+{b}?"


def write_data(work: Path) -> list[tuple[int, int]]:
    """Files of the stages; returns the terms that none of them has."""
    draw = random.Random(0)
    terms = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    draw.shuffle(terms)
    held_out, known = terms[:HELD_OUT], terms[HELD_OUT:]

    def wrong(total: int) -> int:
        return draw.choice([total + error for error in ERRORS if total + error >= 0])

    def pair(a: int, b: int) -> dict[str, str]:
        return {"prompt": question(a, b), "chosen": f" {a + b}.", "rejected": f" {wrong(a + b)}."}

    lines = [f"{a}+{b}={a + b}\n" for a, b in draw.choices(known, k=1_000_000)]
    pages, start = [], 0
    while start < len(lines):
        size = draw.randint(1, 40)
        pages.append("".join(lines[start : start + size]))
        start += size
    files = {
        "chats": [
            {"prompt": question(a, b), "completion": f" {a + b if draw.random() < RIGHT else wrong(a + b)}."}
            for a, b in known
        ],
        "pairs": [pair(a, b) for a, b in known for _ in range(4)],
        "held-out-pairs": [pair(a, b) for a, b in held_out],
        "prompts": [{"prompt": question(a, b)} for a, b in known],
    }
    (work / "sums.txt").write_text("\n".join(pages))
    for name, rows in files.items():
        draw.shuffle(rows)
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return held_out


def sample(model: Path, terms: list[tuple[int, int]]) -> list[str]:
    """Four answers to each question, at temperature 1."""
    params = [SamplingParams(temperature=1.0, max_tokens=8, seed=seed, n=4) for seed in range(len(terms))]
    with LLM(model) as llm:
        results = llm.generate([question(a, b) for a, b in terms], params)
    return [answer.text for result in results for answer in result.answers]


def scores(answers: list[str], terms: list[tuple[int, int]]) -> dict[str, float]:
    right = [str(a + b) for a, b in terms for _ in range(4)]
    formats = [ANSWER.fullmatch(text) for text in answers]
    verified = [found is not None and found[1] == one for found, one in zip(formats, right, strict=True)]
    return {"format": sum(map(bool, formats)) / len(right), "verified": sum(verified) / len(right)}


def thinned(values: list[float], most: int = 60) -> list[float]:
    step = -(-len(values) // most)
    return [*values[:-1:step], *values[-1:]]


if __name__ == "__main__":
    main()
