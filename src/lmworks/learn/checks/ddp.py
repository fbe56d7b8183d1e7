"""Exercises 8 to 11, `src/training/ddp_trainer.py`: against one large batch, and against the run that never stopped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn

from ..checking.expect import Mismatch, expect_close, expect_equal
from .ranks import on_two_ranks, saved_by_rank_zero

TINY = {"model_size": "tiny", "batch_size": 2, "seq_len": 16, "max_steps": 10, "warmup_steps": 2, "output_dir": "run"}


def make_trainer(ddp: ModuleType, **changes: Any) -> Any:
    return ddp.DistributedTrainer(ddp.TrainingArguments(**{**TINY, **changes}))


def optimizer(ddp: ModuleType) -> None:
    trainer = make_trainer(ddp, weight_decay=0.3, learning_rate=0.01)
    found = trainer._setup_optimizer()
    if not isinstance(found, torch.optim.AdamW):
        raise Mismatch("what is returned", "torch.optim.AdamW", type(found).__name__)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    listed = [parameter for group in found.param_groups for parameter in group["params"]]
    missing = sorted(set(names.values()) - {names[one] for one in listed})
    expect_equal("parameters that no group has", missing, [])
    expect_equal("parameters", len(listed), len(names))
    for group in found.param_groups:
        for parameter in group["params"]:
            vector = parameter.dim() < 2
            remark = "vectors (norms, biases) are not decayed, matrices are"
            expect_equal(
                f"weight decay of {names[parameter]} {tuple(parameter.shape)}", float(group["weight_decay"]),
                0.0 if vector else 0.3, remark=remark,
            )  # fmt: skip
    first = found.param_groups[0]
    expect_equal("the learning rate", float(first["lr"]), 0.01)
    expect_equal("betas", tuple(map(float, first["betas"])), (0.9, 0.95))
    trainer.model.norm.weight.requires_grad_(False)
    frozen = [one for group in trainer._setup_optimizer().param_groups for one in group["params"]]
    remark = "a parameter that is frozen (requires_grad = False) has no place in the optimizer"
    expect_equal("a frozen parameter", any(one is trainer.model.norm.weight for one in frozen), False, remark=remark)


def lr_schedule(ddp: ModuleType) -> None:
    trainer = make_trainer(ddp, learning_rate=1.0, min_lr=0.1, warmup_steps=4, max_steps=12)
    for step, expected, remark in (
        (0, 0.25, "the first of 4 warm-up steps has a quarter, not zero"),
        (1, 0.5, ""),
        (3, 1.0, "the last warm-up step has the whole learning rate"),
        (4, 1.0, "the cosine begins at its top"),
        (8, 0.55, "half-way down the cosine: the middle of learning_rate and min_lr"),
        (6, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), ""),
        (12, 0.1, "the end is min_lr"),
        (15, 0.1, "after the end it stays at min_lr; a cosine would rise again"),
    ):
        got = trainer.get_lr(step)
        got = float(got) if isinstance(got, (int, float)) else got
        about = "peak 1.0, min 0.1, 4 warm-up steps, 12 steps" + (f": {remark}" if remark else "")
        expect_equal(f"step {step}", got, expected, remark=about)
    trainer = make_trainer(ddp, learning_rate=1.0, min_lr=0.1, warmup_steps=0, max_steps=10)
    expect_equal("step 0 without warm-up", float(trainer.get_lr(0)), 1.0)


def one_large_batch(trainer: Any, micro_batches: list[torch.Tensor]) -> tuple[nn.Module, float, float]:
    """The model after one update from all micro-batches at once; its loss; the norm of its gradient."""
    model = copy.deepcopy(trainer.model)
    model.zero_grad()
    tokens = torch.cat(micro_batches)
    loss = model(tokens, labels=tokens)[1]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    # Adam's first step: lr · sign-like; written with torch's own optimizer over copies of its states.
    states = copy.deepcopy(trainer.optimizer.state_dict())
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": trainer.args.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    optimizer.load_state_dict(states)
    for group in optimizer.param_groups:
        group["lr"] = trainer.get_lr(trainer.step)
    optimizer.step()
    return model, loss.item(), float(norm)


def train_step(ddp: ModuleType) -> None:
    for count, clip, steps in ((1, 100.0, 2), (2, 100.0, 1), (3, 0.05, 3)):
        trainer = make_trainer(ddp, grad_accum_steps=count, max_grad_norm=clip, learning_rate=0.01)
        for step in range(steps):
            which = f"{count} micro-batch{'es' * (count > 1)}, clipped at {clip:g}, step {step}"
            batches = trainer.micro_batches(step)
            after, loss, norm = one_large_batch(trainer, batches)
            lr = trainer.get_lr(step)
            got = trainer.train_step(batches)
            if not isinstance(got, dict) or not {"loss", "grad_norm", "lr"} <= set(got):
                raise Mismatch(which, "a dictionary with loss, grad_norm and lr", got)
            for key in ("loss", "grad_norm", "lr"):
                if not isinstance(got[key], (float, int)):
                    raise Mismatch(f"{which}: {key}", "a number (`.item()` of a tensor)", type(got[key]).__name__)
            remark = "the mean loss of the micro-batches, as a number"
            expect_close(f"{which}: loss", torch.tensor(got["loss"]), torch.tensor(loss), rtol=1e-4, remark=remark)
            remark = "the norm before clipping, of the gradient that one large batch of all micro-batches has"
            expect_close(
                f"{which}: grad_norm", torch.tensor(got["grad_norm"]), torch.tensor(norm), rtol=1e-3, remark=remark
            )
            expect_equal(f"{which}: lr", float(got["lr"]), lr)
            for (name, one), other in zip(trainer.model.named_parameters(), after.parameters(), strict=True):
                expect_close(f"{which}: {name} after the update", one.data, other.data, rtol=1e-3, atol=2e-5)
            expect_equal(f"{which}: self.step", trainer.step, step + 1)
    synchronised(ddp)


def synchronised(ddp: ModuleType) -> None:
    """What runs under which of the trainer's contexts, and who clips."""
    trainer = make_trainer(ddp, grad_accum_steps=3)
    inside: list[str] = []
    seen: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        inside.append(name)
        yield
        inside.remove(name)

    trainer.without_sync, trainer.autocast = partial(context, "without_sync"), partial(context, "autocast")
    clip = trainer.clip_gradients

    def clip_gradients() -> float:
        seen.append("clip")
        return float(clip())

    trainer.clip_gradients = clip_gradients
    trainer.model.norm.register_forward_hook(lambda *_: seen.append(f"forward {' '.join(sorted(inside))}".strip()))
    trainer.model.norm.weight.register_hook(lambda _: seen.append(f"backward {' '.join(sorted(inside))}".strip()))
    trainer.train_step(trainer.micro_batches(0))
    under = [one for one in seen if one.startswith("forward")]
    remark = "every forward pass runs under `with self.autocast():`"
    expect_equal(
        "3 micro-batches: forward passes under autocast", sum("autocast" in one for one in under), 3, remark=remark
    )
    remark = (
        "gradients of all micro-batches but the last stay on the rank: `with self.without_sync():` around both passes"
    )
    backward = [one.replace(" autocast", "") for one in seen if one.startswith("backward")]
    expected = ["backward without_sync", "backward without_sync", "backward"]
    expect_equal("3 micro-batches: the backward passes", backward, expected, remark=remark)
    remark = "FSDP inherits this step, and only its own clip_gradients knows the whole norm"
    expect_equal("calls of self.clip_gradients", seen.count("clip"), 1, remark=remark)


def ddp_checkpoint(ddp: ModuleType) -> None:
    on_two_ranks(lambda root: save_and_resume(ddp, root))


def save_and_resume(ddp: ModuleType, root: Path) -> None:
    settings = {"learning_rate": 0.01, "output_dir": str(root / "run")}
    trainer = make_trainer(ddp, **settings)
    for step in range(2):
        trainer.train_step(trainer.micro_batches(step))
    path = root / "one" / "checkpoint.pt"
    state = saved_by_rank_zero(trainer, path)
    plain = ddp.GPT(trainer.config)
    remark = "DDP holds the model as `.module`; a checkpoint has to load into a plain GPT"
    expect_equal("the keys of the model", sorted(state["model"]), sorted(plain.state_dict()), remark=remark)
    expect_equal("step", state["step"], 2, remark="the number of steps that are done")
    expect_equal("optimizer", sorted(state["optimizer"]), ["param_groups", "state"])
    resumed = make_trainer(ddp, **settings, seed=99)
    resumed.load_checkpoint(path)
    expect_equal("loaded: self.step", resumed.step, 2)
    for (name, one), other in zip(resumed.model.state_dict().items(), trainer.model.state_dict().values(), strict=True):
        expect_close(f"loaded: {name}", one, other, rtol=0, atol=0)
    batches = trainer.micro_batches(2)
    expected, got = trainer.train_step(batches), resumed.train_step(batches)
    expect_equal("loaded: loss of the next step", got["loss"], expected["loss"])
    remark = "the uninterrupted run has other weights after one more step: were the optimizer's states loaded?"
    for (name, one), other in zip(resumed.model.state_dict().items(), trainer.model.state_dict().values(), strict=True):
        expect_close(f"loaded: {name} after one more step", one, other, rtol=0, atol=1e-7, remark=remark)
    alone = make_trainer(ddp, **settings, seed=98)
    alone.model, alone.world_size = plain, 1
    alone.optimizer = alone._setup_optimizer()
    alone.load_checkpoint(path)
    for name, one in plain.state_dict().items():
        expect_close(f"loaded by one process without DDP: {name}", one, state["model"][name], rtol=0, atol=0)


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "optimizer": optimizer,
    "lr_schedule": lr_schedule,
    "train_step": train_step,
    "ddp_checkpoint": ddp_checkpoint,
}
