"""How fast a profiler trace is read and judged, beside HTA (traceinsight) on the same file in the same run.

Writes a synthetic trace as Kineto does (ops with shapes, launches, kernels, collectives, memory events, flow arrows),
then measures `lmworks profile trace FILE --json` and HTA's breakdowns of it, each in a process of its own on one core.

    python benchmarks/trace_read.py --size 1G                                   ours alone
    python benchmarks/trace_read.py --size 128M --hta .venv-hta/bin/python      and HTA's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 48
OPS = ("aten::linear", "aten::addmm", "aten::gelu", "aten::native_layer_norm", "aten::add", "aten::mul", "aten::mm")
KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
HTA = """
import os, sys
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)
print(trace.get_temporal_breakdown(visualize=False))
print(trace.get_comm_comp_overlap(visualize=False))
print(trace.get_idle_time_breakdown(ranks=[0], visualize=False)[0])
"""
MEASURE = """
import json, os, resource, subprocess, sys, time
began = time.perf_counter()
os.sched_setaffinity(0, {0})
code = subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], "w")).returncode
use = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"code": code, "wall_s": time.perf_counter() - began, "cpu_s": use.ru_utime + use.ru_stime,
                  "peak_gib": use.ru_maxrss / 2**20}))
"""


def event(name: str, cat: str, start: float, duration: float, process: int, thread: int, args: str) -> str:
    head = f'    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {process}, "tid": {thread},\n'
    return f'  {{\n{head}    "ts": {start:.3f}, "dur": {duration:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'


def step_events(step: int, correlation: int, start: float) -> tuple[list[str], int, float]:
    """One step: 48 layers of ops that launch a kernel each, and an all-reduce a layer on another stream."""
    out, host, device = [], start, start + 50.0
    for layer in range(LAYERS):
        for place, op in enumerate(OPS):
            correlation += 1
            shapes = '"Input Dims": [[4096, 1024], [1024, 4096], [], []], "Input type": ["float", "float", "", ""]'
            out.append(
                event(op, "cpu_op", host, 9.0, 100, 100, f'"External id": {correlation}, "Ev Idx": {place}, {shapes}')
            )
            out.append(
                event(
                    "cudaLaunchKernel", "cuda_runtime", host + 3, 4.0, 100, 100,
                    f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}',
                )
            )  # fmt: skip
            device = max(device, host + 8.0)
            out.append(
                event(
                    KERNEL, "kernel", device, 7.5, 0, 7,
                    f'"External id": {correlation}, "queued": 0, "device": 0, "context": 1, "stream": 7, '
                    f'"correlation": {correlation}, "registers per thread": 40, "shared memory": 0, '
                    '"blocks per SM": 4.74, "warps per SM": 75.85, "grid": [512, 1, 1], "block": [128, 1, 1]',
                )
            )  # fmt: skip
            for ph, process, thread, at in (("s", 100, 100, host + 3), ("f", 0, 7, device)):
                out.append(
                    f'  {{\n    "ph": "{ph}", "id": {correlation}, "pid": {process}, "tid": {thread}, "ts": {at:.3f},\n'
                    '    "cat": "ac2g", "name": "ac2g"\n  }'
                )
            host, device = host + 10.0, device + 8.0
        correlation += 1
        out.append(event("cudaLaunchKernel", "cuda_runtime", host, 4.0, 100, 100, f'"correlation": {correlation}'))
        message = '"Collective name": "allreduce", "In msg nelems": 1048576, "Group size": 8, "dtype": "BFloat16"'
        out.append(
            event(
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", host + 10 + layer % 7, 60.0, 0, 20,
                f'"device": 0, "stream": 20, "correlation": {correlation}, {message}',
            )
        )  # fmt: skip
        out.append(
            f'  {{\n    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 100,\n'
            f'    "ts": {host:.3f},\n    "args": {{ "Total Reserved": 1000, "Total Allocated": 500, "Bytes": 64, '
            '"Device Id": 0, "Device Type": 1 }\n  }'
        )
    out.append(event(f"ProfilerStep#{step}", "user_annotation", start, host - start, 100, 100, '"External id": 1'))
    return out, correlation, max(host, device) + 100.0


def write_synthetic(path: Path, size: int) -> int:
    """A trace of about `size` bytes; returns its events."""
    events, correlation, start, step = 0, 0, 4_000_000_000.0, 0
    with open(path, "w") as file:
        file.write('\n{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "synthetic"}],\n')
        file.write('  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},\n  "traceEvents": [\n')
        while file.tell() < size:
            lines, correlation, start = step_events(step, correlation, start)
            file.write((",\n" if events else "") + ",\n".join(lines))
            events, step = events + len(lines), step + 1
        file.write('\n  ],\n  "traceName": "synthetic.json",\n  "displayTimeUnit": "ms"\n}\n')
    return events


def measured(command: list[str], out: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(out), *command], capture_output=True, text=True, check=True, env=environment
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    if found["code"]:
        raise SystemExit(f"{command[0]} failed: {ran.stderr[-2000:]}")
    return {key: round(value, 2) for key, value in found.items() if key != "code"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="1G", help="of the trace, as 128M or 1G")
    parser.add_argument("--hta", default="", help="a Python that has traceinsight")
    parser.add_argument("--name", default="", help="write benchmarks/results/NAME.json, size by size")
    asked = parser.parse_args()
    size = int(asked.size[:-1]) * {"M": 2**20, "G": 2**30}[asked.size[-1]]
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "rank0.json", Path(folder) / "out.txt"
        began = time.perf_counter()
        events = write_synthetic(path, size)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, {events:,} events, in {time.perf_counter() - began:.0f} s")
        result: dict[str, Any] = {"bytes": path.stat().st_size, "events": events}
        result["lmworks"] = measured([sys.executable, "-m", "lmworks", "profile", "trace", str(path), "--json"], out)
        facts = json.loads(out.read_text())
        result["figures"] = {key: facts[key] for key in ("step_s", "compute_s", "exposed_comm_s", "idle_s")}
        if asked.hta:
            result["hta"] = measured([asked.hta, "-c", HTA, str(path)], out)
            result["hta_output"] = out.read_text().splitlines()
            result["times_faster"] = round(result["hta"]["cpu_s"] / result["lmworks"]["cpu_s"], 1)
        print(json.dumps(result, indent=1))
    if asked.name:
        from common import RESULTS, write_result

        path = RESULTS / f"{asked.name}.json"
        sizes = json.loads(path.read_text())["sizes"] if path.exists() else {}
        print(write_result(asked.name, {"sizes": {**sizes, asked.size: result}}))


if __name__ == "__main__":
    main()
