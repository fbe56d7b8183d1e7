"""Small files of examples for tests of post-training, on byte tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.model import GPT
from lmworks.spec import ModelSpec, RunSpec
from lmworks.spec.align import ONLINE_METHODS
from lmworks.spec.load import apply_overrides
from lmworks.spec.schema import merge

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 258, "context": 64, "init_std": 0.1}


def sums(count: int, largest: int = 99, seed: int = 0) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    terms = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [(f"{a}+{b}=", a + b) for a, b in terms]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_chats(path: Path, count: int = 60) -> Path:
    turns = [[("user", question), ("assistant", str(answer))] for question, answer in sums(count)]
    return write_lines(path, [{"messages": [{"role": r, "content": c} for r, c in one]} for one in turns])


def write_pairs(path: Path, count: int = 60) -> Path:
    """A wrong answer is of another length as often as not: rows are padded."""
    wrong = random.Random(1)
    return write_lines(
        path,
        [
            {"prompt": question, "chosen": str(answer), "rejected": str(answer + wrong.choice([1, 100, 1000]))}
            for question, answer in sums(count)
        ],
    )


def write_labelled(path: Path, count: int = 60) -> Path:
    return write_lines(
        path,
        [
            {"prompt": question, "completion": str(answer + (index % 3 == 0)), "label": index % 3 != 0}
            for index, (question, answer) in enumerate(sums(count))
        ],
    )


def write_prompts(path: Path, count: int = 60, largest: int = 9) -> Path:
    return write_lines(path, [{"prompt": question, "answer": str(answer)} for question, answer in sums(count, largest)])


WRITERS = {
    "sft": write_chats,
    "distill": write_chats,
    "kto": write_labelled,
    **dict.fromkeys(ONLINE_METHODS, write_prompts),
}


def make_spec(folder: Path, method: str, *overrides: str) -> RunSpec:
    """Two layers of width 32; global batches of 8 in micro-batches of 2."""
    path = folder / f"{method}.jsonl"
    if not path.exists():
        WRITERS.get(method, write_pairs)(path)
    return RunSpec.from_dict(apply_overrides(table(path, method), overrides))


DIGITS = """\
def digits(completions, **columns):
    return [sum(one.isdigit() for one in text) / 8 for text in completions]
"""


def save_terse_model(spec: RunSpec, folder: Path, strength: float = 0.65) -> Path:
    """A random model that ends an answer after about ten tokens, some much later."""
    import torch

    from lmworks.model import GPT

    model = GPT(spec.model, seed=1)
    with torch.no_grad():
        model.embed.weight[:, 0] = 1.0
        model.head.weight[256, 0] += strength  # end-of-text
    model.save_hf(folder)
    return folder


def table(path: Path, method: str) -> dict[str, Any]:
    """Online methods are rewarded for digits: 4 prompts, 4 answers of up to 8 tokens, two steps a round."""
    if method in ONLINE_METHODS:
        reward = path.with_name("rewards.py")
        reward.write_text(DIGITS)
        online = {"prompts": 4, "samples": 4, "max_tokens": 8, "rewards": [f"{reward}:digits"]}
        return merge(offline(path, method), {"align": online})
    if method == "distill":
        return merge(offline(path, method), {"align": {"teacher": str(write_teacher(path.with_name("teacher")))}})
    return offline(path, method)


def write_teacher(folder: Path, **shape: Any) -> Path:
    """Wider than the student and less deep, with a head of its own."""
    if not folder.exists():
        changes = {"hidden": 48, "layers": 1, "tie_embeddings": False, **shape}
        GPT(ModelSpec.from_dict({**MODEL, **changes}), seed=9).save_hf(folder)
    return folder


def offline(path: Path, method: str) -> dict[str, Any]:
    return {
        "name": method,
        "model": dict(MODEL),
        "data": {"path": str(path), "tokenizer": "bytes", "seq": 64, "micro_batch": 2, "global_batch": 8},
        "align": {"method": method},
        "optim": {"steps": 4, "lr": 1e-2, "warmup": 1},
        "checkpoint": {"every": 2},
        "log": {"eval_every": 0, "eval_batches": 1},
    }


def built_online(spec: RunSpec, run: Path) -> OnlineTrainer:
    trainer = trainer_class(spec)(spec, run, quiet=True)
    assert isinstance(trainer, OnlineTrainer)
    trainer.build()
    return trainer
