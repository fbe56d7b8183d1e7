"""The models of a run and the passes of its step: which model computes what, over how many rows, with or without a
backward pass.

    method              score, without gradients               update
    sft, orpo, simpo                                           policy
    reward                                                     reward model
    dpo, ipo            reference over the pairs               policy
    kto                 policy and reference over swapped      policy
                        answers, reference over the own
    grpo and its kind   policy (old log-probabilities),        policy
                        reference where align.beta > 0

Memory (`memory/phases.py`), messages (`exact/collectives.py`) and time (`round_time.py`) read this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..spec import AlignSpec, LoraSpec, ModelSpec, RunSpec
from ..spec.load import shape_of

POLICY, REFERENCE, REWARD = "policy", "reference", "reward model"
GENERATE, SCORE, UPDATE = "generate", "score", "update"
# What follows the last norm: the loss, whose gradient is made in the forward pass; log-probabilities of targets, whose
# logits are computed again in the backward pass; or one number a token.
CROSS_ENTROPY, LOGPROBS, SCALAR = "cross-entropy", "log-probabilities", "scalar"


@dataclass(frozen=True)
class HeldModel:
    """A model that every rank has in some layout."""

    name: str
    run: RunSpec  # of which it is the model
    trained: bool
    weights_of: str = ""  # the model whose weights it uses ("": its own)


@dataclass(frozen=True)
class Pass:
    """Over one micro-batch."""

    phase: str
    model: str
    rows: int  # sequences
    backward: bool = False


def held_models(spec: RunSpec) -> dict[str, HeldModel]:
    trained = trained_model(spec)
    models = {trained: HeldModel(trained, spec, trained=True)}
    if spec.align.needs_reference:
        shared = POLICY if reference_is_base(spec) else ""
        models[REFERENCE] = HeldModel(REFERENCE, frozen_run(spec, reference_shape(spec)), False, shared)
    return models


def trained_model(spec: RunSpec) -> str:
    return REWARD if spec.model.scalar_head else POLICY


def reference_is_base(spec: RunSpec) -> bool:
    """Whether the reference is the policy without its adapters: it needs no weights of its own."""
    return bool(spec.adapters) and not spec.align.reference


def reference_shape(spec: RunSpec) -> ModelSpec:
    folder = spec.align.reference
    return ModelSpec.from_dict(shape_of(Path(folder), "align.reference")) if folder else spec.model


def frozen_run(spec: RunSpec, model: ModelSpec, folder: str = "") -> RunSpec:
    """A run with the layout of this one whose model is only evaluated; its weights come from `folder`."""
    return spec.replace(
        model=model.replace(attention=spec.model.attention),
        checkpoint=spec.checkpoint.replace(init=folder),
        align=AlignSpec(method="reward" if model.scalar_head else ""),
        lora=LoraSpec(),
        data=spec.data.replace(kind="auto"),
    )


def passes(spec: RunSpec) -> tuple[Pass, ...]:
    """Of one micro-batch, in their order."""
    method, rows = spec.align.method, spec.data.micro_batch * spec.data.rows_per_example
    scored: tuple[Pass, ...] = ()
    if method == "kto":
        scored = (Pass(SCORE, POLICY, rows), Pass(SCORE, REFERENCE, rows), Pass(SCORE, REFERENCE, rows))
    elif spec.align.online:
        scored = (Pass(SCORE, POLICY, rows),)
        scored += (Pass(SCORE, REFERENCE, rows),) if spec.align.needs_reference else ()
    elif spec.align.needs_reference:
        scored = (Pass(SCORE, REFERENCE, rows),)
    return (*scored, Pass(UPDATE, trained_model(spec), rows, backward=True))


def head_of(spec: RunSpec, model: ModelSpec) -> str:
    if model.scalar_head:
        return SCALAR
    return CROSS_ENTROPY if spec.align.method in ("", "sft") else LOGPROBS
