"""Examples of post-training jobs under test: short sums, a reward for digits, and a teacher."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ...model import GPT
from ...spec.align import CONVERSATIONS, PREFERENCES, PROMPTS, UNPAIRED
from .faults import EXAMPLES, REWARDS, TEACHER, trial_spec

REWARD = """\
def digits(completions, **columns):
    return [sum(one.isdigit() for one in text) / 6 for text in completions]
"""


def write_examples(folder: Path, kind: str, count: int = 120) -> None:
    draw = random.Random(0)
    folder.mkdir(parents=True)
    records = [record(kind, draw.randint(0, 99), draw.randint(0, 99), draw.random() < 0.5) for _ in range(count)]
    (folder / EXAMPLES).write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    (folder / REWARDS).write_text(REWARD, encoding="utf-8")


def write_teacher(folder: Path) -> None:
    """A random model, wider than the student."""
    shape = trial_spec("one", "", "sync").model
    GPT(shape.replace(layers=1, hidden=2 * shape.hidden), seed=1).save_hf(folder / TEACHER)


def record(kind: str, a: int, b: int, right: bool) -> dict[str, Any]:
    prompt, answer, wrong = f"{a}+{b}=", str(a + b), str(a + b + 1)
    by_kind: dict[str, dict[str, Any]] = {
        CONVERSATIONS: {"prompt": prompt, "completion": answer},
        PREFERENCES: {"prompt": prompt, "chosen": answer, "rejected": wrong},
        UNPAIRED: {"prompt": prompt, "completion": answer if right else wrong, "label": right},
        PROMPTS: {"prompt": prompt, "answer": answer},
    }
    return by_kind[kind]
