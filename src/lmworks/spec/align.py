"""Post-training in a spec: the method with its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .errors import SpecError
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
}
METHODS = tuple(METHOD_DATA)
DEFAULT_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
REFERENCE_METHODS = ("dpo", "ipo", "kto")  # compare the policy with a frozen reference model


@dataclass(frozen=True)
class AlignSpec(Section):
    """Post-training. Log-probabilities, references and rewards are of whole answers unless it says otherwise."""

    section: ClassVar[str] = "align"

    method: str = opt("", "post-training method (empty: pretraining on data.path)", choices=("", *METHODS))
    reference: str = opt(
        "", "dpo, ipo, kto: Hugging Face folder of the reference model (empty: the weights the run starts from)"
    )
    beta: float = opt(
        -1.0,
        "strength of the preference against the reference, orpo's λ, simpo's scale (-1: the method's default)",
        ge=-1,
    )
    label_smoothing: float = opt(0.0, "dpo: share of preferences that are assumed to be wrong", ge=0, lt=0.5)
    simpo_margin: float = opt(1.0, "simpo: target margin γ between the mean log-probabilities", ge=0)
    desirable_weight: float = opt(1.0, "kto: weight of desirable answers", ge=0)
    undesirable_weight: float = opt(1.0, "kto: weight of undesirable answers", ge=0)
    sft_weight: float = opt(0.0, "dpo: weight of the chosen answers' negative log-likelihood, added to the loss", ge=0)
    reward_center: float = opt(0.0, "reward: weight of the squared sum of both rewards, which centres them", ge=0)

    def check(self) -> None:
        if self.beta < 0:
            self.derive("beta", DEFAULT_BETA.get(self.method, 0.0))

    @property
    def needs_reference(self) -> bool:
        return self.method in REFERENCE_METHODS


def check_align(run: RunSpec) -> None:
    """Derive data.kind, and refuse layouts that a method does not support."""
    method, kind = run.align.method, METHOD_DATA.get(run.align.method, "tokens")
    if run.data.kind == "auto":
        run.derive("data", run.data.with_derived("kind", kind))
    elif run.data.kind != kind:
        need = f"align.method = {method!r}" if method else "pretraining (align.method is empty)"
        raise SpecError(f"data.kind = {run.data.kind!r}: {need} needs {kind!r}; leave data.kind out")
    if not method:
        if run.model.scalar_head:
            raise SpecError("model.scalar_head = true is a reward model: train it with align.method = 'reward'")
        return
    if method == "reward" and not run.model.scalar_head:
        run.derive("model", run.model.replace(scalar_head=True))
    layout = run.parallel
    if layout.engine == "deepspeed":
        raise SpecError(f"align.method = {method!r} needs parallel.engine = 'native'")
    if run.data.mix:
        raise SpecError("data.mix is of prepared tokens: post-training reads one file, data.path")
    if method != "sft":
        for axis in ("pp", "cp"):
            if getattr(layout, axis) > 1:
                raise SpecError(
                    f"parallel.{axis} = {getattr(layout, axis)}: align.method = {method!r} supports data, tensor and "
                    f"expert parallelism; use parallel.{axis} = 1"
                )
