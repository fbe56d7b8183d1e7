"""Temporal breakdown, overlap and idle time against HTA (traceinsight), on traces that others published.

HTA drops kernels whose launch is not in the trace's steps; so does `as_hta_reads`. It counts synchronisation events of
streams (`cuda_sync`) as time of the device, which they are not: `event_sync` has two µs of them, `alexnet` a late one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmworks.trace import Trace, read_trace
from lmworks.trace.breakdown import Activity
from lmworks.trace.idle import stream_idle
from lmworks.trace.model import DEVICE

DATA = Path(__file__).parent / "data"
FIGURES: dict[str, Any] = json.loads((DATA / "hta.json").read_text())
SYNC_EVENTS_US = {"event_sync.json.gz": 2}
WITHIN = {"alexnet.json.gz": 0.006}  # its last synchronisation ends 76 ms after its last kernel


def as_hta_reads(trace: Trace) -> Trace:
    events = trace.events
    keep = ~events.of(*DEVICE) | (trace.launch >= 0)
    if trace.host_steps:
        keep &= ~events.of(*DEVICE) | (events.start[trace.launch] <= trace.host_steps[-1].end)
    return replace(trace, events=events.take(keep))


@pytest.mark.parametrize("name", FIGURES)
def test_breakdown_and_overlap_are_those_of_hta(name: str) -> None:
    trace, expected = as_hta_reads(read_trace(DATA / name)), FIGURES[name]
    device = trace.events.of(*DEVICE)
    parts = Activity(trace).breakdown(int(trace.events.start[device].min()), int(trace.events.end[device].max()))
    messages = parts.exposed_comm + parts.hidden_comm
    found = {
        "idle_us": parts.idle / 1e3,
        "compute_us": parts.compute / 1e3,
        "non_compute_us": (parts.exposed_comm + parts.copy) / 1e3 + SYNC_EVENTS_US.get(name, 0),
        "kernel_us": parts.window / 1e3,
    }
    assert found == pytest.approx({key: expected[key] for key in found}, rel=WITHIN.get(name, 1e-3), abs=2)
    if expected["overlap_percent"] is None:
        assert not messages
    else:
        assert 100 * parts.hidden_comm / messages == pytest.approx(expected["overlap_percent"], abs=0.01)


@pytest.mark.parametrize("name", FIGURES)
def test_idle_time_of_streams_is_that_of_hta(name: str) -> None:
    found = stream_idle(as_hta_reads(read_trace(DATA / name)))
    for stream, causes in FIGURES[name]["idle_by_stream_us"].items():
        for cause, expected in causes.items():
            assert found[stream][cause] / 1e3 == pytest.approx(expected, rel=1e-3, abs=2), (stream, cause)


@pytest.mark.hta
def test_the_figures_are_what_hta_says() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "trace_oracle.py"
    traces = [str(DATA / name) for name in FIGURES]
    said = subprocess.run([sys.executable, str(script), *traces], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == FIGURES
