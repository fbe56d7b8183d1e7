"""Every stage of post-training on a model that is small enough for a CPU, and what each stage taught it.

A model of 0.1M parameters is pretrained on lines of sums of two digits from 0 to 9. Then it goes through SFT, which
teaches a format with answers of which three of four are wrong; a reward model; and DPO, PPO and GRPO, which bring the
right sums back. Pairs are held out of the reward model and of DPO; the scores are of all 100 sums.
`tests/align/test_learning.py` (slow) runs this and checks them.

    python benchmarks/post_training_cpu.py --work learning --save
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_result
from matplotlib.figure import Figure

from lmworks import LLM, SamplingParams
from lmworks.data.tokenizer import ByteTokenizer
from lmworks.model import GPT

IMAGES = Path(__file__).parent.parent / "docs" / "images"
LARGEST = 9  # of a term
RIGHT = 0.25  # share of sums that are right in the conversations of SFT
ANSWER = re.compile(r"(\d+)\.")
MODEL = "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 192\nvocab = 258\ncontext = 64"
BATCH = ("data.seq=64", "data.micro_batch=8", "data.global_batch=16", "optim.warmup=5")
ROUND = ("align.prompts=16", "align.samples=8", "align.max_tokens=6", "data.seq=64", "data.micro_batch=8")
REWARD = '''\
def verified(completions, answer, **columns):
    """1 for the right sum in the right format."""
    return [float(text == f"{right}.") for text, right in zip(completions, answer)]
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("learning"))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/post_training_cpu.json")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(exist_ok=True)
    held_out = write_data(work)
    result: dict[str, Any] = {"scores": {}, "curves": {}}
    stages: list[tuple[str, Callable[[Path], Path]]] = [
        ("pretrain", pretrain), ("sft", sft), ("reward", reward), ("dpo", dpo), ("ppo", ppo), ("grpo", grpo),
    ]  # fmt: skip
    answers: dict[str, list[str]] = {}
    for name, stage in stages:
        folder = stage(work)
        result["curves"][name] = curves(folder)
        if name != "reward":
            answers[name] = sample(folder, [question for question, _ in held_out])
            result["scores"][name] = scores(answers[name], held_out)
            print(name, json.dumps(result["scores"][name]), flush=True)
    result["win_rate"] = {name: win_rate(work, held_out, answers[name], answers["sft"]) for name in ("dpo", "ppo")}
    result["reward_accuracy"] = last(result["curves"]["reward"], "val_rewards/accuracies")
    print(json.dumps({name: result[name] for name in ("scores", "win_rate", "reward_accuracy")}, indent=1))
    (work / "result.json").write_text(json.dumps(result))
    if options.save:
        print(write_result("post_training_cpu", result))
        draw_curves(result["curves"])


# --- the stages -------------------------------------------------------------------------------------------------------


def pretrain(work: Path) -> Path:
    spec = (
        f'name = "sums"\n[model]\n{MODEL}\n[data]\npath = "{work / "shards"}"\nseq = 64\nmicro_batch = 32\n'
        "[optim]\nlr = 3e-3\nsteps = 800\nwarmup = 20\n[log]\nevery = 20\neval_every = 0\n"
    )
    (work / "pretrain.toml").write_text(spec)
    lmworks("data", "prepare", work / "corpus.txt", "--out", work / "shards", "--separator", "\\n\\n")
    lmworks("train", work / "pretrain.toml", "--run-dir", work / "pretrain")
    return work / "pretrain"


def sft(work: Path) -> Path:
    return finetune(work, "sft", "pretrain", "chats.jsonl", *BATCH, "optim.lr=3e-3", "optim.steps=150")


def reward(work: Path) -> Path:
    return finetune(work, "reward", "sft", "pairs.jsonl", *BATCH, "optim.lr=1e-3", "optim.steps=1000")


def dpo(work: Path) -> Path:
    return finetune(
        work, "dpo", "sft", "pairs.jsonl", *BATCH, "optim.lr=5e-4", "optim.steps=150", "align.sft_weight=0.5"
    )


def ppo(work: Path) -> Path:
    return online(
        work, "ppo", "optim.lr=5e-4", "align.critic_lr=2e-3", "optim.steps=400", "align.beta=0.02", "align.kl_target=0",
        "align.epochs=2", "data.global_batch=64",
    )  # fmt: skip


def grpo(work: Path) -> Path:
    return online(work, "grpo", "align.samples=16", "optim.lr=5e-4", "optim.steps=300", "align.beta=0.02")


def online(work: Path, method: str, *options: str) -> Path:
    rewards = f'align.rewards=["{work / "verified.py"}:verified"]'
    return finetune(work, method, "sft", "prompts.jsonl", *ROUND, rewards, "optim.schedule=constant", *options)


def finetune(work: Path, method: str, start: str, data: str, *options: str) -> Path:
    out = work / method
    held_out = [f"data.val_path={work / 'held-out-pairs.jsonl'}"] if data == "pairs.jsonl" else []
    lmworks("finetune", work / start, "--data", work / data, "--method", method, "--run-dir", out, *held_out, *options)
    return out


def lmworks(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "lmworks", *map(str, arguments)], check=True)


# --- data -------------------------------------------------------------------------------------------------------------


def write_data(work: Path) -> list[tuple[str, str]]:
    """Files of the stages; returns the questions with their answers."""
    draw = random.Random(0)
    terms = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    draw.shuffle(terms)

    def wrong_sums(total: int) -> list[int]:
        return [total + error for error in (-3, -2, -1, 1, 2, 3) if total + error >= 0]

    def wrong(total: int) -> int:
        return draw.choice(wrong_sums(total))

    def noisy(total: int) -> int:
        return total if draw.random() < RIGHT else wrong(total)

    lines = [f"{a}+{b}={a + b}\n" for a, b in draw.choices(terms, k=80_000)]
    pages = ("".join(lines[start : start + 2]) for start in range(0, len(lines), 2))
    (work / "corpus.txt").write_text("\n".join(pages))

    def chat(a: int, b: int) -> dict[str, str]:
        return {"prompt": f"{a}+{b}=", "completion": f"{noisy(a + b)}."}

    def pairs(sums: list[tuple[int, int]]) -> list[dict[str, str]]:
        found = [
            {"prompt": f"{a}+{b}=", "chosen": f"{a + b}.", "rejected": f"{error}."}
            for a, b in sums
            for error in wrong_sums(a + b)
        ]
        draw.shuffle(found)
        return found

    def prompt(a: int, b: int) -> dict[str, str]:
        return {"prompt": f"{a}+{b}=", "answer": str(a + b)}

    ranked = pairs(terms)
    files = {
        "chats": [chat(a, b) for a, b in terms * 8], "prompts": [prompt(a, b) for a, b in terms],
        "pairs": ranked[100:], "held-out-pairs": ranked[:100],
    }  # fmt: skip
    for name, rows in files.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "verified.py").write_text(REWARD)
    return [(f"{a}+{b}=", str(a + b)) for a, b in terms]


# --- scores -----------------------------------------------------------------------------------------------------------


def sample(model: Path, questions: Sequence[str]) -> list[str]:
    """Four answers to each question, at temperature 1."""
    params = [SamplingParams(temperature=1.0, max_tokens=6, seed=seed, n=4) for seed in range(len(questions))]
    with LLM(model) as llm:
        return [answer.text for result in llm.generate(list(questions), params) for answer in result.answers]


def scores(answers: Sequence[str], held_out: Sequence[tuple[str, str]]) -> dict[str, float]:
    right = [answer for _, answer in held_out for _ in range(4)]
    formats = [ANSWER.fullmatch(text) for text in answers]
    verified = [found is not None and found[1] == one for found, one in zip(formats, right, strict=True)]
    return {"format": sum(map(bool, formats)) / len(right), "verified": sum(verified) / len(right)}


def win_rate(work: Path, held_out: Sequence[tuple[str, str]], ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Share of answers that the reward model puts before the other model's answer to the same question."""
    if not (work / "reward-hf").exists():
        lmworks("checkpoint", "export", work / "reward", work / "reward-hf")
    model, tokenizer = GPT.from_hf(work / "reward-hf"), ByteTokenizer()

    def value(question: str, answer: str) -> float:
        tokens = [*tokenizer.encode(question + answer), tokenizer.eot]
        return float(model(torch.tensor([tokens])).flatten()[-1])

    questions = [question for question, _ in held_out for _ in range(4)]
    with torch.no_grad():
        values = [(value(one, a), value(one, b)) for one, a, b in zip(questions, ours, theirs, strict=True)]
    return sum((a > b) + 0.5 * (a == b) for a, b in values) / len(values)


def curves(folder: Path) -> dict[str, list[float]]:
    kept = re.compile(
        r"(val_)?(loss|reward/mean|kl_answer|entropy|rewards/(accuracies|margins|brier)|completion/ended)"
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if kept.fullmatch(name)}
    return {name: [round(row[name], 5) for row in rows if name in row] for name in sorted(names)}


def last(curve: dict[str, list[float]], name: str) -> float:
    return curve[name][-1]


def draw_curves(curves: dict[str, dict[str, list[float]]]) -> None:
    """docs/images/post-training-learning.png"""
    panels = [
        ("held-out accuracy of the reward model", {"reward model": curves["reward"]["val_rewards/accuracies"]}),
        ("margin of DPO", {"DPO": curves["dpo"]["rewards/margins"]}),
        ("mean reward of a round", {name.upper(): curves[name]["reward/mean"] for name in ("ppo", "grpo")}),
        ("KL of an answer, nats", {name.upper(): curves[name]["kl_answer"] for name in ("ppo", "grpo")}),
    ]
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label, values in lines.items():
            axes.plot(range(1, len(values) + 1), values, label=label)
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "post-training-learning.png", dpi=110)


if __name__ == "__main__":
    main()
