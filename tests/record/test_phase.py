"""The phase of a process: what the watchdog reads, and what listeners are called with."""

from __future__ import annotations

import pytest

from lmworks.record import phase


def test_phases_within_a_step_keep_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "name", "init")
    monkeypatch.setattr(phase, "step", 0)
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(phase, "listeners", [lambda name, step: calls.append((name, step))])
    phase.enter("data", 7)
    phase.enter("forward")
    assert (phase.name, phase.step) == ("forward", 7)
    phase.enter("data", 0)
    assert phase.step == 0
    assert calls == [("data", 7), ("forward", 7), ("data", 0)]
