"""A link with planted bandwidth and delay: what `bench collectives` fits, and what `plan` predicts of steps over it.

    python benchmarks/shaped_link_cpu.py                      # some minutes; root, for network namespaces

One thread a rank, as in the trainings. The machine may be busy: the link is slow enough that it dominates a step, and
what is timed runs with real-time priority.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import write_result

from lmworks.bench.shaped_link import LinkShape

LMWORKS = [sys.executable, "-m", "lmworks"]
IMAGE = Path(__file__).parent.parent / "docs" / "images" / "communication-link.png"
SPEC = [
    "tiny", "name=wire", "model.layers=4", "model.hidden=256", "model.heads=4", "model.kv_heads=4",
    "data.path=stdlib:bytes", "data.seq=64", "data.micro_batch=1", "data.global_batch=2", "checkpoint.every=0",
    "log.eval_every=0", "log.eval_batches=1", "cluster.device=cpu", "cluster.nodes=2", "parallel.dp=2",
]  # fmt: skip
WARM_UP = 2  # steps


def run(*words: str) -> None:
    subprocess.run([*LMWORKS, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_first(*words: str) -> None:
    """Before all other processes of the machine."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        run(*words)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def fitted(facts: dict[str, Any], shape: LinkShape) -> dict[str, Any]:
    """Of a send, which crosses the link once: α is its delay, β one over its bandwidth."""
    fit = next(one["fit"] for one in facts["fits"] if one["op"] == "send")
    alpha, beta = fit["alpha_us"][0] * 1e-6, fit["beta_ns"][-1] * 1e-9
    planted = {"alpha_s": shape.delay_s, "beta_s_per_byte": 8 / shape.bits_per_s}
    found = {"alpha_s": alpha, "beta_s_per_byte": beta}
    return {"planted": planted, "fitted": found, "error": {key: found[key] / planted[key] - 1 for key in planted}}


def step(strategy: str, link: str, steps: int, profile: Path, folder: Path) -> dict[str, Any]:
    changes = [*SPEC, f"parallel.strategy={strategy}", f"optim.steps={steps}", f"cluster.profile={profile}"]
    run_first("bench", "link", link, "--", *LMWORKS, "train", *changes, "--run-dir", str(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_s"] for line in lines[WARM_UP:]]
    predicted = json.loads((folder / "prediction.json").read_text())
    measured = statistics.median(seconds)
    return {
        "strategy": strategy,
        "predicted_s": predicted["step_s"],
        "parts_s": predicted["step_parts"],
        "interval_s": predicted["interval"],
        "measured_s": measured,
        "steps_s": seconds,
        "error": predicted["step_s"] / measured - 1,
    }


def measure(link: str, steps: int, folder: Path, image: Path) -> dict[str, Any]:
    """Fits of the link into a profile of this machine, and steps over it beside what that profile predicts."""
    profile, wire = folder / "profile.toml", folder / "wire.json"
    run("plan", "calibrate", "--device", "cpu", "--ranks", "2", "--out", str(profile))
    files = ["--profile", str(profile), "--plot", str(image), "--out", str(wire)]
    ops = ["--ops", "all-reduce,reduce-scatter,all-gather,broadcast,send", "--sizes", "4K:4M"]
    run_first("bench", "collectives", "--link", link, *ops, *files)
    facts = json.loads(wire.read_text())
    timed = [step(one, link, steps, profile, folder / one) for one in ("ddp", "fsdp2")]
    found = {"link": facts["link"], "load": os.getloadavg(), **fitted(facts, LinkShape.parse(link)), "steps": timed}
    return {**found, "fits": facts["fits"], "rows": facts["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="100mbit,5ms")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        result = measure(options.link, options.steps, Path(name), IMAGE)
    print(write_result("shaped_link_cpu", result))
    for one in result["steps"]:
        print(f"{one['strategy']}: predicted {one['predicted_s']:.3g} s, measured {one['measured_s']:.3g} s")


if __name__ == "__main__":
    main()
