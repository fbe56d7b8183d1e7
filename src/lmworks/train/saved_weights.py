"""The weights of a checkpoint, one whole tensor at a time, whatever layout has saved it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .. import checkpoint
from ..checkpoint.format.digest import read_all
from ..checkpoint.format.index import SavedTensor, read_index
from ..checkpoint.format.manifest import Manifest, refusal_text
from ..checkpoint.format.survey import CheckpointLocation
from ..checkpoint.save_plan import as_bytes
from ..model.tensor_files import TORCH_DTYPES
from ..record import RunFolder
from ..spec import CheckpointError, RunSpec
from ..spec.components import SCORE


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


def find(place: CheckpointLocation, step: int | None) -> tuple[Path, Manifest]:
    """Every byte of a checkpoint is verified before the first is used; a damaged one is named, and the next taken."""
    refused = RefusalLog()
    found = checkpoint.find(place.root, refused, place.step if step is None else step)
    if found is None:
        raise CheckpointError(f"{place.name} has no committed checkpoint")
    refused.report_fallback(found[1].step)
    return found


def spec_of(folder: Path, manifest: Manifest) -> RunSpec:
    """As it was when the checkpoint was saved: all that is left of it where the run folder is elsewhere."""
    if "spec" not in manifest.meta:
        raise CheckpointError(f"{folder} does not describe its model; use the run folder instead")
    return RunSpec.from_dict(manifest.meta["spec"])


def reader(folder: Path, manifest: Manifest, parameters: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Gives each parameter of the model by name. One that is missing or has another shape is refused here and now."""
    index = read_index(folder, manifest)
    wanted = {f"model.{name}" for name in parameters}
    if surplus := [name for name in index if name.startswith("model.") and name not in wanted]:
        raise CheckpointError(f"{folder} has {surplus[0]}, which the run's model does not have")
    for name, parameter in parameters.items():
        saved = index.get(f"model.{name}")
        if saved is None:
            raise CheckpointError(f"{folder} does not have model.{name}, which the run's model has")
        if saved.shape != tuple(parameter.shape):
            here = tuple(parameter.shape)
            raise CheckpointError(f"{folder}: model.{name} is {saved.shape} there, but {here} in the run's model")
    return lambda name: read_tensor(folder, index[f"model.{name}"]).to(parameters[name].dtype)


def read_tensor(folder: Path, saved: SavedTensor) -> Tensor:
    """One whole tensor, from the pieces of as many ranks as it was cut over."""
    whole = torch.empty(saved.shape, dtype=TORCH_DTYPES[saved.dtype])
    for piece in saved.pieces:
        target = whole[
            tuple(slice(first, first + size) for first, size in zip(piece.offsets, piece.sizes, strict=True))
        ]
        buffer = target if target.is_contiguous() else torch.empty(piece.sizes, dtype=whole.dtype)
        try:
            descriptor = os.open(folder / piece.file, os.O_RDONLY)
            try:
                read_all(descriptor, [as_bytes(buffer)], piece.start)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "it ends before its end"
            raise CheckpointError(f"cannot read {folder / piece.file}: {reason}") from None
        if buffer is not target:
            target.copy_(buffer)
    return whole


def load_weights(folder: RunFolder, weights: dict[str, Tensor], refused: Callable[[Path, str], None]) -> bool:
    """Fill weights, by name, from the newest intact checkpoint of a run; false without one.

    A reward model or critic may start from a language model: it drops that one's head, and keeps its own.
    """
    there = folder.spec().model
    new_head = SCORE in weights and not there.scalar_head
    read = {name: weight for name, weight in weights.items() if not (new_head and name == SCORE)}
    if new_head and not there.tie_embeddings:
        read["head.weight"] = torch.empty(there.vocab, there.hidden)
    return checkpoint.load(folder.checkpoints, {"model": read}, refused=refused) is not None
