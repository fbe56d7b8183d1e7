"""The folder of a sweep, which is all that drivers and workers share.

    sweeps/NAME/
      sweep.json           kind, base spec, space, seed, threads and settings: what a sweep must not change
      trials/0000/ …       an ordinary run folder each, and beside it:
        trial.toml         the base spec with this trial's overrides
        trial.json         number, overrides, state, result, parent (below)
        trial.log          what its processes printed
        claim              who works on it (`claims`)
      driver/              of a driver that proposes trials as it goes: its claim; `done` once nothing is left to start

States of a trial: `queued` is to be run up to step `until` (its last, where that is null); `paused` has come there with
a checkpoint; `finished`, `failed` and `stopped` are ends. A queued trial whose claim is held is running. Who changes
trial.json holds the claim.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from ..record import RunFolder, read_metrics
from ..record.claims import Claim, is_held
from ..record.folder import now
from ..spec import LMWorksError, RunSpec, SpecError, dump_toml
from ..spec.files import read_json_object, with_absolute_paths, write_whole
from ..spec.load import apply_overrides, read_source, with_initial_shape
from ..spec.resumed import flat
from ..spec.schema import merge
from .fork import fork_run
from .space import Point, Space

SWEEPS_DIR = Path("sweeps")
STATES = ("queued", "paused", "finished", "failed", "stopped")
ATTEMPT = ("start", "restart", "resume", "finish", "interrupt", "pause", "fail")  # events that begin or end one
ENDS = ("finished", "failed", "stopped")
WAIT_S = 0.5  # between looks whether another driver has ended


@dataclass(frozen=True)
class Trial:
    """trial.json. `result`: the last step with its losses, once the trial has paused or ended."""

    number: int
    overrides: Point
    state: str = "queued"
    until: int | None = None
    step: int = 0
    result: dict[str, Any] | None = None
    parent: dict[str, int] | None = None  # {"trial", "step"}: the checkpoint that it began with
    error: str = ""
    kills: int = 0  # of its process since it last got further
    notes: dict[str, Any] = field(default_factory=dict)  # of the driver, e.g. the bracket of a tuner

    @property
    def settled(self) -> bool:
        """Whether no worker has anything to do for it."""
        return self.state != "queued"


@dataclass(frozen=True)
class Sweep:
    """`create` makes or opens a sweep, `open` an existing one."""

    path: Path
    kind: str  # sweep, tune, scaling …: who proposes trials
    base: dict[str, Any]  # a spec as it was written: what follows from other keys is derived in each trial
    space: Space
    seed: int = 0
    threads: int = 1  # of each rank on the CPU: sums, and so the bits of a result, depend on it
    settings: dict[str, Any] = field(default_factory=dict)  # of the driver

    @classmethod
    def create(
        cls,
        path: str | Path,
        base: Mapping[str, Any],
        space: Space,
        kind: str = "sweep",
        seed: int = 0,
        threads: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """A new sweep, or the one that is there already: another one is refused."""
        wanted = cls(Path(path), kind, dict(base), space, seed, threads, dict(settings or {}))
        try:
            wanted.trials_path.mkdir(parents=True, exist_ok=True)
            content = {"format": 1, "created": now(), **wanted.to_dict()}
            created = write_once(wanted.file, json.dumps(content, indent=1))
        except OSError as error:
            raise SpecError(f"cannot create the sweep {path}: {error.strerror}") from None
        if not created:
            cls.open(path).check_same(wanted)
        return wanted

    @classmethod
    def open(cls, path: str | Path) -> Self:
        file = Path(path) / "sweep.json"
        if not file.is_file():
            raise SpecError(f"{path} is not a sweep: it has no sweep.json")
        found = read_json_object(file, SpecError)
        if found.get("format") != 1:
            raise SpecError(f"{file} has format {found.get('format')!r}; this version of LMWorks reads 1")
        known = {one.name for one in fields(cls)} - {"path", "space"}
        space = Space.of(found["space"]) if found["space"] else Space(())  # a ladder's trials are points of no space
        return cls(Path(path), space=space, **{name: found[name] for name in known})

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "seed": self.seed,
            "threads": self.threads,
            "settings": self.settings,
            "space": self.space.to_dict(),
            "base": self.base,
        }

    def check_same(self, other: Sweep) -> None:
        """Refuse to go on with `other` in this folder, and say what differs."""
        choose = f"; choose another --name, or repeat what {self.file} says"
        for name in ("kind", "seed", "threads"):
            if getattr(self, name) != getattr(other, name):
                raise SpecError(
                    f"{self.path} is another sweep: its {name} is {getattr(self, name)!r}, not "
                    f"{getattr(other, name)!r}{choose}"
                )
        if difference := self.space.difference(other.space):
            raise SpecError(f"{self.path} is a sweep of another space: {difference}{choose}")
        for what in ("settings", "base"):
            mine, theirs = flat(getattr(self, what)), flat(getattr(other, what))
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    spec = "of another spec" if what == "base" else "with other settings"
                    raise SpecError(
                        f"{self.path} is a sweep {spec}: {key} is {said(mine.get(key))}, not "
                        f"{said(theirs.get(key))}{choose}"
                    )

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def identity(self) -> str:
        """Of this sweep and no other, whatever their folders are called."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]

    @property
    def trials_path(self) -> Path:
        return self.path / "trials"

    # --- trials -----------------------------------------------------------------------------------------

    def folder(self, number: int) -> RunFolder:
        return RunFolder(self.trials_path / f"{number:04d}")

    def trial(self, number: int) -> Trial:
        found = read_json_object(self.folder(number).path / "trial.json", LMWorksError)
        return Trial(**found)

    def trials(self) -> list[Trial]:
        return [self.trial(number) for number in self.numbers()]

    def numbers(self) -> list[int]:
        named = (path.parent.name for path in self.trials_path.glob("*/trial.json"))
        return sorted(int(name) for name in named if name.isdigit())

    def table(self, overrides: Point, number: int) -> dict[str, Any]:
        """The base spec with `overrides`, as trial.toml has it."""
        name = f"{self.base.get('name', 'run')}-{number:04d}"
        return merge(self.base, {**nested(overrides), "name": name})

    def spec(self, overrides: Point, number: int = 0) -> RunSpec:
        """What a trial runs. A point that is no valid spec is refused, and named."""
        try:
            return RunSpec.from_dict(with_initial_shape(self.table(overrides, number)))
        except SpecError as error:
            raise SpecError(f"{shown(overrides)}: {error}") from None

    def propose(
        self,
        overrides: Point,
        until: int | None = None,
        parent: tuple[int, int] | None = None,
        notes: Mapping[str, Any] | None = None,
        number: int | None = None,
    ) -> Trial:
        """A new trial, queued up to step `until`. With `parent` (a trial and a step that it has a checkpoint of) it
        begins with the whole state of that trial, under its own spec. A `number` that exists already is left as it is.
        """
        number = max(self.numbers(), default=-1) + 1 if number is None else number
        folder = self.folder(number)
        if (folder.path / "trial.json").exists():
            return self.trial(number)
        spec = self.spec(overrides, number)
        folder.path.mkdir(parents=True, exist_ok=True)
        write_whole(folder.path / "trial.toml", dump_toml(self.table(overrides, number)))
        if parent is not None:
            remove_incomplete(folder)
            fork_run(self.folder(parent[0]), parent[1], folder, with_absolute_paths(spec))
        begun = {"trial": parent[0], "step": parent[1]} if parent else None
        trial = Trial(number, dict(overrides), until=until, parent=begun, notes=dict(notes or {}))
        trial = replace(trial, step=parent[1] if parent else 0)
        write_once(folder.path / "trial.json", json.dumps(asdict(trial), indent=1))
        return self.trial(number)

    def run_until(self, number: int, until: int | None, notes: Mapping[str, Any] | None = None) -> Trial:
        """Queue a trial that has paused (or failed, or was stopped) for more steps."""
        with self.claimed(number):
            trial = self.trial(number)
            (self.folder(number).path / STOP).unlink(missing_ok=True)
            trial = replace(trial, state="queued", until=until, error="", kills=0, notes=dict(notes or trial.notes))
            self.write(trial)
        return trial

    def stop(self, number: int) -> None:
        """End a trial for good: a running one saves a checkpoint first. It can be queued again with `run_until`."""
        (self.folder(number).path / STOP).touch()
        with suppress(LMWorksError), self.claimed(number):  # the worker of a running trial sees the file
            trial = self.trial(number)
            self.write(trial if trial.state in ENDS else replace(trial, state="stopped"))

    def is_running(self, number: int) -> bool:
        return is_held(self.folder(number).path)

    def metrics(self, number: int) -> list[dict[str, Any]]:
        """One line a step, its own steps only: those before a fork are its parent's."""
        return read_metrics(self.folder(number).metrics_path)

    def metrics_at(self, number: int, step: int) -> dict[str, Any] | None:
        """The line of one step; None where the trial has not come there."""
        return next((line for line in self.metrics(number) if line["step"] == step), None)

    # --- under a claim ----------------------------------------------------------------------------------

    def write(self, trial: Trial) -> None:
        """By the owner of the trial's claim."""
        write_whole(self.folder(trial.number).path / "trial.json", json.dumps(asdict(trial), indent=1))

    @contextmanager
    def claimed(self, number: int) -> Iterator[None]:
        """For a moment, to change it."""
        claim = Claim.take_soon(self.folder(number).path)
        if claim is None:
            raise LMWorksError(f"trial {number} of {self.path} is running; it can be changed when it has paused")
        try:
            yield
        finally:
            claim.release()

    @contextmanager
    def driving(self, wait: Callable[[str], object] | None = None) -> Iterator[None]:
        """While active, workers wait for further trials. One process at a time proposes trials as it goes: a second
        one is refused, or with `wait` waits until the first has ended or was killed; `wait` is told so."""
        place = self.path / "driver"
        place.mkdir(exist_ok=True)
        claim = Claim.take_soon(place)
        if claim is None and wait is None:
            raise SpecError(f"{self.path} is driven by another process; wait for it, or choose another --name")
        if claim is None and wait is not None:
            wait(f"{self.path} is driven by another process; this one goes on with it when that one ends")
        while claim is None:
            time.sleep(WAIT_S)
            claim = Claim.take_soon(place)
        done = place / DONE
        try:
            done.unlink(missing_ok=True)
            with claim.renewing():
                yield
            done.touch()
        finally:
            claim.release()

    @property
    def is_driven(self) -> bool:
        return is_held(self.path / "driver")

    @property
    def is_done(self) -> bool:
        """Whether nobody has anything more to run, as far as the last driver knew."""
        return (self.path / "driver" / DONE).exists()

    def update(self, trial: Trial) -> Trial:
        """`trial` with what its run folder says: the steps taken, and whether it has paused or finished."""
        folder = self.folder(trial.number)
        steps = read_metrics(folder.metrics_path)
        if not steps:
            return trial
        last = steps[-1]
        evaluated = [line for line in steps if line.get("val_loss") is not None]
        result = {
            "step": last["step"],
            "loss": last.get("loss"),
            "val_loss": evaluated[-1]["val_loss"] if evaluated else None,
            "val_step": evaluated[-1]["step"] if evaluated else None,
            "tokens": sum(line.get("tokens") or 0 for line in steps),
            "train_s": sum(line["step_s"] for line in steps),
            **{key: value for key, value in last.items() if key.startswith(SCORES)},
        }
        marks = [(event["kind"], event["step"]) for event in folder.events() if event["kind"] in ATTEMPT]
        kind, step = marks[-1] if marks else ("", 0)
        paused = kind == "pause" and trial.until is not None and step >= trial.until
        state = "finished" if kind == "finish" else "paused" if paused else trial.state
        return replace(trial, step=last["step"], result=result, state=state)


SCORES = "eval/", "val_loss/"  # of evaluation suites, and losses by position: keys of the last step
STOP = "stop"  # a file: the trial is to end
DONE = "done"  # a file of a driver that came to its end: what has paused is to stay so


def base_of(source: str, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """A spec as it was written, with its paths made absolute; checked as a whole."""
    table = apply_overrides(read_source(source), overrides)
    table.setdefault("name", Path(source).stem if Path(source).suffix else str(source))
    spec = RunSpec.from_dict(with_initial_shape(table))
    spec.data.check_path_given()
    before, after = (flat_whole(each.to_dict()) for each in (spec, with_absolute_paths(spec)))
    return merge(table, nested({key: value for key, value in after.items() if value != before[key]}))


def flat_whole(table: Mapping[str, Any], prefix: str = "") -> Point:
    """Dotted keys of a spec; a key whose value is a table (data.mix) stays whole."""
    known = RunSpec.dotted_keys()
    found: Point = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        found |= {key: value} if key in known or not isinstance(value, Mapping) else flat_whole(value, f"{key}.")
    return found


def nested(point: Point) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in point.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        table = merge(table, value)
    return table


def shown(point: Point) -> str:
    """As overrides are typed."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in point.items()) or "the base spec"


def said(value: Any) -> str:
    return "left out" if value is None else json.dumps(value)


def write_once(path: Path, content: str) -> bool:
    """False where the file exists: whoever came first has written it, whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_whole(draft, content)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def remove_incomplete(folder: RunFolder) -> None:
    """What a fork left that was killed before its trial counted."""
    folder.spec_path.unlink(missing_ok=True)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
