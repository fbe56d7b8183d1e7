"""Critic and reward model as further adapters over the policy's base, each with a scalar head of its own: with the
reference, which is the base without an adapter, four models take the memory of one.

A reward model is one where `align.method = "reward"` has trained it with LoRA over the same base, whose digest is in
its checkpoints. The critic is one wherever the policy has adapters, unless align.critic names a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.format.survey import locate
from ..model.gpt import initial_weight
from ..model.peft import CONFIG, linear_name, read_peft
from ..parallel.initial_weights import Source
from ..plan.passes import critic_adapter, reward_adapter
from ..spec import LoraSpec, ModelSpec, RunSpec, SpecError
from ..spec.components import SCORE
from ..spec.lora import (
    ADAPTERS,
    CRITIC_ADAPTER,
    DEFAULT_ADAPTER,
    REWARD_ADAPTER,
    SCALAR_HEADS,
    ScalarAdapter,
    adapter_of,
)
from ..train.base_model import Base, find_base, trained_parameters
from ..train.saved_weights import find, reader, spec_of

# Keys of a model that do not change what an adapter means.
FREE = ("preset", "attention", "scalar_head", "tie_embeddings", "context", "balance_loss", "balance_bias", "capacity")


@dataclass(frozen=True)
class SavedAdapter:
    """A reward model's."""

    lora: LoraSpec
    weight: Callable[[str], Tensor]  # by its name in the run that trained it
    head: Tensor  # (1, hidden)


@dataclass(frozen=True)
class ScalarAdapters:
    """Those of a run, and what the saved ones start from."""

    adapters: tuple[ScalarAdapter, ...] = ()
    saved: tuple[tuple[str, SavedAdapter], ...] = ()  # by the name of the adapter

    def source(self, spec: RunSpec, weights: Source) -> Source:
        """`weights`, with these adapters: saved ones, or a new one whose head is zero or drawn at random."""
        saved = dict(self.saved)

        def weight(name: str, shape: torch.Size) -> Tensor:
            adapter, is_head = adapter_of(name), name.startswith(f"{SCALAR_HEADS}.")
            if found := saved.get(adapter):
                there = name.replace(f".{ADAPTERS}.{adapter}.", f".{ADAPTERS}.{DEFAULT_ADAPTER}.")
                return found.head if is_head else found.weight(there)
            if not is_head:
                return weights(name, shape)
            if spec.align.critic_head == "zeros":
                return torch.zeros(shape)
            return initial_weight(spec.model.replace(scalar_head=True), spec.seed, SCORE, shape)

        return weight


def find_scalar_adapters(spec: RunSpec, base: Base | None) -> ScalarAdapters:
    """What a spec asks for; adapters over another base than `base` are refused."""
    adapters: list[ScalarAdapter] = []
    saved: dict[str, SavedAdapter] = {}
    align = spec.align
    if align.online and reward_adapter(spec) is not None:
        saved[REWARD_ADAPTER] = read_saved(align.reward_model, "align.reward_model", spec, base)
        adapters.append(ScalarAdapter(REWARD_ADAPTER, saved[REWARD_ADAPTER].lora, trained=False))
    if (lora := critic_adapter(spec)) is not None:
        start = read_saved(align.critic, "align.critic", spec, base) if align.critic else saved.get(REWARD_ADAPTER)
        if start is not None:
            saved[CRITIC_ADAPTER] = start
        adapters.append(ScalarAdapter(CRITIC_ADAPTER, lora if start is None else start.lora, trained=True))
    return ScalarAdapters(tuple(adapters), tuple(saved.items()))


# --- saved adapters -------------------------------------------------------------------------------------------


def read_saved(folder: str, key: str, spec: RunSpec, base: Base | None) -> SavedAdapter:
    assert base is not None  # the policy has adapters
    path, where = Path(folder), f"{key} = {folder!r}"
    found = read_peft_folder(path, where, spec, base) if (path / CONFIG).is_file() else None
    return found or read_run(path, where, spec, base)


def read_run(path: Path, where: str, spec: RunSpec, base: Base) -> SavedAdapter:
    """Of the newest intact checkpoint of a run."""
    folder, manifest = find(locate(path), None)
    there = spec_of(folder, manifest)
    if not there.model.scalar_head:
        raise SpecError(f"{where} is no reward model: train one with align.method = 'reward'")
    check_network(there.model, spec.model, where)
    if manifest.meta.get("base") != base.digest or there.lora.base != spec.lora.base:
        raise other_base(where, spec, there.checkpoint.init or f"the weights of seed {there.seed}")
    own = trained_parameters(there)
    read = reader(folder, manifest, own)
    return SavedAdapter(there.lora, read, read(SCORE))


def read_peft_folder(path: Path, where: str, spec: RunSpec, base: Base) -> SavedAdapter:
    """PEFT names the base by its folder or repository: that folder has to hold the weights that the policy is over."""
    found = read_peft(path, spec.model.replace(scalar_head=True))
    if found.score is None:
        raise SpecError(f"{where} has no scalar head: train one with align.method = 'reward'")
    init = str(json.loads((path / CONFIG).read_text()).get("base_model_name_or_path") or "")
    same = bool(init) and Path(init).absolute() == Path(spec.checkpoint.init or ".").absolute()
    if not same:
        there = spec.replace(checkpoint=spec.checkpoint.replace(init=init)) if Path(init).is_dir() and init else None
        if there is None or find_base(there).digest != base.digest:
            raise other_base(where, spec, init or "no base that it names")
    layers, targets = found.layers, sorted({linear_name(name) for name in found.layers})
    options = {(layer.rank, layer.scale, layer.magnitude is not None) for layer in layers.values()}
    if len(options) > 1 or len(layers) != len(targets) * spec.model.layers:
        raise SpecError(f"{where} has other ranks, scales or targets in some layers; one for all of them is supported")
    rank, scale, dora = options.pop()
    return SavedAdapter(LoraSpec(rank=rank, alpha=scale * rank, targets=targets, dora=dora), found.weight, found.score)


def check_network(there: ModelSpec, here: ModelSpec, where: str) -> None:
    for key in (field.name for field in fields(here) if field.name not in FREE):
        if getattr(there, key) != getattr(here, key):
            raise SpecError(
                f"{where} is an adapter over a model with {key} = {getattr(there, key)}, but the policy has "
                f"{getattr(here, key)}: name one over the same base"
            )


def other_base(where: str, spec: RunSpec, there: str) -> SpecError:
    here = f"checkpoint.init = {spec.checkpoint.init!r}" if spec.checkpoint.init else f"seed = {spec.seed}"
    return SpecError(
        f"{where} is an adapter over {there}, which are not the weights of the policy's base, {here}: train it over "
        "them, or make a whole model of it with `lmworks checkpoint export`"
    )
