"""The misconception behind a failure: the known wrong answer that fails at the same case with the same value."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ..answers import failure_of, mutate, prepare, write_references
from ..course_files import course_sources
from ..exercise import Exercise, Mutant
from ..holes import replace_holes

Check = Callable[[ModuleType], None]
RECOGNITION_SECONDS = 5.0  # for all known wrong answers together
POLL_S = 0.01


@dataclass(frozen=True)
class Failure:
    """What tells one wrong answer from another."""

    kind: str  # of the error
    case: str = ""
    got: Any = None
    message: str = ""  # without paths


def recogniser(exercise: Exercise, check: Check) -> Callable[[Exception], str]:
    """Called before the learner's code runs: what that changes in its process, wrong answers must not meet.

    They run in forks of a fork that waits until a failure is named.
    """
    prepare(exercise.file)
    request, reply = os.pipe(), os.pipe()
    helper = os.fork()
    if not helper:
        os.close(request[1])
        os.close(reply[0])
        answer_once(exercise, check, request[0], reply[1])
    os.close(request[0])
    os.close(reply[1])

    def recognise(wrong: Exception) -> str:
        with suppress(BrokenPipeError), os.fdopen(request[1], "wb") as asked:
            asked.write(as_bytes(failure_from(wrong)))
        with os.fdopen(reply[0], "rb") as answered:
            return answered.readline().decode().rstrip("\n")

    return recognise


def answer_once(exercise: Exercise, check: Check, request: int, reply: int) -> NoReturn:
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # what wrong answers print is not the learner's
        os.dup2(nothing, 2)
        with os.fdopen(request, "rb") as asked:
            failure = pickle.load(asked)
        os.write(reply, f"{misconception(exercise, check, failure)}\n".encode())
    finally:
        os._exit(0)


def misconception(exercise: Exercise, check: Check, failure: Failure) -> str:
    from ..checks.ranks import WAITS

    if isinstance(failure.got, str) and failure.got == WAITS:
        return next((mutant.misconception for mutant in exercise.mutants if mutant.waits), "")
    deadline = time.monotonic() + RECOGNITION_SECONDS
    for number, mutant in enumerate(exercise.mutants):
        if not mutant.waits and fails_alike(exercise, check, mutant, Path.cwd() / f"lmworks-learn-{number}", failure,
                                            deadline):  # fmt: skip
            return mutant.misconception
    return ""


def fails_alike(
    exercise: Exercise, check: Check, mutant: Mutant, folder: Path, failure: Failure, deadline: float
) -> bool:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            write_references(folder)
            text, _ = replace_holes(course_sources()[exercise.file], exercise.file, mutate(exercise, mutant))
            (folder / exercise.file).write_text(text)
            known = failure_of(check, folder, exercise.file)
            code = 0 if known is not None and alike_failures(failure_from(known), failure) else 1
        finally:
            os._exit(code)
    ended, status = 0, 1
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if ended else POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # another rank of it may be left
    if not ended:
        os.waitpid(child, 0)
    return bool(ended) and status == 0


def failure_from(error: Exception) -> Failure:
    from .expect import Mismatch

    kind = type(error).__name__
    if isinstance(error, Mismatch):
        got = error.got.detach() if hasattr(error.got, "detach") else error.got
        return Failure(kind, case=error.case, got=got)
    return Failure(kind, message=re.sub(r"\S*/", "", str(error)))


def as_bytes(failure: Failure) -> bytes:
    from .expect import shown

    try:
        return pickle.dumps(failure)
    except Exception:  # a value of the learner's own kind
        return pickle.dumps(replace(failure, got=shown(failure.got)))


def alike_failures(known: Failure, failure: Failure) -> bool:
    from .expect import alike, shown

    if (known.kind, known.case, known.message) != (failure.kind, failure.case, failure.message):
        return False
    return alike(known.got, failure.got) or (isinstance(failure.got, str) and failure.got == shown(known.got))
