"""Triage: the cause that a health event is put down to. A sequence is an outlier from 5 robust deviations on."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.record.event_text import findings


def data(z: float) -> dict[str, Any]:
    return {"usual_bits": 4.5, "odd": [{"sample": 99, "entropy_bits": 0.5, "z": z}]}


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "step": 13,
        "cursor": 12,
        "action": "log",
        "what": "loss 9 is high",
        "data": data(1.0),
        **fields,
    }


RERUN = {"kind": "rerun", "step": 13, "cursor": 12, "reason": "spike_loss", "loss": 9.0, "grad_norm": None}
RERUN |= {"nonfinite": {"grad_norm": "inf"}, "again": [3.0, 1.0]}
CORRUPT = {"kind": "corrupt", "step": 6, "rank": 2, "copies": [0, 1, 2], "parameters": ["w"], "action": "stop"}


@pytest.mark.parametrize(
    ("events", "cause", "why"),
    [
        ([step("spike", data=data(-8.0))], "data", "sample 99 has 0.50 bits a token, usual is 4.50"),
        ([step("spike", data=data(8.0))], "data", "sample 99"),
        ([step("spike", data=data(5.0))], "data", "sample 99"),
        ([step("spike", data=data(-4.99))], "unclear", "health.rerun = true"),
        ([step("spike")], "unclear", "health.rerun = true"),
        ([{**RERUN, "transient": False}, step("spike")], "numbers", "the same when computed again"),
        ([{**RERUN, "transient": True}], "machine", "computed again: loss 3, gradient norm 1"),
        ([step("fault", transient=False)], "numbers", "the same when computed again"),
        ([step("fault", transient=True, data=data(-8.0))], "machine", "it was finite"),
        ([CORRUPT], "machine", "rank 2 is the outlier"),
        ([{**CORRUPT, "rank": None}], "machine", "no side has the majority"),
    ],
)
def test_cause_from_events(events: list[dict[str, Any]], cause: str, why: str) -> None:
    (found,) = findings([{"kind": "start", "step": 0}, *events])
    assert found.cause == cause and why in found.why


def test_replicas_that_differ_in_many_parameters_name_the_first() -> None:
    (found,) = findings([{**CORRUPT, "parameters": ["a", "b", "c"]}])
    assert found.what == "copies on ranks 0, 1, 2 differ in a and 2 more"
