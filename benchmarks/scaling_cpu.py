"""Why scaling stalls: weak and strong scaling of DDP measured over 1, 2 and 4 ranks and two links, predicted for 8 to
4,096 GPUs (scaling_planned.py), and the bandwidth of an all-reduce by its size.

    python benchmarks/scaling_cpu.py                      # some 15 minutes; root, for network namespaces
    python benchmarks/scaling_cpu.py --planned            # the plans and pictures again, measurements as they are

Ranks have one thread each and sit on two nodes (network namespaces), each with one core of this machine. So four ranks
have half a core each: their ideal step is that of one rank times two. Steps with messages and passes without them are
timed in turns on the same ranks and cores; their difference is what communication costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from common import RESULTS, write_result
from scaling_pictures import draw_measured, draw_planned
from scaling_planned import planned

from lmworks.spec import load_run

LMWORKS = [sys.executable, "-m", "lmworks"]
CORES = 2  # one for each node
LINKS = ("10gbit", "300mbit")
RANKS = (1, 2, 4)
SEQUENCES = 8  # of a rank in weak scaling, of the whole step in strong scaling
SPEC = [
    "tiny", "name=scaling", "model.layers=4", "model.hidden=256", "model.heads=4", "model.kv_heads=4",
    "data.path=stdlib:bytes", "data.seq=64", "cluster.device=cpu", "parallel.strategy=ddp", "parallel.bucket_mb=2",
]  # fmt: skip
WARM_UP = 2  # steps
ROUNDS = 12
SWEEPS = 3  # of all set-ups, one after the other: what else runs on the machine changes with time
WIRE = ["--ops", "all-reduce", "--sizes", "1K:16M", "--ranks", "2", "--json"]


def before_others() -> None:
    """In a new session, whose scheduling group and processes come before those of others."""
    os.setsid()
    with suppress(OSError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text("-20")
    os.setpriority(os.PRIO_PROCESS, 0, -20)


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, check=True, env=environment, text=True, preexec_fn=before_others, **more)


# --- one set-up -------------------------------------------------------------------------------------------


def changes(scaling: str, ranks: int) -> list[str]:
    each = SEQUENCES if scaling == "weak" else SEQUENCES // ranks
    layout = [f"parallel.dp={ranks}", f"cluster.nodes={min(ranks, CORES)}", f"cluster.gpus_per_node={per_node(ranks)}"]
    return [*SPEC, *layout, f"data.micro_batch={each}", f"data.global_batch={each * ranks}"]


def per_node(ranks: int) -> int:
    return -(-ranks // CORES)


def measure(scaling: str, ranks: int, link: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rank0.json"
        command = [sys.executable, __file__, "--rank", str(out), *changes(scaling, ranks)]
        if ranks > 1:
            command = [*LMWORKS, "bench", "link", link, "--ranks-per-node", str(per_node(ranks)), "--", *command]
        run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
    return {"scaling": scaling, "ranks": ranks, "link": link if ranks > 1 else "", **found}


def on_rank(out: Path, overrides: list[str]) -> None:
    """Time own steps and passes without messages in turns; rank 0 writes the medians over rounds."""
    os.sched_setaffinity(0, {int(os.environ.get("GROUP_RANK", 0)) % (os.cpu_count() or 1)})
    from lmworks.bench.overlap import TimedTrainer
    from lmworks.parallel.world import all_gather_object, distributed_shutdown, is_rank_zero

    spec = load_run(overrides[0], overrides[1:])
    with distributed_shutdown(), TemporaryDirectory() as scratch:
        folder = Path(str(all_gather_object(scratch)[0]))
        own = TimedTrainer(spec, folder / "own")
        alone = TimedTrainer(spec, folder / "alone", silent_passes=True) if spec.parallel.dp > 1 else own
        trainers = list(dict.fromkeys([own, alone]))
        for number in range(WARM_UP + ROUNDS):
            for one in trainers[:: 1 if number % 2 else -1]:
                if number == WARM_UP:
                    one.restart_clock()
                one.step()
        (steps, passes), (_, silent) = own.slowest(), alone.slowest()
        exposed, hidden = own.traced(folder / "traces") if spec.parallel.dp > 1 else (0.0, 0.0)
        all_gather_object(None)  # nobody removes the folder before all are through
    if is_rank_zero():
        cost = median(one - other for one, other in zip(passes, silent, strict=True))
        figures = {"step_s": median(steps), "comm_s": cost, "traced_exposed_s": exposed, "traced_hidden_s": hidden}
        out.write_text(json.dumps({**figures, "tokens": spec.tokens_per_step}))


# --- all of them ------------------------------------------------------------------------------------------


def setups() -> list[tuple[str, int, str]]:
    several = [(scaling, ranks, link) for scaling in ("weak", "strong") for ranks in RANKS[1:] for link in LINKS]
    return [("weak", 1, LINKS[0]), *several]  # one rank: both kinds, and no link


def measured() -> list[dict[str, Any]]:
    """Medians over the sweeps, with efficiency and its range: each sweep has its own step of one rank."""
    sweeps = []
    for number in range(SWEEPS):
        sweeps.append([measure(*one) for one in setups()])
        print(f"sweep {number + 1} of {SWEEPS}: load {os.getloadavg()[0]:.1f}", flush=True)
    return [summary([sweep[0] for sweep in sweeps], several) for several in zip(*sweeps, strict=True)]


def summary(singles: list[dict[str, Any]], several: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The step of a set-up over the ideal one: as many tokens for each core and second as one rank has.

    What communication costs was timed; the rest of what is lost is compute: smaller matrices, an optimizer that every
    rank runs whole, cores that share memory.
    """
    ranks = several[0]["ranks"]
    cores = min(ranks, CORES)
    lost, efficiency = [], []
    for single, one in zip(singles, several, strict=True):
        ideal = single["step_s"] * one["tokens"] / single["tokens"] / cores
        efficiency.append(ideal / one["step_s"])
        comm = max(0.0, one["comm_s"]) / one["step_s"]
        lost.append({"communication": comm, "compute": 1 - efficiency[-1] - comm})
    keys = ("step_s", "comm_s", "traced_exposed_s", "traced_hidden_s")
    return {
        **{key: several[0][key] for key in ("scaling", "ranks", "link", "tokens")},
        "cores": cores,
        **{key: median(one[key] for one in several) for key in keys},
        "efficiency": median(efficiency),
        "efficiency_range": [min(efficiency), max(efficiency)],
        "lost": {part: median(one[part] for one in lost) for part in lost[0]},
    }


def wire() -> dict[str, Any]:
    """By link: rows and fit of an all-reduce between the nodes, and the step of two ranks that a plan predicts."""
    found = {}
    with TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.toml")
        run([*LMWORKS, "plan", "calibrate", "--device", "cpu", "--ranks", "2", "--out", profile])
        for link in LINKS:
            measured_link = ["--link", link, "--profile", profile, *WIRE]
            facts = json_of(["chrt", "--rr", "1", *LMWORKS, "bench", "collectives", *measured_link])  # a core a rank
            plans = {
                scaling: json_of([*LMWORKS, "plan", *changes(scaling, 2), f"cluster.profile={profile}", "--json"])
                for scaling in ("weak", "strong")
            }
            found[link] = {
                "rows": [row for row in facts["rows"] if row["in_place"]],
                "fit": next(one["fit"] for one in facts["fits"] if one["in_place"]),
                "predicted_s": {scaling: plan["step_s"] for scaling, plan in plans.items()},
            }
    return found


def json_of(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(command, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planned", action="store_true", help="measure nothing again")
    parser.add_argument("--wire", action="store_true", help="measure links and rates of this machine again, no steps")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        on_rank(Path(options.rank[0]), options.rank[1:])
        return
    if options.planned or options.wire:
        result = json.loads((RESULTS / "scaling_cpu.json").read_text())
        result |= {"wire": wire()} if options.wire else {}
    else:
        before = os.getloadavg()[0]
        result = {"wire": wire(), "measured": measured(), "load": [before, os.getloadavg()[0]]}
    result["planned"] = planned()
    print(write_result("scaling_cpu", result))
    draw_measured(result)
    draw_planned(result)


if __name__ == "__main__":
    main()
