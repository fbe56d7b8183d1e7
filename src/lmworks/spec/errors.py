"""Errors that speak to the user: one line that says what was wrong, where, and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PREEMPTED = 75  # exit code of a run that SIGTERM ended: EX_TEMPFAIL of sysexits.h, start it again

STOPPED = (PREEMPTED, 130)  # exit codes of a job that was asked to stop (SIGTERM, Ctrl-C) and did: no error


class LMWorksError(Exception):
    """Something the user can mend. The command line prints it as one line, without a traceback."""

    exit_code = 1
    collective = False  # every rank raises it: rank 0 prints it
    reported = False  # the rank where it happened has printed it
    rank_lost = False  # another rank has ended: no more collectives
    final = False  # to start again would end the same way
    facts: Mapping[str, Any] = {}  # what an event of the run records of it beside the message


class SpecError(LMWorksError):
    """The request itself is wrong (a spec, an option, a name): bad usage, nothing was started."""

    exit_code = 2
    final = True


class DataError(LMWorksError):
    """Training data is missing, short or damaged."""

    final = True


class CheckpointError(LMWorksError):
    """A checkpoint is missing, damaged, or could not be written."""


class NoSuchData(SpecError, DataError):
    """The request names data that are not there."""


class NoSuchCheckpoint(SpecError, CheckpointError):
    """The request names a checkpoint that is not there."""


class TrainingError(LMWorksError):
    """The run cannot go on (a loss that is not finite, a device that is not there)."""


def last_line(message: str, exit_code: int) -> str:
    """What the command says of its end on standard error."""
    return f"lmworks: {message}" if exit_code in STOPPED else f"lmworks: error: {message}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean …?' with what begins, abbreviates or is spelt almost like it, or else all that is known."""
    names = sorted(known)
    if near := near_names(word, names):
        return suggestion(near)
    return f"; known: {', '.join(names)}" if names else ""


def suggestion(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def near_names(word: str, names: Sequence[str]) -> list[str]:
    initials = "".join(part[:1] for part in word.lower().split("_"))  # learning_rate: lr
    near = [name for name in names if word and (name.lower().startswith(word.lower()) or name == initials)][:3]
    return near or difflib.get_close_matches(word, names, n=1, cutoff=0.6)


def near_keys(word: str, keys: Iterable[str]) -> list[str]:
    """Dotted keys (optim.lr) that a bare or misplaced word (lr) may stand for: at most three, the likeliest kind alone.

    By their last part: it is the word, it is near it, or both have a part in common (batch_size: micro_batch).
    """
    last = {key: key.rpartition(".")[2] for key in keys}
    parts = {part.rstrip("s") for part in word.lower().split("_")}
    near = near_names(word, sorted(set(last.values())))
    kinds = (
        [key for key, name in last.items() if name == word.lower()],
        [key for key, name in last.items() if name in near],
        [key for key, name in last.items() if parts & {part.rstrip("s") for part in name.split("_")}],
    )
    return next((kind[:3] for kind in kinds if kind), [])
