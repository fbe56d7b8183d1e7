"""Post-training in a spec: the method with its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .errors import SpecError
from .layout import indivisible
from .schema import Section, opt

if TYPE_CHECKING:
    from .run import RunSpec

# Kinds of data files (jsonl, one example a line), by the columns that TRL uses too.
CONVERSATIONS = "conversations"  # messages; or prompt and completion
PREFERENCES = "preferences"  # chosen and rejected, with or without prompt
UNPAIRED = "unpaired"  # prompt, completion, label
PROMPTS = "prompts"  # prompt; other columns reach the rewards
DATA_KINDS = ("tokens", CONVERSATIONS, PREFERENCES, UNPAIRED, PROMPTS)
METHOD_DATA = {
    "sft": CONVERSATIONS,
    "reward": PREFERENCES,
    "dpo": PREFERENCES,
    "ipo": PREFERENCES,
    "kto": UNPAIRED,
    "orpo": PREFERENCES,
    "simpo": PREFERENCES,
    "grpo": PROMPTS,
    "dr_grpo": PROMPTS,
    "dapo": PROMPTS,
    "gspo": PROMPTS,
    "rloo": PROMPTS,
    "best_of_n": PROMPTS,
    "ppo": PROMPTS,
    "distill": CONVERSATIONS,  # with align.on_policy: prompts
}
METHODS = tuple(METHOD_DATA)
DEFAULT_BETA = {"ppo": 0.15, "dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
REFERENCE_METHODS = ("dpo", "ipo", "kto")  # compare the policy with a frozen reference model
KL_METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo")  # do so where align.beta > 0
ONLINE_METHODS = tuple(method for method, kind in METHOD_DATA.items() if kind == PROMPTS)
DAPO_CLIP_HIGH = 0.28
# Keys that would have no effect with another method are refused.
SAMPLING_KEYS = ("environment", "rewards", "reward_model", "partial_rollouts", "engine_tp")  # also on-policy distill
METHOD_KEYS = {
    "teacher": ("distill",),
    "on_policy": ("distill",),
    "critic": ("ppo",),
    "kl_stop": KL_METHODS,
    "held_out_stop": ONLINE_METHODS,
}


@dataclass(frozen=True)
class AlignSpec(Section):
    """Post-training. Log-probabilities, references and rewards are of whole answers unless it says otherwise."""

    section: ClassVar[str] = "align"

    method: str = opt("", "post-training method (empty: pretraining on data.path)", choices=("", *METHODS))
    reference: str = opt(
        "", "Hugging Face or run folder of the reference model (empty: the weights the run starts from)"
    )
    beta: float = opt(
        -1.0,
        "dpo, ipo, kto: strength of the preference against the reference; orpo's λ; simpo's scale; online methods: "
        "coefficient of the KL divergence from the reference (-1: the method's default)",
        ge=-1,
    )
    label_smoothing: float = opt(0.0, "dpo: share of preferences that are assumed to be wrong", ge=0, lt=0.5)
    simpo_margin: float = opt(1.0, "simpo: target margin γ between the mean log-probabilities", ge=0)
    desirable_weight: float = opt(1.0, "kto: weight of desirable answers", ge=0)
    undesirable_weight: float = opt(1.0, "kto: weight of undesirable answers", ge=0)
    sft_weight: float = opt(0.0, "dpo: weight of the chosen answers' negative log-likelihood, added to the loss", ge=0)
    reward_center: float = opt(0.0, "reward: weight of the squared sum of both rewards, which centres them", ge=0)
    # Distillation from a frozen teacher.
    teacher: str = opt("", "distill: Hugging Face or run folder of the teacher")
    divergence: str = opt(
        "forward",
        "distill: KL(teacher ‖ student) (forward), KL(student ‖ teacher) (reverse), or from their mixture (jsd)",
        choices=("forward", "reverse", "jsd"),
    )
    jsd_beta: float = opt(0.5, "distill: weight of the teacher in the mixture of jsd", gt=0, lt=1)
    on_policy: bool = opt(False, "distill: learn from answers that the student samples, not from those of data.path")
    # Online methods: rounds of prompts, sampled answers, rewards, and optimizer steps on data.global_batch answers.
    rewards: list[str] = opt([], "online: reward functions: a built-in name, FILE.py:FUNCTION or MODULE:FUNCTION")
    reward_weights: list[float] = opt([], "online: a weight for each of them (empty: 1 each)")
    prompts: int = opt(32, "online: prompts of a round", ge=1)
    samples: int = opt(8, "online: answers to each prompt", ge=1)
    epochs: int = opt(1, "online: passes over the answers of a round", ge=1)
    max_tokens: int = opt(256, "online: longest answer, in tokens", ge=1)
    temperature: float = opt(1.0, "online, distill: of sampling, and of the probabilities in the loss", gt=0)
    top_p: float = opt(
        1.0, "online: sample from the likeliest tokens of this probability (biases the loss)", gt=0, le=1
    )
    top_k: int = opt(0, "online: sample from so many of the likeliest tokens (0: from all; biases the loss)", ge=0)
    clip: float = opt(0.2, "online: bound of the probability ratio below, 1 − clip", gt=0, lt=1)
    clip_high: float = opt(-1.0, "online: bound above, 1 + clip_high (-1: as clip; dapo: 0.28)", ge=-1)
    kl: str = opt("k3", "online: estimator of the KL divergence from the reference", choices=("k1", "k2", "k3"))
    importance_cap: float = opt(
        2.0, "online: cap of the weights that correct for the sampler's numerics and older weights (0: off)", ge=0
    )
    overlong_buffer: int = opt(
        -1,
        "online: tokens before max_tokens over which a reward falls by 1 (-1: a fifth of it for dapo, else 0)",
        ge=-1,
    )
    dynamic_sampling: int = opt(
        -1,
        "online: further draws of prompts for those whose answers have equal rewards (-1: dapo 3, else 0)",
        ge=-1,
    )
    kl_stop: float = opt(0.0, "online: end the run where the KL divergence of an answer exceeds this (0: never)", ge=0)
    held_out_stop: int = opt(
        0,
        "online: end the run where the reward of held-out prompts has not risen for so many evaluations, while that of "
        "the prompts that are trained on has (0: never)",
        ge=0,
    )
    reward_model: str = opt(
        "",
        "online: folder of a reward model, whose value at the last token joins the rewards (with lora.rank it may be "
        "an adapter over the policy's base)",
    )
    # PPO: a critic estimates the value of every token.
    critic: str = opt(
        "",
        "ppo: folder that the critic starts from (empty: align.reward_model, else checkpoint.init; with lora.rank "
        "it is a further adapter over the policy's base, unless this names a whole model)",
    )
    critic_head: str = opt("zeros", "ppo: a new scalar head of the critic", choices=("zeros", "normal"))
    critic_lr: float = opt(0.0, "ppo: peak learning rate of the critic (0: ten times optim.lr)", ge=0)
    gamma: float = opt(1.0, "ppo: discount of later rewards", ge=0, le=1)
    lam: float = opt(0.95, "ppo: λ of generalised advantage estimation", ge=0, le=1)
    value_clip: float = opt(0.2, "ppo: most that a value may move from the old one in the loss (0: not clipped)", ge=0)
    whiten_rewards: bool = opt(False, "ppo: scale the rewards of a round to a variance of 1; their mean stays")
    whiten_advantages: bool = opt(True, "ppo: scale and shift the advantages of a round to a variance of 1 and mean 0")
    missing_eos_penalty: float = opt(1.0, "ppo: taken off the score of an answer without end-of-text", ge=0)
    kl_target: float = opt(6.0, "ppo: KL divergence of an answer that align.beta is adapted to (0: it stays)", ge=0)
    kl_horizon: int = opt(10_000, "ppo: answers over which align.beta adapts by a fifth at most", ge=1)
    # Several turns: an environment answers the policy's turns with observations, which are not trained on.
    environment: str = opt(
        "", "online: a built-in environment (python, file_edit), FILE.py:CLASS or MODULE:CLASS (empty: one turn)"
    )
    max_turns: int = opt(8, "online: turns of an episode at most; align.max_tokens is for all, observations too", ge=1)
    partial_rollouts: float = opt(
        0.0,
        "online: further prompts in flight, as a share of align.prompts, so that a round ends without its longest "
        "answers: they go on in the next one (0: it waits for all)",
        ge=0,
    )
    rollout_ranks: int = opt(
        0, "online: ranks beside the layout's that only sample, each with an engine (0: the layout's ranks do)", ge=0
    )
    max_staleness: int = opt(
        1, "online: rounds by which the weights of rollout ranks are behind those that are trained (0: none)", ge=0
    )
    engine_tp: int = opt(1, "online: ranks that are one engine: each has a tensor-parallel shard of it", ge=1)
    engine_memory: float = opt(
        0.4, "online: part of a GPU's memory in use while the engine answers, cache included", gt=0, lt=1
    )

    offload: str = opt(
        "none",
        "online: 'resting' keeps models and optimizer states in host memory while a phase does not use them",
        choices=("none", "resting"),
    )

    def check(self) -> None:
        if -1 < self.beta < 0 or (self.beta == 0 and self.method in DEFAULT_BETA and self.method != "ppo"):
            raise SpecError(f"align.beta = {self.beta:g} is out of range: more than 0, or -1 for the method's default")
        if self.beta < 0:
            self.derive("beta", DEFAULT_BETA.get(self.method, 0.0))
        if self.clip_high < 0:
            self.derive("clip_high", DAPO_CLIP_HIGH if self.method == "dapo" else self.clip)
        if self.dynamic_sampling < 0:
            self.derive("dynamic_sampling", 3 if self.method == "dapo" else 0)
        if self.overlong_buffer < 0:
            self.derive("overlong_buffer", self.max_tokens // 5 if self.method == "dapo" else 0)
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise SpecError(
                f"align.reward_weights has {len(self.reward_weights)} numbers for {len(self.rewards)} align.rewards; "
                "give one for each, or none"
            )

    @property
    def online(self) -> bool:
        """Whether the policy samples the answers that it learns from."""
        return self.method in ONLINE_METHODS or (self.method == "distill" and self.on_policy)

    @property
    def needs_reference(self) -> bool:
        return self.method in REFERENCE_METHODS or (self.method in KL_METHODS and self.beta > 0)

    def updates(self, global_batch: int) -> int:
        """Optimizer steps of a round."""
        return self.epochs * self.answers // global_batch

    @property
    def answers(self) -> int:
        """Answers of a round that are trained on: best-of-n keeps one for each prompt."""
        return self.prompts if self.method == "best_of_n" else self.prompts * self.samples


DEFAULTS = AlignSpec()


def check_align(run: RunSpec) -> None:
    """Derive data.kind, and refuse layouts that a method does not support."""
    method = run.align.method
    check_method_keys(run.align)
    kind = PROMPTS if run.align.online else METHOD_DATA.get(method, "tokens")
    if run.data.kind == "auto":
        run.derive("data", run.data.with_derived("kind", kind))
    elif run.data.kind != kind:
        raise SpecError(f"data.kind = {run.data.kind!r}: {named(run.align)} needs {kind!r}; leave data.kind out")
    if not method:
        if run.model.scalar_head:
            raise SpecError("model.scalar_head = true is a reward model: train it with align.method = 'reward'")
        check_offline(run)
        return
    if method == "reward" and not run.model.scalar_head:
        run.derive("model", run.model.replace(scalar_head=True))
    if method == "distill" and not run.align.teacher:
        raise SpecError("align.method = 'distill' needs a teacher: align.teacher=FOLDER")
    if run.align.online:
        check_rounds(run)
    else:
        check_offline(run)
    layout = run.parallel
    if layout.engine == "deepspeed":
        raise SpecError(f"align.method = {method!r} needs parallel.engine = 'native'")
    if method == "kto" and run.data.global_batch < 2:
        raise SpecError("data.global_batch = 1: kto compares prompts with each other's answers; use at least 2")
    if run.data.mix:
        raise SpecError("data.mix is of prepared tokens: post-training reads one file, data.path")
    if method != "sft":
        for axis in ("pp", "cp"):
            if getattr(layout, axis) > 1:
                raise SpecError(
                    f"parallel.{axis} = {getattr(layout, axis)}: align.method = {method!r} supports data, tensor and "
                    f"expert parallelism; use parallel.{axis} = 1"
                )


def check_method_keys(align: AlignSpec) -> None:
    """Options of other methods have their defaults."""
    for key in (*METHOD_KEYS, *SAMPLING_KEYS):
        used = align.method in METHOD_KEYS[key] if key in METHOD_KEYS else align.online
        if not used and getattr(align, key) != getattr(DEFAULTS, key):
            of = METHOD_KEYS.get(key, (*ONLINE_METHODS, "distill with align.on_policy"))
            raise SpecError(f"align.{key} is of {', '.join(of)}: {named(align)} does not use it")


def named(align: AlignSpec) -> str:
    return f"align.method = {align.method!r}" if align.method else "pretraining (align.method is empty)"


def check_offline(run: RunSpec) -> None:
    """Of pretraining and offline methods: there are no rounds."""
    align, what = run.align, named(run.align)
    if align.rollout_ranks:
        raise SpecError(f"align.rollout_ranks = {align.rollout_ranks}: {what} samples no answers")
    if align.offload != "none":
        raise SpecError(f"align.offload = {align.offload!r}: {what} has no phases to rest in")


def check_rounds(run: RunSpec) -> None:
    """Of online methods: a round is a whole number of optimizer steps, and its answers fit into rows."""
    align, data = run.align, run.data
    if align.offload != "none" and run.parallel.offload != "none":
        raise SpecError(
            f"align.offload = {align.offload!r} does not combine with parallel.offload = {run.parallel.offload!r}: "
            "states are in host memory all the time then; use one of them"
        )
    check_engine_tp(run)
    check_rollout_ranks(run)
    check_stale_tokens(run)
    check_remote(run)
    if run.parallel.strategy == "fsdp1" or run.parallel.offload == "full":
        raise SpecError(f"align.method = {align.method!r} hands weights to an engine: use fsdp2, ddp or zero")
    rewarded = align.rewards or align.reward_model or align.environment
    if align.method != "distill" and not rewarded:
        others = "align.reward_model=FOLDER or align.environment=python"
        raise SpecError(f"align.method = {align.method!r} needs rewards, e.g. align.rewards='[\"exact\"]', {others}")
    if align.kl_stop and not align.needs_reference:
        raise SpecError("align.kl_stop needs a reference to compare with: set align.beta to more than 0")
    if align.held_out_stop and not run.log.eval_every:
        raise SpecError("align.held_out_stop compares rewards of evaluations: set log.eval_every")
    if align.samples < 2 and align.method not in ("ppo", "distill"):
        raise SpecError(
            f"align.samples = {align.samples}: {align.method} compares the answers to a prompt; use 2 or more"
        )
    if align.dynamic_sampling and (align.method == "distill" or align.samples < 2):
        without = (
            "distill has no rewards" if align.method == "distill" else "one answer to a prompt (align.samples = 1)"
        )
        raise SpecError(
            f"align.dynamic_sampling = {align.dynamic_sampling} compares the rewards of a prompt's answers: {without}; "
            "use align.dynamic_sampling=0"
        )
    if align.max_tokens >= data.seq:
        context = run.model.context
        raising = f", or raise data.seq up to model.context = {context}" if data.seq < context else ""
        tight = f"align.max_tokens = {align.max_tokens} leaves no room for a prompt in data.seq = {data.seq}"
        raise SpecError(f"{tight}: lower it{raising}")
    if align.answers % data.global_batch:
        raise SpecError(
            f"a round has {align.answers} answers (align.prompts × align.samples), not a multiple of "
            f"data.global_batch = {data.global_batch}"
        )


def check_engine_tp(run: RunSpec) -> None:
    """The ranks are a whole number of engines, and those of one can share its layers."""
    tp, world = run.align.engine_tp, run.sampling_ranks
    if world % tp:
        fitting = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
        of = "align.rollout_ranks" if run.align.rollout_ranks else "ranks of the layout"
        raise SpecError(f"align.engine_tp = {tp} does not divide the {world} {of}; use {fitting}")
    if found := indivisible(run.model, "align.engine_tp", tp):
        raise SpecError(found[0])


def check_rollout_ranks(run: RunSpec) -> None:
    align = run.align
    if not align.rollout_ranks:
        return
    if run.fault.elastic:
        raise SpecError("fault.elastic = true: align.rollout_ranks needs all ranks; use fault.elastic=false")


def check_stale_tokens(run: RunSpec) -> None:
    """Tokens of older weights need importance weights."""
    align = run.align
    for key in stale_keys(align):
        if align.method == "rloo":
            raise SpecError(f"align.method = 'rloo' has no importance weights for stale answers; use align.{key}=0")
        if not align.importance_cap and align.method not in ("best_of_n", "distill"):
            raise SpecError(
                "align.importance_cap = 0: answers of older weights need importance weights; use the default of 2, or "
                f"align.{key}=0"
            )
    for key in ("environment", "rollout_ranks"):
        if align.partial_rollouts and getattr(align, key):
            raise SpecError(f"align.partial_rollouts cannot be combined with align.{key}: use one of them")


def check_remote(run: RunSpec) -> None:
    """Answers that a checkpoint goes on with are in the run folder (`rollouts/`), and are not copied."""
    for key in stale_keys(run.align) if run.checkpoint.remote else ():
        raise SpecError(f"checkpoint.remote does not copy the answers that a checkpoint needs; use align.{key}=0")


def stale_keys(align: AlignSpec) -> list[str]:
    """Those with which older weights have sampled a round's answers, or parts of them."""
    keys = {"max_staleness": align.rollout_ranks and align.max_staleness, "partial_rollouts": align.partial_rollouts}
    return [key for key, value in keys.items() if value]
