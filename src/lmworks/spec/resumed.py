"""What of its spec a run may change when it is resumed. This list is all there is; everything else is refused by key.

A resumed run goes on where it stood: with the same weights and states, at the same place in the same order of the same
data. What those follow from must stay as it was. What only says how, where and how long the run goes on may change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .run import RunSpec

MAY_CHANGE = (  # a section stands for all its keys
    "name",
    "deterministic",
    "parallel",  # another layout: weights, states and the place in the data arrive exactly
    "cluster",
    "checkpoint",  # `init`: not looked at again, but for the base of adapters, which is compared by digest
    "lora.init",  # not looked at again
    "align.reference",  # the same weights in another place: models are compared by digest
    "align.reward_model",
    "align.critic",
    "align.teacher",
    "align.kl_stop",
    "align.held_out_stop",
    "align.offload",
    "align.engine_tp",  # how many engines sample, and their memory
    "align.engine_memory",
    "fault",
    "health",
    "watch",
    "log",
    "data.path",  # the same tokens in another place: they are compared by digest
    "data.micro_batch",  # how a global batch is divided; what is in it stays
    "data.workers",
    "data.verify",
    "model.preset",  # a label: the keys that it stands for are compared
    "model.attention",  # another kernel for the same attention
    "model.balance_loss",
    "optim.steps",
    "optim.lr",
    "optim.schedule",
    "optim.warmup",
    "optim.min_lr_ratio",
    "optim.decay_ratio",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.weight_decay",
    "optim.clip",
    "precision.dtype",
    "precision.rounding",
    "precision.states",  # moments are converted
    "precision.reduce",
    "precision.loss_scale",
    "precision.loss_scale_window",
    "precision.fp8_scaling",
    "precision.fp8_head",
)


def may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def refused_changes(saved: Mapping[str, Any], spec: RunSpec, section: str = "") -> list[str]:
    """'key = new, was old' of everything in `spec` that a run saved with `saved` (a spec as JSON) must not change.

    Of one `section` only, where one is named. A key that was not there when it was saved had its default.
    """
    old, new, usual = flat(saved), flat(spec.to_dict()), flat(RunSpec().to_dict())
    found = []
    for key in sorted(old.keys() | new.keys()):
        if may_change(key) or not key.startswith(section):
            continue
        before, now = (table.get(key, usual.get(key)) for table in (old, new))
        if before != now:
            found.append(f"{key} = {shown(now)}, was {shown(before)}")
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 1e-3, …}, as JSON has it. Of a mixture its weights, in their order: its folders may have moved."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if name == "data.mix":
            found[name] = list(value.values()) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    return "not there" if value is None else json.dumps(value)
