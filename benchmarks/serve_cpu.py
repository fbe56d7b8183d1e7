"""A server beyond what it can do: `lmworks serve` with a tiny model on this CPU, at 1, 2 and 4 times saturation.

python benchmarks/serve_cpu.py    # about five minutes; writes results/serve*_cpu.json and docs/images/serve-load.svg

Saturation is what a closed loop gets out of it: so many requests under way that the engine is always full. Then
requests come by chance, at multiples of that rate, whether they are served or not. Once with a queue as long as the
promise allows, where the rest is turned away at once, and once with a queue that takes in everybody. Saturation is
measured again before and after every rate, as others may be busy on this machine: goodput is told as a share of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: here, and in the servers that are started

import matplotlib
from common import write_result
from matplotlib.figure import Figure
from serve_overhead import byte_model, measure, served
from serve_overhead import show as show_overhead

from lmworks.bench.serve import Slo, bench_serve
from lmworks.bench.workload import Arrivals, Lengths, Load

SEQS = 16
LENGTHS = Lengths(input=(16, 48), output=(16, 48))
SLO = Slo(ttft=1.0, tpot=0.1)
TIMES = (0.5, 1.0, 2.0, 4.0)
SECONDS = 10.0  # of arrivals, at each rate
QUEUES = {"a queue of 16": 16, "a queue without end": 100_000}
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "serve-load.svg"
matplotlib.rcParams |= {"svg.hashsalt": "lmworks", "svg.fonttype": "none", "font.family": "sans-serif"}


@contextmanager
def with_queue(model: str, length: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.toml"
        config.write_text(f"[limits]\nqueue = {length}\nqueue_seconds = 0.0\n")
        with served(model, "--config", str(config), f"engine.max_seqs={SEQS}") as server:
            yield server.url


def saturation(url: str, seed: int) -> float:
    """Requests a second, when the engine is full and one or two wait for each that leaves."""
    load = Load(160, Arrivals(concurrency=SEQS + 4), LENGTHS, seed=seed)
    return float(bench_serve(url, load, Slo()).to_dict()["requests_per_s"])


def loaded(url: str, full: float, times: float) -> dict[str, Any]:
    rate = full * times
    measured = bench_serve(url, Load(round(rate * SECONDS), Arrivals(rate=rate), LENGTHS, seed=7), SLO)
    facts = measured.to_dict()
    del facts["url"]  # a port of chance
    return {"times": times, "rate": rate, **facts}


def run_queue(model: str, length: int) -> list[dict[str, Any]]:
    with with_queue(model, length) as url:
        saturation(url, seed=1)  # warms up
        runs, before = [], saturation(url, seed=2)
        for times in TIMES:
            run = loaded(url, before, times)
            after = saturation(url, seed=2)
            full = (before + after) / 2
            runs.append({"saturation": full, "share": run["goodput"]["requests_per_s"] / full, **run})
            before = after
        return runs


def draw(found: dict[str, list[dict[str, Any]]]) -> None:
    figure = Figure(figsize=(9.6, 3.8), layout="constrained", facecolor="white")
    good, wait = figure.subplots(1, 2)
    for (name, runs), colour in zip(found.items(), ("#2a6fd6", "#d9622b"), strict=True):
        times = [run["rate"] / run["saturation"] for run in runs]
        good.plot(times, [run["share"] for run in runs], "o-", color=colour, label=name)
        wait.plot(times, [run["ttft_s"]["p99"] for run in runs], "o-", color=colour, label=name)
    good.plot([0, 1, max(TIMES)], [0, 1, 1], "--", color="#8c8f96", linewidth=1, label="ideal")
    good.set(ylabel="goodput, in saturations", ylim=(0, 1.25))
    wait.axhline(SLO.ttft or 0.0, color="#8c8f96", linestyle="--", linewidth=1, label="promised")
    wait.set(ylabel="time to first token, p99, seconds", yscale="log")
    for axes in (good, wait):
        axes.set(xlabel="requests that come, in saturations", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def show(name: str, runs: list[dict[str, Any]]) -> None:
    print(f"{name}:")
    for run in runs:
        print(
            f"  {run['times']:>3g}× {run['requests']:>5} requests at {run['rate']:5.1f}/s: {run['completed']:>4} done, "
            f"{sum(run['rejected'].values()):>4} turned away, {sum(run['errors'].values())} failed; goodput "
            f"{run['goodput']['requests_per_s']:5.1f}/s, {run['share']:.2f} of {run['saturation']:.1f}; "
            f"first token p50 {run['ttft_s']['p50']:.2f} s, p99 {run['ttft_s']['p99']:.2f} s"
        )


if __name__ == "__main__":
    found = {}
    with byte_model() as model:
        for name, length in QUEUES.items():
            found[name] = run_queue(model, length)
            show(name, found[name])
        overhead = measure(model, SEQS, prompt=32, tokens=256, rounds=24, overrides=[])
    draw(found)
    show_overhead(overhead)
    print(write_result("serve_cpu", {"max_seqs": SEQS, "slo": SLO.limits, "loads": found}))
    print(write_result("serve_overhead_cpu", overhead))
