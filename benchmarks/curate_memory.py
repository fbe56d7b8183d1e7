"""Peak memory of `lmworks data curate`, all its processes together, for corpora of different sizes.

    python benchmarks/curate_memory.py --out curate_memory SMALL-FOLDER LARGE-FOLDER

Memory is the sum of the processes' proportional set sizes (pages that they share count once), looked at every 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_result

STAGES = ["--rules", "code_language,code,license", "--dedup", "exact"]


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in family(int(child)))]


def pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(source: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = [sys.executable, "-m", "lmworks", "data", "curate", source, "--out", f"{folder}/out", *STAGES]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "--workers", str(workers), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(map(pss_bytes, family(process.pid))))
            time.sleep(0.2)
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
    return {
        "source": Path(source).name,
        "megabytes": round(result["read"]["bytes"] / 1e6, 1),
        "documents": result["read"]["documents"],
        "kept": result["kept"]["documents"],
        "peak_megabytes": round(peak / 1e6, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    runs = []
    for folder in given.folders:
        runs.append(measure(folder, given.workers))
        print(json.dumps(runs[-1]), flush=True)
    if given.out:
        write_result(given.out, {"stages": STAGES, "workers": given.workers, "runs": runs})


if __name__ == "__main__":
    main()
