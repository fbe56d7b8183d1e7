"""Figures that HTA (Holistic Trace Analysis) gives for traces, as JSON: the reference of tests/trace/test_hta.py.

Run it with a Python that has HTA (`pip install traceinsight==0.6.1`); it needs nothing of LMWorks:

    python benchmarks/trace_oracle.py TRACE.json.gz … > figures.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

CONSECUTIVE_KERNEL_DELAY = 30  # ns by HTA's help, compared with µs in its code: its default


def figures(path: Path) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    rank = 0
    trace = TraceAnalysis(trace_files={rank: str(path)}, include_last_profiler_step=True)
    parts = trace.get_temporal_breakdown(visualize=False).iloc[0]
    found: dict[str, Any] = {
        "idle_us": float(parts["idle_time(us)"]),
        "compute_us": float(parts["compute_time(us)"]),
        "non_compute_us": float(parts["non_compute_time(us)"]),
        "kernel_us": float(parts["kernel_time(us)"]),
    }
    overlap = float(trace.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    found["overlap_percent"] = overlap if overlap == overlap else None
    idle, _ = trace.get_idle_time_breakdown(
        ranks=[rank], consecutive_kernel_delay=CONSECUTIVE_KERNEL_DELAY, visualize=False
    )
    found["idle_by_stream_us"] = {
        str(stream): {row["idle_category"]: float(row["idle_time"]) for _, row in rows.iterrows()}
        for stream, rows in idle.groupby("stream")
    }
    return found


def main() -> None:
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"  # else times are cut to whole microseconds
    logging.disable(logging.CRITICAL)
    print(json.dumps({Path(name).name: figures(Path(name).resolve()) for name in sys.argv[1:]}, indent=2))


if __name__ == "__main__":
    main()
