"""Exercises 12 to 15, `src/training/fsdp_trainer.py`: policies by what they say, the checkpoint on two real ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from ..checking.expect import Mismatch, expect_close, expect_equal
from .ddp import TINY
from .ranks import on_two_ranks, saved_by_rank_zero


def policies_of(fsdp: ModuleType, **changes: Any) -> Any:
    """A trainer with arguments alone: no model, no ranks."""
    trainer = object.__new__(fsdp.FSDPTrainer)
    trainer.args = fsdp.FSDPArguments(**{**TINY, **changes})
    trainer.device = torch.device("cpu")
    return trainer


def sharding_strategy(fsdp: ModuleType) -> None:
    for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
        got = policies_of(fsdp, sharding_strategy=name)._get_sharding_strategy()
        expect_equal(f"sharding_strategy = {name!r}", got, ShardingStrategy[name.upper()])
    try:
        got = policies_of(fsdp, sharding_strategy="zero9")._get_sharding_strategy()
    except (ValueError, SystemExit) as error:
        named = [name for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard") if name in str(error)]
        expect_equal("the error of a name that does not exist: names that it lists", len(named), 4)
        return
    except KeyError as error:
        raise Mismatch(
            "a name that does not exist, 'zero9'", "a ValueError that lists the four", f"KeyError: {error}"
        ) from None
    raise Mismatch("a name that does not exist, 'zero9'", "a ValueError that lists the four", got)


def mixed_precision(fsdp: ModuleType) -> None:
    got = policies_of(fsdp, mixed_precision="no")._get_mixed_precision_policy()
    expect_equal("mixed_precision = 'no'", got, None)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        got = policies_of(fsdp, mixed_precision=name)._get_mixed_precision_policy()
        if not isinstance(got, MixedPrecision):
            raise Mismatch(f"mixed_precision = {name!r}", "a MixedPrecision", got)
        for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            expect_equal(f"mixed_precision = {name!r}: {field}", getattr(got, field), dtype)


def fsdp_policy(fsdp: ModuleType) -> None:
    policy = policies_of(fsdp)._get_fsdp_policy()
    model = fsdp.GPT(fsdp_config(fsdp))
    block = model.blocks[0]
    if isinstance(policy, CustomPolicy):  # tells all at once
        units = policy._run_policy(model, set(), {})
        policy = lambda module, recurse, nonwrapped_numel: recurse or module in units  # noqa: E731
    if not callable(policy):
        raise Mismatch("what is returned", "a policy: something that FSDP calls with a module", policy)
    for name, module, wraps in (
        ("a TransformerBlock", block, True),
        ("an nn.Linear within a block", block.mlp.up_proj, False),
        ("a block's attention", block.attention, False),
        ("the whole GPT", model, False),
    ):
        got = bool(policy(module=module, recurse=False, nonwrapped_numel=10**9))
        remark = "units are blocks: finer ones send many small messages, one for all gathers the whole model at once"
        expect_equal(f"{name} is a unit of its own", got, wraps, remark=remark)
    got = bool(policy(module=block, recurse=True, nonwrapped_numel=10**9))
    expect_equal("looks into the children of a module", got, True)


def fsdp_config(fsdp: ModuleType) -> Any:
    return sys.modules[fsdp.GPT.__module__].SIZES["tiny"]


def fsdp_checkpoint(fsdp: ModuleType) -> None:
    on_two_ranks(lambda root: save_and_resume(fsdp, root))


def save_and_resume(fsdp: ModuleType, root: Path) -> None:
    trainer = make_trainer(fsdp, root)
    for step in range(2):
        trainer.train_step(trainer.micro_batches(step))
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        whole = {name: parameter.detach().clone() for name, parameter in plain_names(trainer.model)}
    path = root / "one" / "checkpoint.pt"
    state = saved_by_rank_zero(trainer, path)
    remark = "the keys of a plain GPT: a state dict of type FULL_STATE_DICT has them"
    plain = fsdp.GPT(fsdp_config(fsdp)).state_dict()
    expect_equal("the keys of the model", sorted(state["model"]), sorted(plain), remark=remark)
    for name, weight in whole.items():
        remark = "each rank holds a half; the file has to hold the whole"
        expect_close(f"{name} in the file", state["model"][name], weight, rtol=0, atol=0, remark=remark)
    expect_equal("step", state["step"], 2)
    moments = [one for one in state["optimizer"]["state"].values() if "exp_avg" in one]
    remark = "optimizer states by parameter name, whole: FullyShardedDataParallel.optim_state_dict(model, optimizer)"
    names = sorted(map(str, state["optimizer"]["state"]))
    expect_equal("the optimizer's parameters", names, sorted(dict(plain_parameters(fsdp))), remark=remark)
    total = sum(one["exp_avg"].numel() for one in moments)
    expect_equal("numbers of exp_avg", total, sum(map(torch.numel, whole.values())), remark=remark)
    resumed = make_trainer(fsdp, root, seed=99)
    resumed.load_checkpoint(path)
    batches = trainer.micro_batches(2)
    expected, got = trainer.train_step(batches), resumed.train_step(batches)
    expect_equal("the next step of a run that went on: loss", got["loss"], expected["loss"])
    second, again = trainer.train_step(batches), resumed.train_step(batches)
    expect_equal("the step after it: loss", again["loss"], second["loss"], remark="were the optimizer's states saved?")


def make_trainer(fsdp: ModuleType, root: Path, **changes: Any) -> Any:
    settings = {**TINY, "learning_rate": 0.01, "output_dir": str(root / "run"), **changes}
    return fsdp.FSDPTrainer(fsdp.FSDPArguments(**settings))


def plain_names(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name.replace("_fsdp_wrapped_module.", ""), one) for name, one in model.named_parameters()]


def plain_parameters(fsdp: ModuleType) -> list[tuple[str, torch.Tensor]]:
    return list(fsdp.GPT(fsdp_config(fsdp)).named_parameters())


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "sharding_strategy": sharding_strategy,
    "mixed_precision": mixed_precision,
    "fsdp_policy": fsdp_policy,
    "fsdp_checkpoint": fsdp_checkpoint,
}
