"""Every event that a run can write has a sentence, and no sentence shows a Python object."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import lmworks
from lmworks.record.event_text import DESCRIPTIONS, describe_event

DATA = {"usual_bits": 4.5, "odd": [{"sample": 99, "entropy_bits": 0.5, "z": -8.0}], "sources": {"tokens": 8}}
RAN = {"launch": "lmworks-1", "ranks": 4, "layout": {"dp": 2, "tp": 2}, "accumulation": 8}
HIGH = {"reason": "spike_loss", "cursor": 146, "what": "loss 9 is 12 robust deviations above 3"}
COPIES = {"copies": [0, 1, 2], "parameters": ["a.weight", "b.weight"], "ranks": [2]}

TOLD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "start", "attempt": 0, **RAN}, "training began on 4 ranks (dp 2 tp 2), 8 micro-batches a step"),
    ({"kind": "start", "attempt": 0}, "training began"),
    (
        {"kind": "resume", "step": 1200, "attempt": 1, **RAN, "ranks": 1, "layout": {}, "accumulation": 1},
        "attempt 2 resumed after step 1,200 on 1 rank, 1 micro-batch a step",
    ),
    (
        {"kind": "restart", "attempt": 1, "restarts": 1, "cause": "rank 1 was killed (SIGKILL)", "lost": 15},
        "all ranks were started again (restart 1), 15 steps to be taken again: rank 1 was killed (SIGKILL)",
    ),
    (
        {"kind": "eval", "val_loss": 7.373376, "tokens": 2048, "seconds": 1.1969},
        "validation loss 7.3734 over 2,048 tokens, in 1.2 s",
    ),
    (
        {"kind": "save", "path": "step-000002", "bytes": 36709196, "seconds": 0.0123, "write_s": 1.5},
        "saved step-000002 (35 MiB); training waited 12.3 ms, written in the background in 1.5 s",
    ),
    ({"kind": "save_failed", "path": "step-2", "error": "disk full"}, "step-2 could not be saved: disk full"),
    ({"kind": "copy", "path": "step-2", "remote": "/far", "seconds": 2.0}, "copied step-2 to /far in 2 s"),
    (
        {"kind": "copy_failed", "path": "step-2", "remote": "/far", "seconds": 2.0, "error": "no route"},
        "step-2 could not be copied to /far: no route",
    ),
    ({"kind": "refused", "path": "step-2", "reason": "a bit"}, "checkpoint step-2 was refused: a bit"),
    (
        {"kind": "set_aside", "step": 20, "attempt": 2, "steps": [40, 60], "path": "set-aside-2"},
        "checkpoints of steps 40, 60 were moved to set-aside-2: the run continues from step 20",
    ),
    (
        {"kind": "overflow", "loss_scale": 65536.0, "next_scale": 32768.0},
        "fp16 overflow: the step was left out; loss scale 65536 → 32768",
    ),
    (
        {"kind": "spike", **HIGH, "action": "skip", "z": 11.9, "data": DATA},
        "loss 9 is 12 robust deviations above 3; sample 99 has 0.50 bits a token, usual is 4.50; the step was skipped",
    ),
    ({"kind": "fault", **HIGH, "what": "loss nan", "action": "stop"}, "loss nan; the run was stopped"),
    (
        {"kind": "rerun", **HIGH, "transient": True, "loss": 9.0, "grad_norm": 4.0, "again": [3.0, 1.0]},
        "spike_loss: loss 9, gradient norm 4; computed again: loss 3, gradient norm 1; took the second result",
    ),
    ({"kind": "rerun", **HIGH, "transient": False}, "the step was computed again (spike_loss), with the same result"),
    (
        {"kind": "corrupt", **COPIES, "rank": 2, "action": "stop"},
        "copies on ranks 0, 1, 2 differ in a.weight and 1 more; rank 2 is the outlier; the run was stopped",
    ),
    ({"kind": "skip", "from_cursor": 12, "to_cursor": 15, "reason": "x"}, "skipped windows 12 to 14 (x)"),
    ({"kind": "rewind", "from_step": 9, "to_step": 5, "reason": "x"}, "went back from step 9 to step 5 (x)"),
    ({"kind": "lower_lr", "factor": 0.5, "until": 0, "reason": "x"}, "learning rate × 0.5 to the end (x)"),
    ({"kind": "straggler", "rank": 1, "ratio": 1.4, "recovered": False, "host": "n7"}, "rank 1 on n7 is slow: "),
    (
        {"kind": "hang", "ranks": [3], "cause": "missing", "reports": "hangs/1"},
        "ranks waited for one another (missing)",
    ),
    (
        {"kind": "examples", "path": "a.jsonl", "examples": 1200, "trained_tokens": 3400, "left_out": {"over-long": 3}},
        "1,200 examples of a.jsonl, 3,400 tokens of them trained; left out: 3 over-long",
    ),
    (
        {"kind": "sampler_mismatch", "difference": 0.123, "limit": 0.05},
        "log-probabilities of trainer and engine differ by 0.12 on average, more than 0.05",
    ),
    (
        {"kind": "environment_failed", "share": 0.125, "error": "OSError: gone (mine.py, line 3)"},
        "the environment failed in 12.5% of the episodes: OSError: gone (mine.py, line 3)",
    ),
    (
        {"kind": "early_stop", "kl": 12.345, "limit": 10.0},
        "ended early: the KL divergence of an answer is 12.3, and align.kl_stop = 10",
    ),
    (
        {
            "kind": "early_stop",
            "reason": "held_out",
            "best": 0.5,
            "evaluations": 3,
            "training": 0.75,
            "training_at_best": 0.6,
        },
        "ended early: the reward of held-out prompts has not risen above 0.5 for 3 evaluations, that of training "
        "prompts went from 0.6 to 0.75",
    ),
    (
        {"kind": "eval", "val_loss": -0.25, "reward": 0.25, "tokens": 64, "unit": "answer", "seconds": 2.0},
        "reward 0.2500 over 64 answers, in 2 s",
    ),
    ({"kind": "profile", "first": 5, "last": 7, "ranks": [0, 1]}, "steps 5 to 7 are profiled on 2 ranks"),
    ({"kind": "interrupt", "error": "SIGTERM"}, "stopped: SIGTERM"),
    ({"kind": "fork", "step": 50, "parent": "sweeps/lr/trials/0003"}, "begun from step 50 of sweeps/lr/trials/0003"),
    ({"kind": "pause", "step": 50}, "paused after 50 steps, as asked"),
    ({"kind": "fail", "error": "line one\n  line two"}, "failed: line one line two"),
    ({"kind": "finish", "step": 300}, "finished after 300 steps"),
]


@pytest.mark.parametrize(("event", "told"), TOLD, ids=[str(event["kind"]) for event, _ in TOLD])
def test_event_text(event: dict[str, Any], told: str) -> None:
    said = describe_event({"time": "2026-11-15T12:00:00", "step": 3, **event})
    assert said.startswith(told)
    assert not set("{}[]'\"\n") & set(said)


def test_every_event_kind_has_text() -> None:
    """A new kind of event: add its sentence, and an example above."""
    written = set()
    for file in Path(lmworks.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".event(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                kinds = [
                    part.value for arg in node.args[:1] for part in ast.walk(arg) if isinstance(part, ast.Constant)
                ]
                written |= {kind for kind in kinds if isinstance(kind, str) and kind.isidentifier()}
    assert {"start", "save", "skip", "hang", "overflow"} <= written  # the search itself works
    assert written - set(DESCRIPTIONS) == set()
    assert set(DESCRIPTIONS) == {event["kind"] for event, _ in TOLD}


def test_unknown_event_lists_fields() -> None:
    event = {"time": "", "kind": "landed", "step": 3, "at": {"x": 1.23456, "y": [1, 2]}, "by": None, "ok": True}
    assert describe_event(event) == "at (x 1.235, y 1, 2), ok True"
    assert describe_event({"time": "", "kind": "spike", "step": 4, "zscore": 12.34567}) == "zscore 12.35"
