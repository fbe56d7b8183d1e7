"""Whether `lmworks diagnose` names planted causes: every case and its undisturbed twin, three times each.

Thresholds are fixed on the half `fit` and scored once on the half `score`. What the verdict was made of is kept run by
run, so that a test judges it again; the gain that a verdict predicted stands beside what the twin's steps really take.

    python benchmarks/planted_causes.py fit                          # what can run here: GPU cases need a GPU
    python benchmarks/planted_causes.py score --save
    python benchmarks/planted_causes.py fit --only "slow read" --runs 1
    python benchmarks/planted_causes.py again          # all figures that are kept, with the thresholds of today
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, commit, machine
from planted_cases import HALVES, Case, SpecCase

HERE = Path(__file__).parent
VARIANTS = ("planted", "twin")
SPECS = ("spec", 2)  # the group of runs of a spec: up to two ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=(*HALVES, "again"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only cases of this device")
    parser.add_argument("--keep", type=Path, help="a folder for the traces")
    parser.add_argument("--recorded", action="store_true", help="judge the traces in that folder again")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.half == "again":
        judge_again(RESULTS / "planted_causes.json")
        return
    here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    programs, specs = HALVES[options.half]
    devices = [name for name in here if options.device in (None, name)]
    chosen = [one for one in programs if options.only in one.name and one.base.device in devices]
    runs = [one for one in specs if options.only in one.name and "cpu" in devices]
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        if not options.recorded:
            record(chosen, runs, options.runs, root)
        found = with_gains(judge_all([*chosen, *runs], options.runs, root))
    print(table(found))
    if options.save:
        path = RESULTS / "planted_causes.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        halves = {half: kept.get(half, {}) for half in HALVES}
        for device in devices:
            rows = [row for row in found if row.pop("device") == device]
            about = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}
            halves[options.half][device] = about | summary(rows)
        path.write_text(json.dumps(halves, indent=1) + "\n")
        print(path)


def record(cases: Sequence[Case], specs: Sequence[SpecCase], runs: int, root: Path) -> None:
    """Programs of one device and one number of ranks share their processes."""
    groups: dict[tuple[str, int], list[tuple[str, dict[str, Any]]]] = {}
    for run in range(runs):
        for one in cases:
            for variant, program in zip(VARIANTS, (one.planted, one.base), strict=True):
                jobs = groups.setdefault((program.device, program.ranks), [])
                jobs.append((str(folder_of(one.name, variant, run)), asdict(program)))

    root.mkdir(parents=True, exist_ok=True)
    cores = core_sets([*groups, *([SPECS] if specs else [])])
    with ThreadPoolExecutor(len(groups) + 1 if cores else 1) as pool:
        ends = [pool.submit(start, key, groups[key], cores.get(key, []), root) for key in sorted(groups, reverse=True)]
        ends += [pool.submit(record_specs, specs, runs, cores.get(SPECS, []), root)]
    for end in ends:
        end.result()


def core_sets(groups: Iterable[tuple[str, int]]) -> dict[tuple[str, int], list[list[int]]]:
    """Two cores for every rank, so that groups do not disturb one another; none where there are too few."""
    free = sorted(os.sched_getaffinity(0))
    if 2 * sum(ranks for _, ranks in groups) > len(free):
        return {}
    places = iter(range(0, len(free), 2))
    return {key: [free[place : place + 2] for place, _ in zip(places, range(key[1]), strict=False)] for key in groups}


def start(key: tuple[str, int], jobs: Sequence[Any], cores: Sequence[Any], root: Path) -> None:
    device, ranks = key
    name = f"{device}{ranks}"
    (root / f"{name}.json").write_text(json.dumps(jobs))
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "planted_program.py"), str(root / f"{name}.json"), str(root)]
    env = os.environ | {"PLANTED_CORES": json.dumps(cores)} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    with (root / f"{name}.log").open("w") as log:  # the profiler writes lines of its own for every recording
        ended = subprocess.run(command, stdout=sys.stdout, stderr=log, env=env)
    if ended.returncode:
        print(f"{key}: {(root / f'{name}.log').read_text()[-2000:]}", flush=True)


def record_specs(specs: Sequence[SpecCase], runs: int, cores: Sequence[list[int]], root: Path) -> None:
    own = [core for rank in cores for core in rank]
    for run in range(runs):
        for one in specs:
            for variant, overrides in zip(VARIANTS, ((*one.base, *one.plant), one.base), strict=True):
                folder = root / folder_of(one.name, variant, run)
                began = time.perf_counter()
                command = [
                    *(["taskset", "-c", ",".join(map(str, own))] if own else []),
                    sys.executable,
                    "-m",
                    "lmworks",
                ]
                command += [
                    "profile",
                    "train",
                    one.spec,
                    *overrides,
                    "--run-dir",
                    str(folder),
                    "--device",
                    "cpu",
                    "--json",
                ]
                ended = subprocess.run(command, capture_output=True, text=True)
                said = ended.stderr[-2000:] if ended.returncode else ""
                print(f"{folder.name}: {time.perf_counter() - began:.1f} s {said}", flush=True)


def folder_of(name: str, variant: str, run: int) -> Path:
    return Path(f"{name.replace(' ', '_').replace(',', '')}-{variant}-{run}")


def judge_all(cases: Sequence[Case | SpecCase], runs: int, root: Path) -> list[dict[str, Any]]:
    keys = [(one, variant, run) for one in cases for variant in VARIANTS for run in range(runs)]
    folders = [root / folder_of(one.name, variant, run) for one, variant, run in keys]
    with ProcessPoolExecutor(8) as pool:
        judged = list(pool.map(judge_folder, folders))
    return [
        {
            "case": one.name,
            "device": "cpu" if isinstance(one, SpecCase) else one.base.device,
            "variant": variant,
            "run": run,
            "work": work_of(one, variant),
            "expected": one.verdict if variant == "planted" else "healthy",
            **verdict,
        }
        for (one, variant, run), verdict in zip(keys, judged, strict=True)
    ]


def work_of(one: Case | SpecCase, variant: str) -> int:
    if isinstance(one, SpecCase):
        return 1  # what is planted in a spec leaves its batch as it is
    return (one.planted if variant == "planted" else one.base).work


def judge_folder(folder: Path) -> dict[str, Any]:
    from lmworks.diagnose.causes import figures_of
    from lmworks.diagnose.verdict import judge
    from lmworks.spec import load_run
    from lmworks.trace import read_trace
    from lmworks.trace.summary import summarise

    paths = sorted(path for path in folder.rglob("*rank*.json*") if "snapshot" not in path.name)
    if not paths:
        return {"verdict": "not recorded"}
    traces = [read_trace(path) for path in paths]
    facts = summarise(traces)
    spec = load_run(str(folder), ()) if (folder / "spec.toml").exists() else None
    judged = judge(traces, facts, spec)
    seconds = median(row["seconds"] for row in facts["steps"])
    return {
        "step_s": seconds,
        "figures": {key: rounded(value) for key, value in asdict(figures_of(traces, facts)).items()},
        **{key: value for key, value in judged.to_dict().items() if key in ("verdict", "kind", "predicted_gain")},
    }


def is_gain_held(one: dict[str, Any]) -> bool:
    """Whether the twin's gain lies in the predicted interval, give or take two points."""
    low, high = (one.get("predicted_gain", {}).get(edge, 0.0) for edge in ("low", "high"))
    return bool(low - 0.02 <= one.get("measured_gain", -1.0) <= high + 0.02)


def judge_again(path: Path) -> None:
    from lmworks.diagnose.causes import Figures
    from lmworks.diagnose.verdict import ranked_causes, worthwhile

    halves = json.loads(path.read_text())
    for half, parts in halves.items():
        for device, part in parts.items():
            for run in part["runs"]:
                ranked = ranked_causes(Figures(**run["figures"]))
                found = worthwhile(ranked)
                best = (found or ranked)[0]
                low, high = (rounded(min(edge, 1.0)) for edge in best.gain)
                run |= {"verdict": best.verdict if found else "healthy", "kind": best.kind if found else ""}
                run["predicted_gain"] = {"low": low, "high": high}
            part |= summary(part["runs"])
            planted = sum(run["variant"] == "planted" for run in part["runs"])
            print(f"{half}, {device}: {part['cases']} cases, right {part['right']:.1%} of {planted}, "
                  f"alarms {part['alarms']:.1%}, gains held {part['gains_held']}")  # fmt: skip
    path.write_text(json.dumps(halves, indent=1) + "\n")


def rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    planted = [one for one in found if one["variant"] == "planted"]
    twins = [one for one in found if one["variant"] == "twin"]
    confusion = Counter((one["expected"], one["verdict"]) for one in found)
    return {
        "cases": len({one["case"] for one in found}),
        "right": sum(one["verdict"] == one["expected"] for one in planted) / max(len(planted), 1),
        "alarms": sum(one["verdict"] != "healthy" for one in twins) / max(len(twins), 1),
        "gains_held": sum(map(is_gain_held, planted)),
        "confusion": [
            {"planted": name, "verdict": verdict, "runs": count} for (name, verdict), count in sorted(confusion.items())
        ],
        "runs": list(found),
    }


def with_gains(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the twin's steps really take, for the same work, beside the gain that was predicted."""
    twins = {(one["case"], one["run"]): one for one in found if one["variant"] == "twin"}

    def gain(one: dict[str, Any]) -> dict[str, Any]:
        twin = twins[one["case"], one["run"]]
        if one is twin or "step_s" not in one or "step_s" not in twin:
            return {}
        return {"measured_gain": 1 - twin["step_s"] / twin["work"] * one["work"] / one["step_s"]}

    return [one | gain(one) for one in found]


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for one in found:
        wrong = " " if one["verdict"] == one["expected"] else "✗"
        gain = one.get("predicted_gain", {"low": 0, "high": 0})
        figures = one.get("figures", {})
        shares = " ".join(f"{key}={figures[key]:.2f}" for key in SHOWN if figures.get(key, 0) > 0.02)
        lines.append(
            f"{wrong} {one['case'][:44]:44} {one['variant']:7} {one['verdict']:15} {one.get('kind', ''):13}"
            f" {1e3 * one.get('step_s', 0):7.1f} ms {gain['low']:.2f}-{gain['high']:.2f}"
            f" {one.get('measured_gain', 0):5.2f} | {shares}"
        )
    result = summary(found)
    return "\n".join([*lines, f"right {result['right']:.1%}, alarms {result['alarms']:.1%}"])


SHOWN = (
    "input", "host", "kernel_gap", "sync", "compute", "exposed", "hidden", "p2p", "wait", "late_share",
    "product", "memory", "unfused", "short_ops", "copy_in", "float32", "recompute", "allocation",
)  # fmt: skip

if __name__ == "__main__":
    main()
