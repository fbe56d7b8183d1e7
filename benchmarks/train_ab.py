"""Two versions of the code in turn, in one job: `lmworks bench train` of the same spec, old, new, old, new.

    git archive OLD src | tar -x -C /tmp/old
    python benchmarks/train_ab.py /tmp/old/src --name gpt2 gpt2-small data.micro_batch=64 data.seq=1024

Cards and days differ by more than a change gains; turns in one job do not. Results are kept in results/train_ab.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import RESULTS, write_result

NEW = Path(__file__).parent.parent / "src"


def step_ms(source: Path, words: list[str], steps: int) -> float:
    paths = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lmworks", "bench", "train", *words, "--steps", str(steps), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True)
    return 1e3 * float(json.loads(done.stdout)["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the other version's src folder")
    parser.add_argument("words", nargs="+", help="a spec and its overrides")
    parser.add_argument("--name", required=True, help="of the row in the results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    asked = parser.parse_args()
    took: dict[str, list[float]] = {"old_ms": [], "new_ms": []}
    for _ in range(asked.rounds):
        for name, source in (("old_ms", asked.old), ("new_ms", NEW)):
            took[name].append(round(step_ms(source, asked.words, asked.steps), 2))
            print(f"{asked.name} {name} {took[name][-1]}", flush=True)
    path = RESULTS / "train_ab.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    write_result("train_ab", {"rows": {**rows, asked.name: took}})


if __name__ == "__main__":
    main()
