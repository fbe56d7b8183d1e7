"""The fleet simulator against a real small fleet: fitted on one load, held against another.

python benchmarks/fleet_validation.py            # two servers whose steps are paced (benchmarks/paced_server.py)
python benchmarks/fleet_validation.py --cpu      # two servers whose steps are this machine's: as even as it is quiet

Two `lmworks serve`, a router in the client that sends each request to the server with the fewest in flight. The step
times are fitted on load A alone; load B has another rate and other lengths. B is measured five times with five seeds,
and simulated with the same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: here, and in the servers that are started

import serve_overhead
from common import write_result
from serve_overhead import Up, byte_model, served

from lmworks.bench.http_client import Target, first_model
from lmworks.bench.serve import LoadGenerator, Measured, Outcome, Slo
from lmworks.bench.workload import Arrivals, Lengths, Load, TimedRequest
from lmworks.fleet import fit, results
from lmworks.fleet.autoscale import Static
from lmworks.fleet.routing import make_router
from lmworks.fleet.server_model import ServerModel
from lmworks.fleet.simulate import simulate
from lmworks.fleet.trace import Arrival, Trace
from lmworks.plan.serving.plans import Slo as PlannedSlo

HERE = Path(__file__).parent
SERVERS, REPEATS = 2, 5
SEQS, TOKENS, BLOCKS = 8, 128, 256
ENGINE = (f"engine.max_seqs={SEQS}", f"engine.max_batch_tokens={TOKENS}", f"engine.blocks={BLOCKS}", "engine.block=16")
TOLERANCE = 0.15


@dataclass(frozen=True)
class Loads:
    fitted: Load
    tested: Load
    slo: dict[str, float]


PACED = Loads(
    Load(160, Arrivals(rate=3.0), Lengths(input=(10, 100), output=(10, 60))),
    Load(160, Arrivals(rate=4.5), Lengths(input=(40, 240), output=(20, 80))),
    {"ttft": 0.5, "tpot": 0.075},
)
CPU = Loads(
    Load(160, Arrivals(rate=4.0), Lengths(input=(10, 100), output=(10, 60))),
    Load(160, Arrivals(rate=6.0), Lengths(input=(40, 240), output=(20, 80))),
    {"ttft": 0.5, "tpot": 0.06},
)


@dataclass(frozen=True)
class LeastLoaded(LoadGenerator):
    """A router in the client. `chosen`: the server of each request, by when it was scheduled."""

    targets: Sequence[Target] = ()
    rng: random.Random = field(default_factory=random.Random)
    in_flight: list[int] = field(default_factory=list)
    chosen: dict[float, int] = field(default_factory=dict)

    async def send(self, request: TimedRequest, scheduled: float, start: float) -> Outcome:
        number = min(range(len(self.targets)), key=lambda one: (self.in_flight[one], self.rng.random()))
        self.in_flight[number] += 1
        self.chosen[scheduled - start] = number
        try:
            return await LoadGenerator(self.targets[number], self.path).send(request, scheduled, start)
        finally:
            self.in_flight[number] -= 1


def measure(servers: Sequence[Up], load: Load, slo: dict[str, float]) -> tuple[Measured, list[dict[str, Any]]]:
    targets = [Target.of(server.url) for server in servers]

    async def whole() -> tuple[Measured, list[dict[str, Any]]]:
        name = await first_model(targets[0])
        router = LeastLoaded(targets[0], "/v1/completions", targets=targets, in_flight=[0] * len(targets))
        outcomes = await router.run(load.draw("completions", name))
        rows = [{**one.to_dict(), "server": router.chosen[one.scheduled]} for one in outcomes]
        return Measured(servers[0].url, name, "completions", load, Slo(**slo), tuple(outcomes)), rows

    return asyncio.run(whole())


def trace(load: Load) -> Trace:
    bodies = [(one.at, json.loads(one.body)) for one in load.draw("completions", "")]
    return Trace(tuple(Arrival(at, len(body["prompt"]), body["max_tokens"]) for at, body in bodies), 16)


FIGURES = {
    "ttft_p50_s": lambda sheet: sheet["ttft_s"]["p50"],
    "tpot_p50_s": lambda sheet: sheet["request_itl_s"]["p50"],
    "goodput_per_s": lambda sheet: sheet["goodput"]["requests_per_s"],
    "ttft_p99_s": lambda sheet: sheet["ttft_s"]["p99"],
    "tpot_p99_s": lambda sheet: sheet["request_itl_s"]["p99"],
    "e2e_p50_s": lambda sheet: sheet["e2e_s"]["p50"],
}


def figures(sheet: dict[str, Any]) -> dict[str, float]:
    return {name: read(sheet) for name, read in FIGURES.items()}


def simulated(load: Load, model: ServerModel, slo: dict[str, float], seed: int) -> dict[str, float]:
    run = simulate(trace(load), model, make_router("least_loaded", seed), Static(SERVERS))
    return figures(results.sheet(run, model, PlannedSlo(**slo)))


def compare(measured: list[dict[str, float]], predicted: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FIGURES:
        real, ours = [one[name] for one in measured], [one[name] for one in predicted]
        middle, guess = statistics.median(real), statistics.median(ours)
        row = {"measured": real, "simulated": ours, "off": guess / middle - 1 if middle else None}
        if "p99" not in name:
            row["holds"] = abs(guess / middle - 1) <= TOLERANCE if middle else guess == 0
        elif len(real) > 1:  # within the spread of the repeats
            row["holds"] = min(real) <= guess <= max(real)
        found[name] = row
    return found


def cpu_model(stack: ExitStack) -> str:
    """A run of 17M parameters after one step, its vocabulary bytes: what one step computes outlasts the API's part."""
    folder = stack.enter_context(serve_overhead.tempfile.TemporaryDirectory())
    words = ["train", str(HERE.parent / "configs" / "tiny.toml"), "model.context=512", "model.layers=10"]
    words += ["model.hidden=320", "model.heads=5", "model.kv_heads=5", "model.ffn=1280", "optim.steps=1"]
    subprocess.run(
        [sys.executable, "-m", "lmworks", *words, "--run-dir", f"{folder}/small"], check=True, capture_output=True
    )
    return f"{folder}/small"


def run(cpu: bool) -> dict[str, Any]:
    loads = CPU if cpu else PACED
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with ExitStack() as stack:
        model = cpu_model(stack) if cpu else stack.enter_context(byte_model())
        servers = [stack.enter_context(served(model, *ENGINE, program=None if cpu else HERE / "paced_server.py"))
                   for _ in range(SERVERS)]  # fmt: skip
        warm, _ = measure(servers, Load(16, Arrivals(rate=4.0), loads.fitted.lengths, seed=99), loads.slo)
        assert not warm.with_kind("error"), warm.to_dict()["errors"]
        began = time.time()
        own, rows = measure(servers, loads.fitted, loads.slo)
        fitted = fit.fit([fit.Measured(r["scheduled"], r["prompt_tokens"], r["times"], r["server"]) for r in rows])
        server = fit.to_server(
            fitted, "fleet_validation", blocks=BLOCKS, max_seqs=SEQS, max_batch_tokens=TOKENS, block=16
        )
        tested = [replace(loads.tested, seed=1 + repeat) for repeat in range(REPEATS)]
        busy = [os.getloadavg()[0]]
        measured = []
        for load in tested:
            found, _ = measure(servers, load, loads.slo)
            measured.append(figures(found.to_dict()))
            busy.append(os.getloadavg()[0])
            print(json.dumps(measured[-1]), json.dumps(simulated(load, server, loads.slo, 0)), flush=True)
    predicted = [simulated(load, server, loads.slo, n) for n, load in enumerate(tested)]
    return {
        "minutes": (time.time() - began) / 60,
        "load_average": busy,
        "fit": {
            "steps": fitted.count, "median_error": fitted.median_error, "idle_requests": fitted.idle_requests,
            "base_s": server.steps.decoding(0), "sequence_s": server.steps.decoding(1) - server.steps.decoding(0),
            "key_s": server.steps.key, "prompt_token_s": server.steps.prompt_token,
            "prompt_key_s": server.steps.prompt_key, "request_s": server.request_s,
        },
        "loads": {name: describe(getattr(loads, name)) for name in ("fitted", "tested")},
        "slo": loads.slo,
        "fitted_load": compare([figures(own.to_dict())], [simulated(loads.fitted, server, loads.slo, 0)]),
        "tested_load": compare(measured, predicted),
    }  # fmt: skip


def describe(load: Load) -> dict[str, Any]:
    lengths = load.lengths
    return {"requests": load.requests, "rate": load.arrivals.rate, "input": lengths.input, "output": lengths.output}


VERDICT = {True: "holds", False: "MISSED", None: ""}


def show(found: dict[str, Any]) -> None:
    for which in ("fitted_load", "tested_load"):
        print(which)
        for name, row in found[which].items():
            real = statistics.median(row["measured"])
            print(f"  {name:<14} measured {real:8.4f} ({min(row['measured']):.4f} to {max(row['measured']):.4f}), "
                  f"simulated {statistics.median(row['simulated']):8.4f}: "
                  f"{row['off'] or 0:+.1%} {VERDICT[row.get('holds')]}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    cpu = parser.parse_args().cpu
    found = run(cpu)
    show(found)
    print(write_result("fleet_validation_cpu" if cpu else "fleet_validation", found))
