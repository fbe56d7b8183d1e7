"""The critical path through the steps: the chain of kernels, launches and host work that the end waits for.

From the end backwards: what held a kernel back was the kernel before it on its stream, or its launch where that came
later. A launch was held back by the host's work before it, back to where the host had waited for the device; there the
path goes on with the kernel that it had waited for. Kernels of other streams are entered where a wait between streams
leaves no other cause.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from .idle import device_waits
from .model import DEVICE, Kind, Trace

LABEL = {Kind.KERNEL: "compute", Kind.COLLECTIVE: "communication", Kind.COPY: "copy", Kind.MEMSET: "copy"}


def critical_path(trace: Trace, top: int = 10) -> dict[str, Any] | None:
    """Seconds of the path by kind, and the kernels that have most of it. None without a device."""
    if not trace.on_device or not trace.steps:
        return None
    events, begin, end = trace.events, trace.steps[0].start, trace.steps[-1].end
    device = np.flatnonzero(events.of(*DEVICE) & (events.start >= begin) & (events.end <= end))
    if not len(device):
        return None
    by_end = device[np.argsort(events.end[device], kind="stable")]
    ends = events.end[by_end]
    before = previous_on_lane(trace, device)
    wait_ends = np.sort(events.end[device_waits(trace)])

    kinds: defaultdict[str, int] = defaultdict(int)
    names: defaultdict[str, int] = defaultdict(int)
    row, time = int(by_end[-1]), int(ends[-1])
    for _ in range(2 * len(device)):
        held = max(int(events.start[row]), begin)
        add(kinds, names, LABEL[Kind(events.kind[row])], trace.names[events.name[row]], time - held)
        time = held
        call, last = int(trace.launch[row]), before.get(row, -1)
        launched = int(events.start[call]) if call >= 0 else begin
        if last >= 0 and int(events.end[last]) >= launched:  # its stream was busy
            after = int(events.end[last])
            add(kinds, names, "kernel_gap", "", time - after)
            row, time = last, after
            continue
        place = int(np.searchsorted(ends, time, side="right")) - 1
        if launched <= begin:
            add(kinds, names, "host", "", time - begin)
            break
        if place >= 0 and int(ends[place]) > int(events.end[call]) and by_end[place] != row:
            after = int(ends[place])  # launched in time: another stream held it back
            add(kinds, names, "kernel_gap", "", time - after)
            row, time = int(by_end[place]), after
            continue
        add(kinds, names, "launch", "", time - launched)
        time = launched
        # The host since its last wait for the device; then what it waited for.
        spot = int(np.searchsorted(wait_ends, time, side="right")) - 1
        back = max(int(wait_ends[spot]), begin) if spot >= 0 else begin
        add(kinds, names, "host", "", time - back)
        time = back
        place = int(np.searchsorted(ends, time, side="right")) - 1
        if time <= begin or place < 0:
            break
        add(kinds, names, "synchronisation", "", time - int(ends[place]))
        row, time = int(by_end[place]), int(ends[place])
    order = sorted(names.items(), key=lambda item: -item[1])[:top]
    return {
        "seconds": sum(kinds.values()) / 1e9,
        "by_kind": {kind: length / 1e9 for kind, length in sorted(kinds.items(), key=lambda item: -item[1])},
        "longest": [{"name": name, "seconds": length / 1e9} for name, length in order],
    }


def add(kinds: defaultdict[str, int], names: defaultdict[str, int], kind: str, name: str, length: int) -> None:
    if length > 0:
        kinds[kind] += length
        if name:
            names[name] += length


def previous_on_lane(trace: Trace, device: np.ndarray) -> dict[int, int]:
    """Event of the device → the one before it on its stream."""
    order = device[np.lexsort((trace.events.start[device], trace.events.lane[device]))]
    same = trace.events.lane[order[1:]] == trace.events.lane[order[:-1]]
    return dict(zip(order[1:][same].tolist(), order[:-1][same].tolist(), strict=True))
