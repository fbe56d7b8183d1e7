"""Small runs for tests, and bitwise comparison of two runs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmworks import checkpoint
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import ModelSpec, RunSpec
from lmworks.spec.load import apply_overrides
from lmworks.train import Trainer

WORDS = ["def", "return", "for", "in", "x", "y", "if", "not", "self", "import"]


def write_documents(path: Path, seed: int = 0) -> Path:
    """1,000 documents of 1 to 30 Python-like words as JSON lines: most windows of 32 bytes hold the end of one."""
    draw = random.Random(seed)
    documents = (" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(1000))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make_spec(data: Path, *overrides: str) -> RunSpec:
    """One layer of width 32, 12 steps of 4 sequences; `overrides` as on the command line."""
    table: dict[str, Any] = {
        "name": "tiny",
        "model": {"preset": "tiny", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1},
        "data": {"path": str(data), "seq": 32, "micro_batch": 2, "global_batch": 4},
        "optim": {"steps": 12, "lr": 1e-2, "warmup": 2},
        "checkpoint": {"every": 0},
        "log": {"eval_every": 0, "eval_batches": 1},
    }
    return RunSpec.from_dict(apply_overrides(table, overrides))


def write_adapter(folder: Path, spec: ModelSpec, seed: int) -> None:
    """A LoRA adapter as PEFT writes it, for one layer."""
    luck = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 64}))
    start = "base_model.model.model.layers.0.mlp.down_proj.lora"
    pair = {"A": (2, spec.ffn), "B": (spec.hidden, 2)}
    tensors = {f"{start}_{which}.weight": torch.randn(*shape, generator=luck) for which, shape in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def train(spec: RunSpec, run_dir: Path) -> Trainer:
    trainer = Trainer(spec, run_dir, quiet=True)
    trainer.run()
    return trainer


def resume(run_dir: Path) -> Trainer:
    trainer = Trainer.resume(run_dir, quiet=True)
    trainer.run()
    return trainer


def built(spec: RunSpec, run_dir: Path) -> Trainer:
    """A trainer that is ready for `train_step`, without a loop around it."""
    trainer = Trainer(spec, run_dir, quiet=True)
    trainer.build()
    return trainer


def steps_of(trainer: Trainer, count: int) -> Iterator[dict[str, Any]]:
    """Take `count` bare steps, as the loop does."""
    for _ in range(count):
        yield trainer.train_step(trainer.batches.at(trainer.cursor))
        trainer.step += 1
        trainer.cursor += 1


class Crash(Exception):
    """What a test raises where a run is to die."""


def before_step(trainer: Trainer, number: int, act: Callable[[], None]) -> None:
    """Do something just before the `number`-th optimizer step (counted from 1)."""
    take = trainer.train_step

    def acting(batches: Any) -> dict[str, Any]:
        if trainer.step + 1 == number:
            act()
        return take(batches)

    trainer.train_step = acting  # type: ignore[method-assign]


def crash() -> None:
    raise Crash


# --- what two runs are compared by ---------------------------------------------------------------------


def curve(run_dir: Path) -> list[tuple[Any, ...]]:
    """What every step recorded, less what depends on the clock."""
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss", "loss_scale")
    return [tuple(line.get(key) for key in keys) for line in read_metrics(RunFolder(run_dir).metrics_path)]


def saved(run_dir: Path, step: int | None = None, *others: str) -> dict[str, Tensor]:
    """Everything in the newest checkpoint (or that of `step`): weights, optimizer, random generators, by name; and
    `others`, its further sections."""

    def refused(folder: Path, reason: str) -> None:
        raise AssertionError(f"{folder} was refused: {reason}")

    state: dict[str, Any] = dict.fromkeys(("model", "optim", "rng", *others))
    found = checkpoint.load(RunFolder(run_dir).checkpoints, state, refused=refused, step=step)
    assert found is not None
    return {"step": torch.tensor(found.step), **flat(state)}


def live(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of the weights and the optimizer's state as they are now."""
    return {name: value.clone() for name, value in flat(trainer.train_state.state_dict()).items()}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, value in tree.items():
        tensors |= {prefix + key: value} if isinstance(value, Tensor) else flat(value, f"{prefix}{key}.")
    return tensors


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ (two NaN of the same bits are equal), or that only one side has."""
    bits = {4: torch.int32, 8: torch.int64, 2: torch.int16, 1: torch.uint8}
    names = sorted(one.keys() ^ other.keys())
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        if not (same_kind and torch.equal(a.view(bits[a.itemsize]), b.view(bits[b.itemsize]))):
            names.append(name)
    return names


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunFolder(run_dir).events() if event["kind"] == kind]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}" / "rank-00000.safetensors"


# --- the command, in a process of its own --------------------------------------------------------------


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """`lmworks …` in the background, in a session of its own so that no signal of the test runner reaches it."""
    command = [sys.executable, "-m", "lmworks", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env=os.environ.copy(), **{**pipes, **options})


def write_spec(spec: RunSpec, path: Path) -> Path:
    from lmworks.spec import dump_toml

    path.write_text(dump_toml(spec.to_dict()))
    return path
