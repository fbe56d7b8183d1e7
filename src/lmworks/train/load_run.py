"""A trained model from its run folder, ready to use."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import checkpoint
from ..checkpoint.format.manifest import Manifest, refusal_text
from ..data import Tokenizer
from ..data.chat_tokenizer import load_model_tokenizer
from ..model import GPT
from ..record import RunFolder
from ..spec import CheckpointError, RunSpec, SpecError
from ..spec.resumed import refused_changes
from .device import pick_device


@dataclass(frozen=True)
class TrainedModel:
    model: GPT
    tokenizer: Tokenizer
    spec: RunSpec
    step: int


class RefusalLog:
    """Prints which checkpoints were refused, and what is used instead. No event: a reader does not write to a run."""

    def __init__(self) -> None:
        self.any = False

    def __call__(self, folder: Path, reason: str) -> None:
        self.any = True
        print(refusal_text(folder, reason), file=sys.stderr, flush=True)

    def report_fallback(self, step: int) -> None:
        if self.any:
            print(f"using step {step} instead", file=sys.stderr, flush=True)


def load_trained(run_dir: str | Path, step: int | None = None) -> TrainedModel:
    """The weights of the newest intact checkpoint, or of `step`."""
    folder = RunFolder.open(run_dir)
    spec = folder.spec()
    with torch.device("meta"):
        model = GPT(spec.model)
    model.to_empty(device=pick_device(spec.cluster))
    refused = RefusalLog()

    def check(manifest: Manifest) -> None:
        if changes := refused_changes(manifest.meta.get("spec", {}), spec, "model."):
            raise SpecError(f"{folder.spec_path} has {'; '.join(changes)} in step {manifest.step}; put it back")

    state = {"model": model.state_dict()}
    manifest = checkpoint.load(folder.checkpoints, state, step=step, refused=refused, check=check)
    if manifest is None:
        raise CheckpointError(f"{folder.path} has no checkpoint yet; train it with: lmworks resume {folder.path}")
    refused.report_fallback(manifest.step)
    tokenizer = load_model_tokenizer(folder.path)
    return TrainedModel(model.eval(), tokenizer, spec, manifest.step)
