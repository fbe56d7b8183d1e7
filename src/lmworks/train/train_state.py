"""The state of a run: its position, and model and optimizer as a checkpoint has them; the recorder of its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..parallel.deepspeed import DeepSpeedEngine
from ..parallel.parallel_model import ParallelModel
from ..parallel.state_dict import load_into, training_state
from ..record import RunFolder


@dataclass(frozen=True)
class Position:
    """Where a run is, in steps and in data."""

    step: int  # optimizer steps taken
    cursor: int  # position in the data: steps taken + batches skipped on purpose


@dataclass(frozen=True)
class EventRecorder:
    """Writes events of the run folder, on rank 0."""

    folder: RunFolder
    is_rank_zero: bool

    def event(self, kind: str, step: int, **fields: Any) -> None:
        if self.is_rank_zero:
            self.folder.event(kind, step, **fields)


def skip_data(at: Position, cursor: int, reason: str, recorder: EventRecorder, **fields: float) -> Position:
    """Do not train on the batches from the position's cursor up to `cursor`."""
    recorder.event("skip", at.step + 1, from_cursor=at.cursor, to_cursor=cursor, reason=reason, **fields)
    return replace(at, cursor=cursor)


@dataclass(frozen=True)
class TrainState:
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    engine: DeepSpeedEngine | None
    others: dict[str, TrainState] = field(default_factory=dict)  # further models that are trained: a critic
    before_access: list[Callable[[], None]] = field(default_factory=list)  # e.g. to bring states back to the device

    def state_dict(self) -> dict[str, Any]:
        """By name: the live tensors, to save, or to load into and then pass to `load_state_dict`."""
        self.prepare()
        if self.engine is not None:
            return self.engine.state()
        model = self.parallel_model
        state = training_state(self.optimizer, model.shards, model.sharding, model.mesh)
        state["model"] |= model.buffers()
        for name, other in self.others.items():
            state |= {section_of(name, key): section for key, section in other.state_dict().items()}
        return state

    def prepare(self) -> None:
        for act in self.before_access:
            act()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what was loaded into `state`."""
        if self.engine is not None:
            self.engine.load(state)
            return
        load_into(self.parallel_model.shards, self.optimizer, state, self.parallel_model.mesh)
        self.parallel_model.after_load()
        for name, other in self.others.items():
            sections = {
                key: state[section_of(name, key)] for key in ("model", "optim") if section_of(name, key) in state
            }
            if sections:
                other.load_state_dict(sections)

    def local_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the state that a checkpoint holds, on its device."""
        self.prepare()
        if self.engine is not None:
            yield from self.engine.local_tensors()
            return
        for shard in self.parallel_model.shards:
            yield shard.name, shard.leaf.detach()
            for key, value in self.optimizer.state.get(shard.leaf, {}).items():
                yield f"{shard.name}.{key}", value
        yield from self.parallel_model.buffers().items()
        for name, other in self.others.items():
            yield from ((f"{name}.{key}", tensor) for key, tensor in other.local_tensors())


def section_of(name: str, key: str) -> str:
    """The section of a checkpoint that has the weights ("model") or states ("optim") of a further model."""
    return name if key == "model" else f"{name}_{key}"
