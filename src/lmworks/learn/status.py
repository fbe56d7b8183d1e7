"""How far a learner is: by what is recorded, and by what stands in the workspace."""

from __future__ import annotations

from ..spec.errors import SpecError
from .exercise import GUIDE, Exercise, exercises
from .progress import Progress
from .workspace import Workspace


def next_exercise(progress: Progress) -> Exercise | None:
    """The first that has not passed; whoever is among the further ones goes on after the one that passed last."""
    names = list(exercises())
    last = max(range(len(names)), key=lambda index: (progress.of(names[index]).passed, -index))
    order = names[last:] + names[:last] if last >= GUIDE else names
    return next((exercises()[name] for name in order if not progress.of(name).passed), None)


def state_of(workspace: Workspace | None, progress: Progress, exercise: Exercise) -> str:
    record = progress.of(exercise.id)
    if record.passed:
        return "gave up, then passed" if record.gave_up else "passed"
    if record.gave_up:
        return "gave up"
    return "written" if workspace and written_or_broken(workspace, exercise) else "to do"


def written_or_broken(workspace: Workspace, exercise: Exercise) -> bool:
    try:
        return workspace.written(exercise)
    except SpecError:
        return True  # its check says what is wrong
