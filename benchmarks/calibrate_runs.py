"""What `lmworks plan calibrate --from-runs` gains: short runs on this CPU, or published ones, each by the others.

    OMP_NUM_THREADS=1 python benchmarks/calibrate_runs.py
    python benchmarks/calibrate_runs.py --published

Measures the machine, trains every job for some steps, fits the planner's constants to them, and writes
results/calibrate_runs_cpu.json: error before, after, and of each job in the fit of all others. `--published` fits those
of validation/published that no constant of the planner was fitted to, and writes results/calibrate_runs_published.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import write_result

from lmworks.bench.calibrate import probe, save
from lmworks.cli.plan_from_runs import calibrate_from_runs, print_calibration
from lmworks.plan.devices.profile import Profile
from lmworks.record import read_metrics
from lmworks.record.run_summary import median
from lmworks.spec import load_run
from lmworks.train import Trainer

JOBS = (
    "tiny data.seq=128 data.micro_batch=8",
    "tiny data.seq=512 data.micro_batch=2",
    "cpu-3m data.seq=128 data.micro_batch=4",
    "cpu-3m data.seq=256 data.micro_batch=8",
    "cpu-3m data.seq=512 data.micro_batch=2",
    "cpu-10m data.seq=128 data.micro_batch=2",
    "cpu-10m data.seq=256 data.micro_batch=4",
    "cpu-10m data.seq=256 data.micro_batch=2 data.global_batch=4",
    "cpu-10m data.seq=256 data.micro_batch=4 parallel.recompute=full",
    "cpu-3m data.seq=256 data.micro_batch=4 model.mlp=swiglu model.bias=false model.experts=4 model.top_k=2",
)
PUBLISHED = Path(__file__).parents[1] / "validation" / "published"
TABLES = (("bigscience.csv", "a100-sxm-80gb"), ("nemo.csv", "h100"))
QUIET = ("cluster.device=cpu", "checkpoint.every=0", "log.eval_every=0", "log.eval_batches=1", "optim.warmup=2")


def train(text: str, steps: int, profile: Path, folder: Path) -> float | None:
    preset, *words = text.split()
    more = ["model.context=512", f"cluster.profile={profile}", f"optim.steps={steps}", "data.path=stdlib:bytes", *QUIET]
    trainer = Trainer(load_run(preset, [*words, *more]), folder, quiet=True)
    trainer.run()
    return median(read_metrics(folder / "metrics.jsonl"), "step_s")


def published() -> None:
    found = {}
    for table, gpu in TABLES:
        calibrated = calibrate_from_runs([PUBLISHED / table], gpu, "auto")
        print(f"\n{table}, {gpu}")
        print_calibration(calibrated)
        found[f"{table} {gpu}"] = {key: value for key, value in calibrated.fit.to_dict().items() if key != "runs"}
    write_result("calibrate_runs_published", {"tables": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring the machine")
    parser.add_argument("--published", action="store_true")
    options = parser.parse_args()
    if options.published:
        published()
        return
    with tempfile.TemporaryDirectory() as place:
        profile, runs = Path(place) / "profile.toml", Path(place) / "runs"
        machine = probe(torch.device("cpu"), options.seconds)
        save(Profile(machine), profile)
        for number, text in enumerate(JOBS):
            print(f"{train(text, options.steps, profile, runs / f'{number:02}'):8.3f} s  {text}", flush=True)
        found = calibrate_from_runs([runs], "", "cpu")
        print_calibration(found)
        facts = found.fit.to_dict()
        names = {run["label"]: text for text, run in zip(JOBS, facts["runs"], strict=True)}
        for run in facts["runs"]:
            run["label"] = names[run["label"]]
        for score in facts["errors"].values():
            score["worst"] = names[score["worst"]]
        write_result("calibrate_runs_cpu", {"steps": options.steps, "noise": machine.noise, **facts})


if __name__ == "__main__":
    main()
