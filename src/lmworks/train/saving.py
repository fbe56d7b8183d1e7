"""What of a trainer goes into a checkpoint, and how it is taken up again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..parallel.weights import is_hf
from ..parallel.world import from_lead, known, together
from ..record import RunFolder
from ..spec import DataError, SpecError
from . import checkpoint
from .rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from .trainer import Trainer


class Saving:
    """Saves and loads one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.root = trainer.folder.checkpoints

    def save(self) -> float:
        """Commit a checkpoint; returns the seconds it took."""
        trainer, began = self.trainer, time.perf_counter()
        state = {**trainer.state(), "rng": rng_state()}
        meta = {"cursor": trainer.cursor, "data": trainer.batches.digest, "loss_scale": trainer.loss_scale.state_dict()}
        meta |= {"health": trainer.health.state_dict(), "spec": trainer.spec.to_dict()}
        path = checkpoint.save(self.root, trainer.step, state, meta, trainer.spec.checkpoint.keep)
        seconds = time.perf_counter() - began
        trainer.event("save", path=path.name, seconds=round(seconds, 4))
        return seconds

    def load(self, step: int | None = None) -> None:
        """Take up the newest intact checkpoint (or that of `step`), if there is one. Damaged ones are named."""
        trainer = self.trainer
        if not from_lead(self.root.exists):
            self.load_start()
            return
        state = {**trainer.state(), "rng": None}
        manifest = checkpoint.load(self.root, state, refused=self.refused, step=step)
        if manifest is None:
            self.load_start()
            return
        if manifest.meta["data"] != trainer.batches.digest:
            raise known(
                DataError(
                    f"{', '.join(trainer.spec.data.sources)} holds other tokens than those this run was trained on; "
                    "bring the old data back, or start a new run"
                )
            )
        trainer.take(state)
        set_rng_state(state["rng"])
        trainer.loss_scale.load_state_dict(manifest.meta["loss_scale"])
        trainer.health.load_state_dict(manifest.meta.get("health", {}))
        trainer.step, trainer.cursor = manifest.step, manifest.meta["cursor"]

    def load_start(self) -> None:
        """Weights of another run, where checkpoint.init names one; those of a Hugging Face folder are in already."""
        start = self.trainer.spec.checkpoint.init
        if not start or is_hf(Path(start)):
            return
        state = {"model": self.trainer.state()["model"]}
        folder = together(lambda: RunFolder.open(start))
        if checkpoint.load(folder.checkpoints, state, refused=self.refused) is None:
            raise known(SpecError(f"checkpoint.init = {start!r} has no checkpoint to start from"))
        self.trainer.take(state)

    def refused(self, path: Path, reason: str) -> None:
        self.trainer.event("refused", checkpoint.step_of(path), path=path.name, reason=reason)
        print(f"refused a damaged checkpoint: {reason}", file=sys.stderr, flush=True)
