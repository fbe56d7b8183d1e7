"""What of a trainer goes into a checkpoint, and how it is taken up again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import checkpoint
from ..checkpoint.async_save import Background, Ended
from ..checkpoint.format.folders import set_aside
from ..checkpoint.format.manifest import Manifest, refusal, vouched
from ..checkpoint.format.remote_copies import Copied, Copies
from ..checkpoint.format.validation import DamagedError
from ..checkpoint.rank_errors import first_reason
from ..parallel.initial_weights import is_hf
from ..parallel.world import collective_error, is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..record import RunFolder
from ..spec import CheckpointError, DataError, LMWorksError, SpecError
from ..spec.resumed import refused_changes
from .health.finite import first_bad, tensors_of
from .resume_metadata import wrong_meta
from .rng import rng_state, set_rng_state, wrong_rng

if TYPE_CHECKING:
    from .trainer import Trainer


class Saving:
    """Saves and loads one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.spec = trainer.spec.checkpoint
        self.root = trainer.folder.checkpoints
        self.keep = checkpoint.Keep(self.spec.keep, self.spec.keep_every)
        self.background: Background | None = None
        self.copies = Copies(self.spec.remote, self.keep) if self.spec.remote and trainer.lead else None
        self.stalled = 0.0  # by the save under way
        self.failed: list[str] = []  # the last saves, in a row

    def save(self, wait: bool) -> float:
        """Save, and with `wait` (or without checkpoint.asynchronous) only return once it is committed.

        Returns the seconds that training stood still.
        """
        began = time.perf_counter()
        state, meta = {**self.trainer.state(), "rng": rng_state()}, self.meta()
        if self.background is None or not self.in_background(self.background, state, meta, wait, began):
            path = checkpoint.save(self.root, self.trainer.step, state, meta, self.keep, self.spec.hash)
            self.saved(Ended(self.trainer.step, path, 0.0, bytes_of(path)), time.perf_counter() - began)
        if wait and self.copies is not None:
            for copied in self.copies.settle():
                self.copied(copied)
        return time.perf_counter() - began

    def meta(self) -> dict[str, Any]:
        """What is no tensor."""
        trainer = self.trainer
        meta = {"cursor": trainer.cursor, "data": trainer.batches.digest, "loss_scale": trainer.loss_scale.state_dict()}
        return meta | {"health": trainer.health.state_dict(), "spec": trainer.spec.to_dict()}

    def in_background(
        self, background: Background, state: dict[str, Any], meta: dict[str, Any], wait: bool, began: float
    ) -> bool:
        """False where it was waited for and failed: then the state is still here to be saved again."""
        self.ended(background.settle())  # one at a time
        run_on_rank_zero(self.refuse_third)
        background.save(self.trainer.step, state, meta)
        self.stalled = time.perf_counter() - began
        if not wait:
            return True
        ended = background.finish()
        self.stalled = time.perf_counter() - began
        self.ended(ended)
        return not run_on_rank_zero(lambda: ended.error if ended else "")

    def settle(self) -> None:
        """Wait for the save under way: a rewind may go back to it, and must find the same ones whatever their speed."""
        if self.background is not None:
            self.ended(self.background.settle())
            run_on_rank_zero(lambda: None)

    def poll(self) -> None:
        """Between steps: hear what became of the save under way."""
        if self.background is not None:
            self.ended(self.background.poll())
        if self.copies is not None:
            self.copied(self.copies.poll())

    def ended(self, ended: Ended | None) -> None:
        """Record it; the lead alone hears anything."""
        if ended is None:
            return
        if not ended.error:
            self.saved(ended, self.stalled)
            return
        self.failed.append(f"cannot save {ended.path}: {ended.error}")
        self.trainer.event("save_failed", ended.step, path=ended.path.name, error=ended.error)
        print(f"{self.failed[-1]}; older checkpoints are as they were", file=sys.stderr, flush=True)

    def refuse_third(self) -> None:
        """A run whose saves fail is not worth its time. One may, two in a row may not."""
        if len(self.failed) > 1:
            raise CheckpointError(f"{self.failed[-1]}; the save before failed too")

    def saved(self, ended: Ended, stalled: float) -> None:
        self.failed = []
        times = {"seconds": round(stalled, 4), "write_s": round(ended.seconds, 4)}
        self.trainer.event("save", ended.step, path=ended.path.name, bytes=ended.bytes, **times)
        if self.copies is not None:
            self.copies.add(ended.path)

    def copied(self, copied: Copied | None) -> None:
        if copied is None:
            return
        fields = {"path": copied.folder.name, "remote": self.spec.remote, "seconds": round(copied.seconds, 4)}
        if not copied.error:
            self.trainer.event("copy", checkpoint.step_of(copied.folder), **fields)
            return
        self.trainer.event("copy_failed", checkpoint.step_of(copied.folder), **fields, error=copied.error)
        print(f"cannot copy {copied.folder} to {self.spec.remote}: {copied.error}", file=sys.stderr, flush=True)

    def close(self, error: Exception | None = None) -> None:
        """End the writers. What is under way is waited for only where every rank can be: not after the loss of one."""
        run_on_all_ranks = isinstance(error, LMWorksError) and error.collective and not error.rank_lost
        if self.background is not None:
            if run_on_all_ranks:
                self.ended(self.background.settle())
            self.background.close()
            self.background = None
        if self.copies is not None:
            self.copies.close()

    def load(self, step: int | None = None) -> None:
        """Take up the newest intact checkpoint (or that of `step`), if there is one. Damaged ones are named."""
        if not self.load_saved(step):
            self.load_start()
        if self.spec.asynchronous and self.background is None:
            state = {**self.trainer.state(), "rng": rng_state()}
            self.background = Background(
                self.root,
                self.keep,
                state,
                self.trainer.device,
                self.spec.hash,
                self.trainer.spec.watch.timeout_s,
            )

    def load_saved(self, step: int | None) -> bool:
        trainer = self.trainer
        state: dict[str, Any] = {**trainer.state(), "rng": None}
        manifest = checkpoint.load(
            self.root,
            state,
            refused=self.refused,
            step=step,
            remote=self.spec.remote,
            check=self.check,
            accept=accept,
        )
        if manifest is None:
            run_on_rank_zero(self.refuse_lost)
            return False
        trainer.take(state)
        set_rng_state(state["rng"])
        trainer.loss_scale.load_state_dict(manifest.meta["loss_scale"])
        trainer.health.load_state_dict(manifest.meta.get("health", {}))
        trainer.step, trainer.cursor = manifest.step, manifest.meta["cursor"]
        return True

    def check(self, manifest: Manifest) -> None:
        """Whether the run may go on from it: what it remembers makes sense, and neither spec nor data are others."""
        trainer, meta = self.trainer, manifest.meta
        if why := wrong_meta(manifest):
            raise DamagedError(why)
        if changes := refused_changes(meta["spec"], trainer.spec):
            raise SpecError(
                f"{trainer.folder.spec_path} has {'; '.join(changes)} in step {manifest.step}: a resumed run cannot "
                f"change that; put it back, or begin a new run with checkpoint.init = '{trainer.folder.path}'"
            )
        if meta["data"] != trainer.batches.digest:
            raise DataError(
                f"{', '.join(trainer.spec.data.sources)} holds other tokens than those this run was trained on; "
                "bring the old data back, or start a new run"
            )

    def refuse_lost(self) -> None:
        """A run that has saved does not begin anew because its checkpoints are out of sight."""
        steps = [event["step"] for event in self.trainer.folder.events() if event["kind"] == "save"]
        if steps:
            raise CheckpointError(
                f"{self.root} has no checkpoint, though step {steps[-1]} was saved there; bring the folder back, "
                "or begin a new run with another --run-dir"
            )

    def load_start(self) -> None:
        """Weights of another run, where checkpoint.init names one; those of a Hugging Face folder are in already."""
        start = self.trainer.spec.checkpoint.init
        if not start or is_hf(Path(start)):
            return
        state = {"model": self.trainer.state()["model"]}
        folder = run_on_all_ranks(lambda: RunFolder.open(start))
        if checkpoint.load(folder.checkpoints, state, refused=self.refused) is None:
            raise collective_error(SpecError(f"checkpoint.init = {start!r} has no checkpoint to start from"))
        self.trainer.take(state)

    def set_aside_later(self) -> None:
        """After a step was chosen to go on from: later ones belong to a line that is given up, and must not be found.

        They are kept, since nobody said that they are bad. Copies of them go when this step has been copied again.
        """
        step, place = self.trainer.step, self.root / f"set-aside-{self.trainer.attempt}"
        steps = run_on_rank_zero(lambda: set_aside(self.root, step, place))
        if not steps or not self.trainer.lead:
            return
        self.trainer.event("set_aside", step, attempt=self.trainer.attempt, steps=steps, path=place.name)
        if not self.trainer.quiet:
            print(f"checkpoints after step {step} are in {place} now: {', '.join(map(str, steps))}", flush=True)
        if self.copies is not None:
            self.copies.add(self.root / f"step-{step:06d}")

    def refused(self, path: Path, reason: str) -> None:
        self.trainer.event("refused", checkpoint.step_of(path), path=path.name, reason=reason)
        print(refusal(path, reason), file=sys.stderr, flush=True)


def accept(state: dict[str, Any]) -> None:
    """Whether a run can go on from what was read: generators that take their state, and nothing that is NaN or Inf."""
    if why := wrong_rng(state["rng"]):
        raise DamagedError(f"its random states are malformed: {why}")
    sections = {key: state[key] for key in ("model", "optim")}
    if found := first_reason(lambda: not_finite(first_bad(tensors_of(sections)))):
        raise DamagedError(found[0])


def not_finite(bad: tuple[str, int] | None) -> str | None:
    return bad and f"{bad[0]} has {bad[1]:,} values that are NaN or Inf"


def bytes_of(folder: Path) -> int:
    return sum(entry["bytes"] for entry in vouched(folder).files.values()) if is_rank_zero() else 0
