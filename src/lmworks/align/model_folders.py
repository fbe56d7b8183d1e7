"""The models that a run reads beside the one it trains: reference, reward model, critic, teacher.

Their folders are checked before any model is built. A digest of what they hold is in checkpoints: a resumed run goes on
with the same models, or is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import committed
from ..checkpoint.format.survey import locate
from ..data.chat_tokenizer import load_model_tokenizer
from ..data.tokenizer import FileTokenizer, Tokenizer
from ..model.hf import CONFIG, weight_files
from ..model.peft import CONFIG as ADAPTER_CONFIG
from ..model.peft import WEIGHTS as ADAPTER_WEIGHTS
from ..model.reward_stats import STATS
from ..parallel.initial_weights import is_hf
from ..plan.passes import CRITIC, REFERENCE, REWARD, TEACHER, critic_adapter, reference_is_base, reward_adapter
from ..spec import LMWorksError, RunSpec, SpecError
from ..train.base_model import Base, digest_of_checkpoint, digest_of_files
from ..train.checkpoint_manager import FrozenModel
from ..train.saved_weights import find
from .frozen_model import model_of


@dataclass(frozen=True)
class ModelFolder:
    role: str
    key: str  # of the spec
    folder: str
    scalar_head: bool | None  # whether it must have one; None: with or without
    adapter: bool = False  # over the policy's base, not a whole model


def model_folders(spec: RunSpec) -> list[ModelFolder]:
    """Those that a spec names; the reference may be the model that the run starts from."""
    align, found = spec.align, []
    if align.needs_reference and not reference_is_base(spec) and (align.reference or spec.checkpoint.init):
        key = "align.reference" if align.reference else "checkpoint.init"
        found.append(ModelFolder(REFERENCE, key, align.reference or spec.checkpoint.init, False))
    if align.online and align.reward_model:
        is_adapter = reward_adapter(spec) is not None
        found.append(ModelFolder(REWARD, "align.reward_model", align.reward_model, True, is_adapter))
    if align.method == "ppo" and align.critic:
        found.append(ModelFolder(CRITIC, "align.critic", align.critic, None, critic_adapter(spec) is not None))
    if align.method == "distill":
        found.append(ModelFolder(TEACHER, "align.teacher", align.teacher, False))
    return found


# --- checks before the start -----------------------------------------------------------------------------------


def check_model_folders(spec: RunSpec) -> None:
    """By their configs alone: no folder, an adapter where a whole model is needed, a wrong head, a short context."""
    for one in model_folders(spec):
        if not one.adapter:  # adapters are compared with their base when they are read
            check_whole_model(spec, one)


def check_whole_model(spec: RunSpec, one: ModelFolder) -> None:
    model, where = model_of(one.folder, one.key), f"{one.key} = {one.folder!r}"
    if one.scalar_head is True and not model.scalar_head:
        raise SpecError(f"{where} is no reward model: train one with align.method = 'reward'")
    if one.scalar_head is False and model.scalar_head:
        raise SpecError(f"{where} is a reward model: it has no probabilities of tokens; name a language model")
    if spec.data.seq > model.context:
        raise SpecError(f"{where} has a context of {model.context} tokens, fewer than data.seq = {spec.data.seq}")
    if not is_hf(Path(one.folder)) and not committed(Path(one.folder) / "checkpoints"):
        raise SpecError(f"{where} is a run without a checkpoint: name one that has been saved")


def check_tokens(spec: RunSpec, tokenizer: Tokenizer) -> None:
    """Refuse models whose tokens are not those of the model that is trained. Rows that pad a vocabulary may differ."""
    for one in model_folders(spec):
        if one.adapter or one.key == "checkpoint.init":
            continue
        model, own = model_of(one.folder, one.key), spec.model
        try:
            theirs = load_model_tokenizer(one.folder)
        except LMWorksError:  # it has none
            theirs = None
        different = model.vocab != own.vocab
        if theirs is not None:
            different = not same_tokens(tokenizer, theirs) or min(model.vocab, own.vocab) < tokenizer.vocab_size
        if different:
            raise SpecError(
                f"{one.key} = {one.folder!r} has other tokens than the {'student' if one.role == TEACHER else 'policy'}"
                f" (vocabularies of {model.vocab:,} and {own.vocab:,}): name a model with the same tokenizer"
            )


def same_tokens(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Whether each of our tokens has the same number there; theirs may have more."""
    if isinstance(ours, FileTokenizer) and isinstance(theirs, FileTokenizer):
        numbers = theirs.inner.get_vocab(with_added_tokens=True)
        own = ours.inner.get_vocab(with_added_tokens=True)
        return all(numbers.get(token) == number for token, number in own.items())
    return type(ours) is type(theirs)


# --- digests ---------------------------------------------------------------------------------------------------


def digest_models(spec: RunSpec, base: Base | None) -> dict[str, FrozenModel]:
    """By role. Every byte is read once: on one rank. `base`: of the policy's adapters, which is the reference then."""
    found = {
        one.role: FrozenModel(one.key, one.folder, digest_of_folder(Path(one.folder))) for one in model_folders(spec)
    }
    if spec.align.needs_reference and REFERENCE not in found:
        digest = f"seed {spec.seed}" if base is None else base.digest
        found[REFERENCE] = FrozenModel("align.reference", "", digest)
    return found


def digest_of_folder(folder: Path) -> str:
    """Of a model's config and weights, with the statistics of a reward model."""
    stats = [folder / STATS] if (folder / STATS).is_file() else []
    if (folder / "spec.toml").is_file():
        weights = digest_of_checkpoint(find(locate(folder), None)[1])
        return hashlib.sha256(f"{weights} {digest_of_files(stats)}".encode()).hexdigest() if stats else weights
    if (folder / ADAPTER_CONFIG).is_file():
        return digest_of_files([folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS, *stats])
    return digest_of_files([folder / CONFIG, *weight_files(folder), *stats])
