"""Asynchronous successive halving: many short trials, few long ones, and no worker that waits."""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def promotion(rungs: list[dict[int, float]], running: set[int], eta: int) -> tuple[int, int] | None:
    """(trial, rung that it goes on to) for a worker that is free; None: it begins a new trial.

    rungs[i] has the losses of the trials that have reported at rung i; the last rung is the whole length. Of each rung
    the best 1/eta (rounded down) of those that have reported may go on, the highest rung first; of equal losses the
    trial with the smaller number is the better.
    """
    # exercise asha(rungs, running, eta)
    for rung in reversed(range(len(rungs) - 1)):
        losses = rungs[rung]
        ranked = sorted(losses, key=lambda trial: (losses[trial], trial))
        for trial in ranked[: len(ranked) // eta]:
            if trial not in rungs[rung + 1] and trial not in running:
                return trial, rung + 1
    return None
    # end asha
