"""Peak memory of deduplication as the corpus grows: all processes together, over real and distinct documents.

    OMP_NUM_THREADS=1 python benchmarks/curate_dedup_memory.py SCRATCH FOLDER_OR_TAR_ARCHIVE… --gigabytes 0.5 1 2

The files of the folders and archives, each content once, are written as one JSON-lines file for each size; a smaller
one is the beginning of a larger one. `lmworks data curate` then runs on each, and the proportional memory (PSS) of its
whole process tree is read ten times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import write_result

GB = 10**9
SAMPLE_S = 0.1
LONGEST = 2**22  # bytes of a document


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Of a folder, or of a tar archive that is read in one pass, without unpacking it."""
    if source.is_dir():
        for path in sorted(path for path in source.rglob("*") if path.is_file() and not path.is_symlink()):
            yield str(path.relative_to(source)), path.read_bytes()
        return
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            if member.isfile() and member.size <= LONGEST and (opened := archive.extractfile(member)):
                yield member.name, opened.read()
            archive.members.clear()  # type: ignore[attr-defined]  # a stream keeps them all otherwise


def documents(sources: list[Path]) -> Iterator[bytes]:
    """Lines of JSON, each content once."""
    seen: set[bytes] = set()
    for source in sources:
        for name, raw in files(source):
            digest = hashlib.blake2b(raw, digest_size=8).digest()
            if not raw or digest in seen or b"\0" in raw or len(raw) > LONGEST:
                continue
            seen.add(digest)
            try:
                yield json.dumps({"text": raw.decode(), "path": name}).encode() + b"\n"
            except UnicodeDecodeError:
                continue


def write_corpora(sources: list[Path], sizes: list[float], scratch: Path) -> dict[float, Path]:
    """Sizes are of the text itself, before JSON's escapes."""
    paths = {size: scratch / f"corpus-{size:g}GB.jsonl" for size in sizes}
    if all(path.exists() for path in paths.values()):
        return paths
    total = 0
    with contextlib.ExitStack() as stack:
        files = {size: stack.enter_context(open(path, "wb")) for size, path in paths.items()}
        for line in documents(sources):
            for size, file in files.items():
                if total < size * GB:
                    file.write(line)
            total += len(json.loads(line)["text"].encode())
            if total >= max(sizes) * GB:
                break
    if total < max(sizes) * GB:
        raise SystemExit(f"the sources hold {total / GB:.2f} GB of distinct text; give more")
    return paths


def tree(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                waiting += map(int, (task / "children").read_text().split())
            except OSError:
                continue
    return found


def memory(pids: list[int]) -> tuple[int, int]:
    """(anonymous and file pages, anonymous ones), shared ones in proportion, in bytes."""
    found = {"Pss:": 0, "Pss_Anon:": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for name, size, *_ in map(str.split, lines):
            if name in found:
                found[name] += int(size) * 1024
    return found["Pss:"], found["Pss_Anon:"]


def step_of(out: Path) -> str:
    """The folder of the work that changed last: phase-N passes over documents, merge-N and end-N compare keys."""
    try:
        return max((path.stat().st_mtime, path.name) for path in (out / ".work").iterdir() if path.is_dir())[1]
    except (OSError, ValueError):
        return "start"


def measure(corpus: Path, dedup: str, workers: int, scratch: Path) -> dict[str, Any]:
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = ["-m", "lmworks", "data", "curate", str(corpus), "--dedup", dedup, "--out", str(out)]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command, "--workers", str(workers), "--json"], stdout=subprocess.PIPE, text=True
    )
    peak = processes = 0
    by_step: dict[str, list[int]] = {}  # at its peak: all pages, anonymous pages
    while process.poll() is None:
        pids = tree(process.pid)
        now = memory(pids)
        peak, processes = max(peak, now[0]), max(processes, len(pids))
        step = step_of(out)
        by_step[step] = max(by_step.get(step, [0, 0]), list(now))
        time.sleep(SAMPLE_S)
    assert process.stdout is not None
    result = json.loads(process.stdout.read())
    seconds = time.monotonic() - began
    shutil.rmtree(out)
    return {
        "peak_mb": round(peak / 1e6, 1),
        "peak_mb_by_step": {step: [round(size / 1e6, 1) for size in sizes] for step, sizes in sorted(by_step.items())},
        "processes": processes,
        "seconds": round(seconds, 1),
        "kept": result["kept"],
        "dropped": result["dropped"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--dedup", default="exact,minhash")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    corpora = write_corpora(args.sources, args.gigabytes, args.scratch)
    found = {f"{size:g} GB": measure(path, args.dedup, args.workers, args.scratch) for size, path in corpora.items()}
    peaks = [one["peak_mb"] for one in found.values()]
    growth = round(peaks[-1] / peaks[0] - 1, 4)
    result = {"dedup": args.dedup, "workers": args.workers, "sizes": found, "growth_of_peak": growth}
    print(write_result("curate_dedup_memory", result).read_text())


if __name__ == "__main__":
    main()
