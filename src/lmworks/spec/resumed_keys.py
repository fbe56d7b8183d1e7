"""Keys that a resumed run may change, as data; `resumed.py` compares by them."""

from __future__ import annotations

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
