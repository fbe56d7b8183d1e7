"""The spec of `lmworks finetune`: a model folder, a file of examples and a method, with the usual settings of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..data import open_batches
from ..data.progress import Progress, silent
from ..spec import AlignSpec, RunSpec
from ..spec.align import ONLINE_METHODS
from ..spec.load import apply_overrides, with_initial_shape
from ..spec.schema import merge

# Peak learning rates for all weights; adapters take ten times as much.
LEARNING_RATES = {
    "sft": 2e-5,
    "distill": 2e-5,
    "reward": 1e-5,
    "dpo": 5e-7,
    "ipo": 5e-7,
    "kto": 5e-7,
    "orpo": 8e-6,
    "simpo": 8e-7,
}
ONLINE_LEARNING_RATE, LORA_FACTOR = 1e-6, 10.0
MAX_SEQ = 1024  # tokens of a row, where the model's context is longer
MICRO_BATCH, GLOBAL_BATCH = 4, 16


def finetune_spec(
    model: str,
    data: str,
    method: str,
    lora: int = 0,
    epochs: float = 1.0,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
) -> RunSpec:
    """`overrides` change anything; without optim.steps among them, the run makes `epochs` passes over the examples."""
    table = with_initial_shape(apply_overrides(defaults(model, data, method, lora), overrides))
    online = method in ONLINE_METHODS or table["align"].get("on_policy")
    if not online:
        table["data"].setdefault("global_batch", GLOBAL_BATCH)
    table["data"].setdefault("seq", min(MAX_SEQ, table["model"].get("context", MAX_SEQ)))
    if online:  # an answer leaves room for its prompt
        table["align"].setdefault("max_tokens", min(AlignSpec().max_tokens, table["data"]["seq"] // 2))
    if "steps" in table["optim"]:
        return RunSpec.from_dict(table)
    table["optim"]["steps"] = max(1, int(table["optim"].get("warmup", 1)))  # until the examples are counted
    spec = RunSpec.from_dict(table)
    rows = open_batches(spec.data, spec.checkpoint.init, seed=spec.seed, progress=progress).windows
    return RunSpec.from_dict(merge(table, {"optim": {"steps": steps_of(spec, rows, epochs)}}))


def steps_of(spec: RunSpec, rows: int, epochs: float) -> int:
    """Optimizer steps of so many passes over the rows (prompts of an online method) of the training split."""
    if not spec.align.online:
        return max(1, math.ceil(epochs * rows / spec.data.global_batch))
    rounds = max(1, math.ceil(epochs * rows / spec.align.prompts))
    return rounds * spec.align.updates(spec.data.global_batch)


def defaults(model: str, data: str, method: str, lora: int) -> dict[str, Any]:
    rate = LEARNING_RATES.get(method, ONLINE_LEARNING_RATE)
    table: dict[str, Any] = {
        "name": f"{Path(model).name}-{method}",
        "checkpoint": {"init": model},
        "data": {"path": data, "micro_batch": MICRO_BATCH},
        "optim": {"lr": rate * (LORA_FACTOR if lora else 1), "weight_decay": 0.0, "beta2": 0.999, "min_lr_ratio": 0.0},
        "align": {"method": method},
        "log": {"every": 1},
    }
    return merge(table, {"lora": {"rank": lora}}) if lora else table
