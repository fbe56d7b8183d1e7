"""The tests that need a GPU, each file in a process of its own, some side by side, and what came of them.

    python benchmarks/gpu_tests.py                                   all of tests/gpu
    python benchmarks/gpu_tests.py test_flash_gpu test_engine_gpu    some of the files

results/gpu_tests.json has every file's last run with its commit; those that are not run keep what they had. Nothing in
it is timed for its own sake: most of their time processes compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from common import RESULTS, commit, write_result

TESTS = Path(__file__).parents[1] / "tests" / "gpu"
SIDE_BY_SIDE = 8


def run(file: Path, limit_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={told}", str(file)], capture_output=True, text=True, check=False,
                timeout=limit_s, env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
            )  # fmt: skip
            facts = outcome(ElementTree.parse(told)) if told.exists() else {"failed": [done.stdout[-500:]]}
        except subprocess.TimeoutExpired:
            facts = {"failed": [f"not done within {limit_s:.0f} s"]}
    return {**facts, "seconds": time.perf_counter() - began, "commit": commit()}


def outcome(told: ElementTree.ElementTree[Any]) -> dict[str, Any]:
    """How many passed, and by name which failed, with the first line of why, and which were skipped."""
    facts: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in told.iter("testcase"):
        trouble = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if trouble is not None:
            facts["failed"].append(f"{case.get('name')}: {(trouble.get('message') or '').partition(chr(10))[0][:200]}")
        elif (left := case.find("skipped")) is not None:
            facts["skipped"].append(f"{case.get('name')}: {left.get('message')}")
        else:
            facts["passed"] += 1
    return facts


def main() -> None:
    files = {file.stem: file for file in sorted(TESTS.glob("test_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(files))
    parser.add_argument("--limit", type=float, default=300, help="seconds of a file")
    options = parser.parse_args()
    if unknown := [name for name in options.files if name not in files]:
        parser.error(f"there is no {', '.join(unknown)}; use some of {', '.join(files)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU: here every test would be skipped")
    path = RESULTS / "gpu_tests.json"
    found = json.loads(path.read_text(encoding="utf-8"))["files"] if path.exists() else {}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {pool.submit(run, files[name], options.limit): name for name in options.files}
        for done in as_completed(running):
            name, facts = running[done], done.result()
            found[name] = facts
            write_result("gpu_tests", {"files": dict(sorted(found.items()))})
            told = f"{facts.get('passed', 0)} passed, {len(facts.get('skipped', []))} skipped"
            print(f"{name}: {told}, {len(facts['failed'])} failed ({facts['seconds']:.0f} s)", flush=True)
            for line in facts["failed"]:
                print(f"    {line}", flush=True)
    sys.exit(any(found[name]["failed"] for name in options.files))


if __name__ == "__main__":
    main()
