"""The current phase and step of this process.

The watchdog reads them for its reports; listeners are called at every change (fault injection uses one). Without
listeners, entering a phase costs an assignment.

    init, data, forward, backward, reduce, optimizer, evaluate      of a step
    hand_over, rollout_wait, generate, environment, reward, score   of a round of rollouts
    save.stage, save.write, save.seal, save.commit, save.prune      of a checkpoint
    load.find, load.read
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int], None]

name = "init"
step = 0  # the one being taken, counted from 1
listeners: list[Listener] = []


def enter(phase: str, at_step: int | None = None) -> None:
    global name, step
    name = phase
    if at_step is not None:
        step = at_step
    for listener in listeners:
        listener(name, step)
