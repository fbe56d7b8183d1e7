"""Checkpoints of a run: what is saved, asynchronous saves, resuming."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import checkpoint
from ..checkpoint.async_save import AsyncSaver, SaveResult
from ..checkpoint.format.folders import set_aside
from ..checkpoint.format.manifest import DamagedError, Manifest, is_int, read_committed, refusal_text, short_repr
from ..checkpoint.format.remote import CopyResult, RemoteCopier
from ..checkpoint.load_state import first_failure
from ..parallel.initial_weights import is_hf
from ..parallel.precision import LossScale
from ..parallel.world import collective_error, is_rank_zero, run_on_all_ranks, run_on_rank_zero
from ..record import RunFolder
from ..spec import CheckpointError, DataError, LMWorksError, RunSpec, SpecError
from ..spec.resumed import refused_changes
from .base_model import Base, check_base, fill_buffers
from .health.bad_step import Health, HealthState
from .health.nonfinite import first_nonfinite_tensor, named_tensors
from .rng import rng_state, set_rng_state, wrong_rng
from .saved_weights import load_weights
from .train_state import EventRecorder, Position, TrainState


class MethodState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class FrozenModel:
    """A model that a run reads beside the one it trains: the key that names it, its folder, a digest of its weights."""

    key: str
    folder: str
    digest: str


class CheckpointManager:
    """Saves and loads the state of a run."""

    def __init__(
        self,
        run_spec: RunSpec,
        state: TrainState,
        loss_scale: LossScale,
        health: Health,
        data_digest: str,
        recorder: EventRecorder,
        device: torch.device,
        base: Base | None = None,  # of adapters
    ) -> None:
        self.run_spec, self.spec = run_spec, run_spec.checkpoint
        self.state, self.loss_scale, self.health = state, loss_scale, health
        self.data_digest = data_digest
        self.recorder, self.folder = recorder, recorder.folder
        self.device, self.base = device, base
        self.root = self.folder.checkpoints
        self.keep = checkpoint.RetentionPolicy(self.spec.keep, self.spec.keep_every)
        self.async_saver: AsyncSaver | None = None
        self.copies = RemoteCopier(self.spec.remote, self.keep) if self.spec.remote and recorder.is_rank_zero else None
        self.frozen_models: dict[str, FrozenModel] = {}  # of post-training, by role
        self.method_states: dict[str, MethodState] = {}  # of post-training: numbers that a resumed run needs
        self.stall_s = 0.0  # training time lost to the pending save
        self.failures: list[str] = []  # of consecutive saves

    def save(self, at: Position, wait: bool) -> float:
        """Save; with `wait` (or without checkpoint.asynchronous) return only once it is committed.

        Returns the seconds that training was stalled.
        """
        began = time.perf_counter()
        state, meta = {**self.state.state_dict(), "rng": rng_state()}, self.meta(at.cursor)
        if self.async_saver is None or not self.save_async(self.async_saver, at.step, state, meta, wait, began):
            path = checkpoint.save(self.root, at.step, state, meta, self.keep, self.spec.hash)
            self.record_committed(SaveResult(at.step, path, 0.0, bytes_of(path)), time.perf_counter() - began)
        if wait and self.copies is not None:
            for copied in self.copies.drain():
                self.record_copy(copied)
        return time.perf_counter() - began

    def meta(self, cursor: int) -> dict[str, Any]:
        """State that is not tensors."""
        meta: dict[str, Any] = {"cursor": cursor, "data": self.data_digest, "loss_scale": self.loss_scale.state_dict()}
        if self.method_states:
            meta["align"] = {name: state.state_dict() for name, state in self.method_states.items()}
        meta["models"] = {role: model.digest for role, model in self.frozen_models.items()}
        if self.base is not None:
            meta["base"] = self.base.digest
        return meta | {"health": self.health.state_dict(), "spec": self.run_spec.to_dict()}

    def save_async(
        self, async_saver: AsyncSaver, step: int, state: dict[str, Any], meta: dict[str, Any], wait: bool, began: float
    ) -> bool:
        """False if it was waited for and failed: the state is still here to be saved again."""
        self.record_save(async_saver.wait())  # one at a time
        run_on_rank_zero(self.check_repeated_failure)
        async_saver.save(step, state, meta)
        self.stall_s = time.perf_counter() - began
        if not wait:
            return True
        ended = async_saver.finish()
        self.stall_s = time.perf_counter() - began
        self.record_save(ended)
        return not run_on_rank_zero(lambda: ended.error if ended else "")

    def wait_for_pending(self) -> None:
        """Wait for the pending save: a rewind may load it, and must not depend on how fast it is written."""
        if self.async_saver is not None:
            self.record_save(self.async_saver.wait())
            run_on_rank_zero(lambda: None)

    def poll(self) -> None:
        """Between steps: collect the results of finished saves and copies."""
        if self.async_saver is not None:
            self.record_save(self.async_saver.poll())
        if self.copies is not None:
            self.record_copy(self.copies.poll())

    def record_save(self, ended: SaveResult | None) -> None:
        """Record the end of an asynchronous save; only rank 0 gets one."""
        if ended is None:
            return
        if not ended.error:
            self.record_committed(ended, self.stall_s)
            return
        self.failures.append(f"cannot save {ended.path}: {ended.error}")
        self.recorder.event("save_failed", ended.step, path=ended.path.name, error=ended.error)
        print(f"{self.failures[-1]}; older checkpoints are as they were", file=sys.stderr, flush=True)

    def check_repeated_failure(self) -> None:
        """One failed save is tolerated; two in a row end the run."""
        if len(self.failures) > 1:
            raise CheckpointError(f"{self.failures[-1]}; the save before failed too")

    def record_committed(self, ended: SaveResult, stall_s: float) -> None:
        self.failures = []
        times = {"seconds": round(stall_s, 4), "write_s": round(ended.seconds, 4)}
        self.recorder.event("save", ended.step, path=ended.path.name, bytes=ended.bytes, **times)
        if self.copies is not None:
            self.copies.add(ended.path)

    def record_copy(self, copied: CopyResult | None) -> None:
        if copied is None:
            return
        fields = {"path": copied.folder.name, "remote": self.spec.remote, "seconds": round(copied.seconds, 4)}
        if not copied.error:
            self.recorder.event("copy", checkpoint.step_of(copied.folder), **fields)
            return
        self.recorder.event("copy_failed", checkpoint.step_of(copied.folder), **fields, error=copied.error)
        print(f"cannot copy {copied.folder} to {self.spec.remote}: {copied.error}", file=sys.stderr, flush=True)

    def close(self, error: Exception | None = None) -> None:
        """End the writers. The pending save is waited for only if all ranks are alive."""
        all_alive = isinstance(error, LMWorksError) and error.collective and not error.rank_lost
        if self.async_saver is not None:
            if all_alive:
                self.record_save(self.async_saver.wait())
            self.async_saver.close()
            self.async_saver = None
        if self.copies is not None:
            self.copies.close()

    def load(self, step: int | None = None) -> Position | None:
        """Load the newest intact checkpoint (or that of `step`); returns its position, None without one.

        Damaged checkpoints are reported.
        """
        position = self.load_checkpoint(step)
        if position is None:
            self.load_initial_weights()
        if self.spec.asynchronous and self.async_saver is None:
            state = {**self.state.state_dict(), "rng": rng_state()}
            timeout_s = self.run_spec.watch.timeout_s
            self.async_saver = AsyncSaver(self.root, self.keep, state, self.device, self.spec.hash, timeout_s)
        return position

    def load_checkpoint(self, step: int | None) -> Position | None:
        state: dict[str, Any] = {**self.state.state_dict(), "rng": None}
        manifest = checkpoint.load(
            self.root,
            state,
            refused=self.record_refused,
            step=step,
            remote=self.spec.remote,
            check=self.check,
            accept=check_loaded,
        )
        if manifest is None:
            run_on_rank_zero(self.check_checkpoint_exists)
            return None
        self.state.load_state_dict(state)
        set_rng_state(state["rng"])
        self.loss_scale.load_state_dict(manifest.meta["loss_scale"])
        self.health.load_state_dict(manifest.meta.get("health", {}))
        saved = manifest.meta.get("align", {})
        for name, method_state in self.method_states.items():
            if name in saved:  # an older version had fewer
                method_state.load_state_dict(saved[name])
        return Position(manifest.step, manifest.meta["cursor"])

    def check(self, manifest: Manifest) -> None:
        """Whether the run may resume from it: valid metadata, and the same spec and data."""
        meta = manifest.meta
        if why := wrong_meta(manifest):
            raise DamagedError(why)
        if changes := refused_changes(meta["spec"], self.run_spec):
            raise SpecError(
                f"{self.folder.spec_path} has {'; '.join(changes)} in step {manifest.step}: a resumed run cannot "
                f"change that; restore it, or start a new run with checkpoint.init = '{self.folder.path}'"
            )
        if self.base is not None:
            check_base(self.run_spec, self.base, meta.get("base"), str(self.folder.path))
        if "models" in meta:  # those of older versions have none
            self.check_frozen_models(meta["models"], manifest.step)
        begins = self.run_spec.stage_after(manifest.step) != self.run_spec.stage_after(manifest.step - 1)
        if meta["data"] != self.data_digest and not begins:  # a stage has data of its own
            raise DataError(
                f"{', '.join(self.run_spec.data.sources)} holds other tokens than those this run was trained on; "
                "restore the old data, or start a new run"
            )

    def check_frozen_models(self, saved: dict[str, str], step: int) -> None:
        """`saved`: digests by role, in the checkpoint of `step`."""
        run, now = self.folder.path, self.frozen_models
        for role in sorted(saved.keys() - now.keys()):
            raise SpecError(
                f"{self.folder.spec_path} names no {role}, which {run} had up to step {step}: name it again"
            )
        for role, model in now.items():
            if saved.get(role) != model.digest:
                raise SpecError(
                    f"{model.key} = {model.folder!r} is not the {role} that {run} had up to step {step}: restore its "
                    f"weights, or start a new run with checkpoint.init = '{run}'"
                )

    def check_checkpoint_exists(self) -> None:
        """A run that has saved does not restart at step 0 because its checkpoints are missing."""
        steps = [event["step"] for event in self.folder.events() if event["kind"] == "save"]
        if steps:
            raise CheckpointError(
                f"{self.root} has no checkpoint, though step {steps[-1]} was saved there; bring the folder back, "
                "or begin a new run with another --run-dir"
            )

    def load_initial_weights(self) -> None:
        """Weights of another run, if checkpoint.init names one; those of a Hugging Face folder are loaded already.

        So are those of a base under adapters, but for what is no weight.
        """
        source = self.spec.init
        if self.base is not None:
            fill_buffers(self.base, self.state.parallel_model.buffers())
            return
        if not source or is_hf(Path(source)):
            return
        folder = run_on_all_ranks(lambda: RunFolder.open(source))
        weights = self.state.state_dict()["model"]
        if not load_weights(folder, weights, self.record_refused):
            raise collective_error(SpecError(f"checkpoint.init = {source!r} has no checkpoint to start from"))
        self.state.load_state_dict({"model": weights})

    def set_aside_later(self, step: int, attempt: int, quiet: bool) -> None:
        """After resuming at a chosen step: move later checkpoints away, so that no resume finds them.

        They are kept, since they may be good. Remote copies of them are deleted when this step has been copied again.
        """
        place = self.root / f"set-aside-{attempt}"
        steps = run_on_rank_zero(lambda: set_aside(self.root, step, place))
        if not steps or not self.recorder.is_rank_zero:
            return
        self.recorder.event("set_aside", step, attempt=attempt, steps=steps, path=place.name)
        if not quiet:
            print(f"checkpoints after step {step} are in {place} now: {', '.join(map(str, steps))}", flush=True)
        if self.copies is not None:
            self.copies.add(self.root / f"step-{step:06d}")

    def record_refused(self, path: Path, reason: str) -> None:
        self.recorder.event("refused", checkpoint.step_of(path), path=path.name, reason=reason)
        print(refusal_text(path, reason), file=sys.stderr, flush=True)


def check_loaded(state: dict[str, Any]) -> None:
    """Refuse what no run can resume from: malformed generator states, NaN or Inf."""
    if why := wrong_rng(state["rng"]):
        raise DamagedError(f"its random states are malformed: {why}")
    sections = {key: section for key, section in state.items() if key != "rng"}
    if found := first_failure(lambda: not_finite(first_nonfinite_tensor(named_tensors(sections)))):
        raise DamagedError(found[0])


def not_finite(bad: tuple[str, int] | None) -> str | None:
    return bad and f"{bad[0]} has {bad[1]:,} values that are NaN or Inf"


def bytes_of(folder: Path) -> int:
    return sum(entry["bytes"] for entry in read_committed(folder).files.values()) if is_rank_zero() else 0


# --- validation of the metadata of a checkpoint ----------------------------------------------------------


MAX_LENGTH = 2**62  # a cursor beyond it would overflow where sequences are counted


def wrong_meta(manifest: Manifest) -> str:
    """The first thing in `meta` that no run has written; empty where there is none."""
    meta = manifest.meta
    cursor: Any = meta.get("cursor")
    if not is_int(cursor, manifest.step) or cursor > MAX_LENGTH:
        return f"meta.cursor = {short_repr(cursor)} is not where the data can stand at step {manifest.step}"
    if not isinstance(meta.get("data"), str):
        return f"meta.data = {short_repr(meta.get('data'))} is not the digest of any data"
    if not isinstance(meta.get("base", ""), str):
        return f"meta.base = {short_repr(meta['base'])} is not the digest of any weights"
    models = meta.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(digest, str) for digest in models.values()):
        return f"meta.models = {short_repr(models)} has no digests of models"
    if not isinstance(meta.get("spec"), dict):
        return f"meta.spec = {short_repr(meta.get('spec'))} is not a spec"
    if not is_scale(meta.get("loss_scale")):
        return f"meta.loss_scale = {short_repr(meta.get('loss_scale'))} is not a loss scale"
    health = meta.get("health", {})  # there was none in the first checkpoints
    if not isinstance(health, dict):
        return f"meta.health = {short_repr(health)} is not an object"
    for one in fields(HealthState):
        if one.name in health and not fits(health[one.name], getattr(HealthState(), one.name)):
            return f"meta.health.{one.name} = {short_repr(health[one.name])} is not what a run writes there"
    return ""


def is_scale(state: Any) -> bool:
    """Empty where products do not run in fp16."""
    if not isinstance(state, dict) or not state:
        return state == {}
    scale: Any = state.get("scale")
    return is_number(scale) and math.isfinite(scale) and scale > 0 and is_int(state.get("good"))


def fits(value: Any, like: Any) -> bool:
    """Of the type of a field's default: numbers, lists of numbers, and the digests of replicas that differed."""
    if isinstance(like, list):
        return isinstance(value, list) and all(is_number(item) for item in value)
    if isinstance(like, dict):
        return isinstance(value, dict) and (not value or is_suspect_record(value))
    return is_int(value) if isinstance(like, int) else is_number(value)


def is_suspect_record(value: dict[str, Any]) -> bool:
    digests = value.get("digests")
    named = is_int(value.get("step")) and isinstance(value.get("part"), str) and isinstance(digests, dict)
    return named and all(rank.isdigit() and isinstance(digest, int) for rank, digest in (digests or {}).items())


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
