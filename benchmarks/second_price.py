"""Step time and all steps of short runs on this CPU: predicted before, predicted after ten steps, measured.

    OMP_NUM_THREADS=1 python benchmarks/second_price.py

A dense model and one with experts. Writes results/second_price_cpu.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import write_result

from lmworks.bench.calibrate import probe
from lmworks.record import read_metrics
from lmworks.report.predicted_vs_measured import compare, table_of
from lmworks.spec import load_run
from lmworks.train import Trainer

JOBS = {
    "dense": "tiny data.seq=128 data.micro_batch=8",
    "experts": "tiny data.seq=128 data.micro_batch=8 model.experts=8 model.top_k=2",
}
QUIET = ("cluster.device=cpu", "checkpoint.every=0", "log.eval_every=0", "log.eval_batches=1", "data.path=stdlib:bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    machine, found = probe(torch.device("cpu")), {}
    for name, text in JOBS.items():
        preset, *words = text.split()
        spec = load_run(preset, [*words, f"optim.steps={options.steps}", *QUIET])
        with tempfile.TemporaryDirectory() as place:
            trainer = Trainer(spec, Path(place) / "run", machine=machine, quiet=True)
            trainer.run()
            rows = compare(trainer.folder, read_metrics(trainer.folder.metrics_path))
        rows = [row for row in rows if row.name != "memory_bytes"]  # of the process, which both runs share
        found[name] = {"spec": text, "rows": [row.to_dict() for row in rows]}
        columns, cells = table_of(rows)
        print(name, *("  ".join(f"{cell:>16}" for cell in line) for line in (columns, *cells)), sep="\n", flush=True)
    write_result("second_price_cpu", {"steps": options.steps, "noise": machine.noise, "runs": found})


if __name__ == "__main__":
    main()
