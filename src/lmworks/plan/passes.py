"""The models of a run and the passes of its step: which model computes what, over how many rows, with or without a
backward pass.

    method              score, without gradients               update
    sft, orpo, simpo                                           policy
    reward                                                     reward model
    dpo, ipo            reference over the pairs               policy
    kto                 policy and reference over swapped      policy
                        answers, reference over the own
    grpo and its kind   policy where a round has several       policy
                        updates, reference where align.beta
                        > 0, reward model where there is one
    ppo                 policy, reference, reward model,       policy; then the critic
                        critic
    distill             teacher, up to its last hidden         policy
                        states

Memory (`memory/phases.py`), messages (`exact/collectives.py`) and time (`round_time.py`) read this one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..spec import AlignSpec, Cluster, DataSpec, LoraSpec, ModelSpec, RunSpec, SpecError
from ..spec.load import adapter_options, shape_of
from ..spec.presets import PRESETS

POLICY, REFERENCE, REWARD, CRITIC, TEACHER = "policy", "reference", "reward model", "critic", "teacher"
HAND_OVER, GENERATE, SCORE, UPDATE, UPDATE_CRITIC = "hand over", "generate", "score", "update", "update of the critic"
SAVE = "save"  # of a checkpoint
# What follows the last norm: the loss, whose gradient is made in the forward pass; log-probabilities of targets, whose
# logits are computed again in the backward pass; one number a token; the divergence from a teacher, like the loss; or
# nothing: of a teacher the student's loss reads the hidden states.
CROSS_ENTROPY, LOGPROBS, SCALAR, DIVERGENCE = "cross-entropy", "log-probabilities", "scalar", "divergence"
STATES = "hidden states"


@dataclass(frozen=True)
class HeldModel:
    """A model that every rank has in some layout."""

    name: str
    run: RunSpec  # of which it is the model
    trained: bool
    weights_of: str = ""  # the model whose weights it uses, with the adapter of `run` if it has one ("": its own)


@dataclass(frozen=True)
class Pass:
    """Over one micro-batch."""

    phase: str
    model: str
    rows: int  # sequences
    backward: bool = False


WEIGHTS, OPTIMIZER = "weights", "optimizer states"
Part = tuple[str, str]  # (model, WEIGHTS or OPTIMIZER)


def needed(phase: str, model: str) -> set[Part]:
    """Parts that have to be on the device while `model` computes, beside the weights of the policy, which are always.

    With align.offload = "resting" all others wait in host memory.
    """
    if phase == SAVE:
        return {(POLICY, OPTIMIZER), (CRITIC, WEIGHTS), (CRITIC, OPTIMIZER)}
    parts = {(model, WEIGHTS)}
    if phase in (UPDATE, UPDATE_CRITIC):
        parts |= {(model, OPTIMIZER)}
    return parts | {(TEACHER, WEIGHTS)} if phase == UPDATE else parts


def held_models(spec: RunSpec) -> dict[str, HeldModel]:
    trained = trained_model(spec)
    models = {trained: HeldModel(trained, spec, trained=True)}
    align = spec.align
    if align.needs_reference:
        shared = POLICY if reference_is_base(spec) else ""
        shape = planned_shape(align.reference, "align.reference", spec.model)
        models[REFERENCE] = HeldModel(REFERENCE, frozen_run(spec, shape), False, shared)
    if align.online and align.reward_model:
        if lora := reward_adapter(spec):
            run = frozen_run(spec, spec.model.replace(scalar_head=True), lora=lora)
            models[REWARD] = HeldModel(REWARD, run, False, POLICY)
        else:
            shape = planned_shape(align.reward_model, "align.reward_model", spec.model).replace(scalar_head=True)
            models[REWARD] = HeldModel(REWARD, frozen_run(spec, shape), False)
    if (teacher := teacher_shape(spec)) is not None:
        models[TEACHER] = HeldModel(TEACHER, frozen_run(spec, teacher), False)
    if align.method == "ppo":
        if lora := critic_adapter(spec):
            models[CRITIC] = HeldModel(CRITIC, critic_run(spec, spec.model, lora=lora), True, POLICY)
        else:
            folder = align.critic or align.reward_model or spec.checkpoint.init
            shape = planned_shape(folder, "align.critic", spec.model)
            models[CRITIC] = HeldModel(CRITIC, critic_run(spec, shape), True)
    return models


def trained_model(spec: RunSpec) -> str:
    return REWARD if spec.model.scalar_head else POLICY


def reference_is_base(spec: RunSpec) -> bool:
    """Whether the reference is the policy without its adapters: it needs no weights of its own."""
    return bool(spec.adapters) and not spec.align.reference


def reward_adapter(spec: RunSpec) -> LoraSpec | None:
    """Of a reward model that is an adapter over the policy's base; None: it is a whole model."""
    folder = spec.align.reward_model
    lora = adapter_options(Path(folder), spec.model) if folder else None
    if lora is not None and not spec.adapters:
        raise SpecError(
            f"align.reward_model = {folder!r} is an adapter, which needs a policy with adapters over the same base: "
            "set lora.rank, or make a whole model of it with `lmworks checkpoint export`"
        )
    return lora


def critic_adapter(spec: RunSpec) -> LoraSpec | None:
    """Of PPO's critic, where it is an adapter over the policy's base; None: it is a whole model.

    So it is where the policy has adapters, unless align.critic names a whole model. It starts as the adapter that
    align.critic names, else as that of the reward model, else as a new one with the options of the policy's.
    """
    align = spec.align
    if align.method != "ppo" or not spec.adapters:
        return None
    if align.critic:
        return adapter_options(Path(align.critic), spec.model)
    return reward_adapter(spec) or spec.lora


def planned_shape(folder: str, key: str, default: ModelSpec) -> ModelSpec:
    """Of a model folder; the name of a preset, where there is no such folder, stands for its shape."""
    if folder in PRESETS and not Path(folder).exists():
        return ModelSpec.from_preset(folder)
    return ModelSpec.from_dict(shape_of(Path(folder), key)) if folder else default


def teacher_shape(spec: RunSpec) -> ModelSpec | None:
    """Of distillation."""
    return planned_shape(spec.align.teacher, "align.teacher", spec.model) if spec.align.method == "distill" else None


def frozen_run(spec: RunSpec, model: ModelSpec, folder: str = "", lora: LoraSpec | None = None) -> RunSpec:
    """A run with the layout of this one whose model is only evaluated; its weights come from `folder`."""
    layout = (
        spec.parallel if model.experts else spec.parallel.replace(ep=1)
    )  # a dense teacher of a student with experts
    return spec.replace(
        model=model.replace(attention=spec.model.attention),
        parallel=layout,
        checkpoint=spec.checkpoint.replace(init=folder),
        align=AlignSpec(method="reward" if model.scalar_head else ""),
        lora=lora or LoraSpec(),
        data=offline_data(spec),
        cluster=layout_cluster(spec),
    )


def critic_run(spec: RunSpec, model: ModelSpec, folder: str = "", lora: LoraSpec | None = None) -> RunSpec:
    """The critic as a run of its own: its shape, start and learning rate; layout and precision of the policy."""
    return spec.replace(
        model=model.replace(scalar_head=True, attention=spec.model.attention),
        checkpoint=spec.checkpoint.replace(init=folder),
        align=AlignSpec(method="reward"),
        data=offline_data(spec),
        cluster=layout_cluster(spec),
        lora=lora or LoraSpec(),
        optim=spec.optim.replace(lr=spec.align.critic_lr or 10 * spec.optim.lr),
    )


def offline_data(spec: RunSpec) -> DataSpec:
    """Of a further model: its run has an offline method, whose global batch is whole micro-batches of every rank."""
    data = spec.data
    return data.replace(kind="auto", global_batch=spec.accumulation * data.micro_batch * spec.parallel.dp)


def layout_cluster(spec: RunSpec) -> Cluster:
    """Of a further model: rollout ranks, which the cluster of the run counts, do not hold it."""
    return spec.cluster.replace(nodes=1, gpus_per_node=1) if spec.align.rollout_ranks else spec.cluster


def passes(spec: RunSpec) -> tuple[Pass, ...]:
    """Of one micro-batch, in their order."""
    method, rows = spec.align.method, spec.data.micro_batch * spec.data.rows_per_example
    scored: tuple[Pass, ...] = ()
    if method == "kto":
        scored = (Pass(SCORE, POLICY, rows), Pass(SCORE, REFERENCE, rows), Pass(SCORE, REFERENCE, rows))
    elif spec.align.online:
        names = [name for name in held_models(spec) if name != POLICY or scores_policy(spec)]
        scored = tuple(Pass(SCORE, name, rows) for name in names)
    elif method == "distill":
        scored = (Pass(SCORE, TEACHER, rows),)
    elif spec.align.needs_reference:
        scored = (Pass(SCORE, REFERENCE, rows),)
    found = (*scored, Pass(UPDATE, trained_model(spec), rows, backward=True))
    return (*found, Pass(UPDATE_CRITIC, CRITIC, rows, backward=True)) if method == "ppo" else found


def scores_policy(spec: RunSpec) -> bool:
    """Whether old log-probabilities differ from those of the update, or are a part of the rewards."""
    align = spec.align
    if align.method == "distill":
        return False
    several = align.updates(spec.data.global_batch) > 1
    return several or align.method == "ppo" or (align.method == "rloo" and align.beta > 0)


def head_of(spec: RunSpec, model: ModelSpec) -> str:
    if model.scalar_head:
        return SCALAR
    if spec.align.method == "distill":
        return DIVERGENCE
    return CROSS_ENTROPY if spec.align.method in ("", "sft") else LOGPROBS
