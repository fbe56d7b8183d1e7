"""Step times of a server from a load test: `lmworks bench serve --save FILE`, then `lmworks fleet fit FILE`.

Tokens that are seen together are one step. The time between two steps, where a request has tokens in both, is the
duration of the second; its sequences, their cached tokens and the prompts whose first token it brought are known. A
linear fit with coefficients of at least 0 gives the step times; requests that found the server idle give what a request
costs besides its steps.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import SpecError
from .server_model import ServerModel, StepTime

APART = 0.4  # of a typical time between tokens: less is the same step
TRIMMED = 3.0  # residuals beyond so many median ones are of a machine that did something else
FEWEST = 50  # steps


@dataclass(frozen=True)
class Measured:
    """A request as a client saw it. Seconds from the start of the test."""

    at: float
    prompt: int
    times: tuple[float, ...]  # of its tokens
    server: int = 0


@dataclass(frozen=True)
class Fitted:
    steps: StepTime
    request_s: float
    count: int  # steps that were used
    median_error: float  # of a step's duration, as a share
    idle_requests: int


def read_outcomes(path: Path) -> list[Measured]:
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["error"] is None and row["times"]:
                times = tuple(map(float, row["times"]))
                found.append(Measured(float(row["scheduled"]), int(row["prompt_tokens"]), times))
        except (ValueError, TypeError, KeyError) as error:
            raise SpecError(f"{path}, line {number}: not an outcome of bench serve --save ({error!r})") from None
    if not found:
        raise SpecError(f"{path}: no request was answered")
    return found


@dataclass(frozen=True)
class StepRow:
    """One measured step."""

    seconds: float
    sequences: int
    keys: int
    prompt_tokens: int
    prompt_pairs: float


def fit(outcomes: Sequence[Measured]) -> Fitted:
    servers = {one.server for one in outcomes}
    rows = [row for server in servers for row in measured_steps([o for o in outcomes if o.server == server])]
    if len(rows) < FEWEST:
        raise SpecError(f"{len(rows)} steps can be told apart, and a fit needs {FEWEST}: send more requests")
    design = np.array([[1, row.sequences, row.keys, row.prompt_tokens, row.prompt_pairs] for row in rows], float)
    seconds = np.array([row.seconds for row in rows])
    weights = trimmed_fit(design, seconds)
    errors = np.abs(design @ weights / seconds - 1)
    base, sequence, key, token, pair = (float(one) for one in weights)
    most = int(max(row.sequences for row in rows))
    steps = StepTime(((0, base), (most + 1, base + sequence * (most + 1))), key, token, pair)
    besides = [o for server in servers for o in alone([o for o in outcomes if o.server == server])]
    request = [o.times[0] - o.at - steps.mixed(0, 0, o.prompt, o.prompt**2 / 2) for o in besides]
    besides_s = max(0.0, statistics.median(request)) if request else 0.0
    return Fitted(steps, besides_s, len(rows), float(np.median(errors)), len(request))


def measured_steps(outcomes: Sequence[Measured]) -> list[StepRow]:
    """Of one server."""
    events = sorted((at, number, place) for number, one in enumerate(outcomes) for place, at in enumerate(one.times))
    gaps = [b - a for one in outcomes for a, b in itertools.pairwise(one.times)]
    if not gaps:
        return []
    apart = APART * statistics.median(gaps)
    steps = grouped(events, apart)
    rows = []
    for before, step in itertools.pairwise(steps):
        then = statistics.median(at for at, _, _ in before)
        now = statistics.median(at for at, _, _ in step)
        following = {number for _, number, _ in before} & {number for _, number, _ in step}
        late = any(outcomes[number].at > then for _, number, place in step if place == 0)
        if not following or late:  # the server was idle in between, or a step is missing
            continue
        if now - then < apart:  # a client that was held up reads several steps at once
            continue
        decoding = [(number, place) for _, number, place in step if place]
        prompts = [outcomes[number].prompt for _, number, place in step if not place]
        rows.append(
            StepRow(
                now - then,
                len(decoding),
                sum(outcomes[number].prompt + place for number, place in decoding),
                sum(prompts),
                sum(prompt**2 / 2 for prompt in prompts),
            )
        )
    return rows


Event = tuple[float, int, int]  # seconds, request, token


def grouped(events: Sequence[Event], apart: float) -> list[list[Event]]:
    """Tokens by step: no request has two in one, and steps are `apart`."""
    steps: list[list[Event]] = []
    for event in events:
        last = steps[-1] if steps else []
        if not last or event[0] - last[-1][0] > apart or any(number == event[1] for _, number, _ in last):
            steps.append([event])
        else:
            last.append(event)
    return steps


def trimmed_fit(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares of relative errors, twice: the second time without outliers."""
    weights = nonnegative(design / seconds[:, None], np.ones(len(seconds)))
    residuals = np.abs(seconds - design @ weights)
    kept = residuals <= TRIMMED * np.median(residuals)
    return nonnegative(design[kept], seconds[kept])


def nonnegative(design: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares; a coefficient that comes out negative is 0, the most negative first."""
    scale = np.abs(design).max(0)
    kept = [column for column in range(design.shape[1]) if scale[column] > 0]
    found = np.zeros(design.shape[1])
    while kept:
        weights = np.linalg.lstsq(design[:, kept] / scale[kept], wanted, rcond=None)[0]
        if weights.min() >= 0:
            found[kept] = weights / scale[kept]
            break
        del kept[int(weights.argmin())]
    return found


def alone(outcomes: Iterable[Measured]) -> list[Measured]:
    """Requests that came when no other was under way."""
    found, busy_until = [], -1.0
    for one in sorted(outcomes, key=lambda one: one.at):
        if one.at > busy_until:
            found.append(one)
        busy_until = max(busy_until, one.times[-1])
    return found


def to_server(fitted: Fitted, source: str, **sizes: Any) -> ServerModel:
    return ServerModel(steps=fitted.steps, request_s=fitted.request_s, source=source, **sizes)
