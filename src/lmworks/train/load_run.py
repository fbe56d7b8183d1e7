"""A trained model from its run folder, ready to use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .. import checkpoint
from ..checkpoint.format.manifest import Manifest
from ..data import Tokenizer
from ..data.chat_tokenizer import load_model_tokenizer
from ..model import GPT
from ..model.lora import add_adapters, merge_adapter
from ..parallel.initial_weights import as_stored
from ..record import RunFolder
from ..spec import CheckpointError, RunSpec, SpecError, components
from ..spec.resumed import refused_changes
from .base_model import base_weights, check_base, find_base
from .device import pick_device
from .saved_weights import RefusalLog


@dataclass(frozen=True)
class TrainedModel:
    model: GPT
    tokenizer: Tokenizer
    spec: RunSpec
    step: int


def load_trained(run_dir: str | Path, step: int | None = None) -> TrainedModel:
    """The weights of the newest intact checkpoint, or of `step`."""
    folder = RunFolder.open(run_dir)
    spec = folder.spec()
    with torch.device("meta"):
        model = GPT(spec.model)
        if spec.adapters:
            add_adapters(model, spec.lora, spec.adapters)
    model.to_empty(device=pick_device(spec.cluster))
    refused = RefusalLog()

    def check(manifest: Manifest) -> None:
        if changes := refused_changes(manifest.meta.get("spec", {}), spec, "model."):
            raise SpecError(f"{folder.spec_path} has {'; '.join(changes)} in step {manifest.step}; put it back")

    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state = {"model": {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}}
    manifest = checkpoint.load(folder.checkpoints, state, step=step, refused=refused, check=check)
    if manifest is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet; train it with: lmworks resume {folder.path}")
    refused.report_fallback(manifest.step)
    if spec.adapters:
        fill_base(model, spec, manifest, str(folder.path))
        merge_adapter(model, spec.adapters[0])
    if spec.stages:  # which differ in rotary embedding: that of the stage that this checkpoint is of
        spec = spec.after(manifest.step - 1)
        model.spec = spec.model
    tokenizer = load_model_tokenizer(folder.path)
    return TrainedModel(model.eval(), tokenizer, spec, manifest.step)


@torch.no_grad()
def fill_base(model: GPT, spec: RunSpec, manifest: Manifest, where: str) -> None:
    """The frozen weights, if they are those that the adapters were trained over."""
    base = find_base(spec)
    check_base(spec, base, manifest.meta.get("base"), where)
    weight = base_weights(spec, base)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.copy_(as_stored(spec, components.find(spec.model, name), weight(name, parameter.shape)))
