"""Which tuning algorithm wins where: every sampler and stopper replayed on the table of small trainings, beside
Optuna's own pruners and Ray Tune's own schedulers.

    python benchmarks/tuning_replay.py --gp-seeds 20            # 50 seeds of everything else; --jobs processes
    python benchmarks/tuning_replay.py --seeds 5 --algorithms random,tpe --table FILE --out FOLDER

Ray Tune's schedulers are driven without a cluster: each gets the results of one trial after the other, as its own
controller would hand them on. Without Ray installed its rows are left out; so are its Hyperband, which pauses trials
of a real cluster only, and its ASHA with gp: its search hands stopped trials on as complete ones, and a Gaussian
process of two hundred points takes two minutes a seed.

Result: results/tuning_replay_FIRST.json and plots: medians of the regret by compute and by trials with quartiles, its
mean with a 95 % interval (bootstrap over seeds), and how far our ASHA is from the best of each sampler, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, write_result

from lmworks.report.plots import new_axes, save
from lmworks.tune.replay import Moment, Table, incumbent_regret, regret_after, regret_at, replay
from lmworks.tune.rungs import hyperband_brackets, hyperband_plan
from lmworks.tune.stoppers import Asha, Hyperband, MedianStopper, NoStopper, Results, Stopper
from lmworks.tune.storage import import_optuna
from lmworks.tune.suggest import sampler_of, suggest

ALGORITHMS = ("random", "sobol", "tpe", "gp", "cmaes")
STOPPERS = ("none", "median", "asha", "hyperband")
ETA = 4
COMPUTE = (0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24)  # whole trainings
COMPARED = (4, 8, 16, 24)  # of them: where our ASHA is held against the others
DRAWS = 2000
LEAST = 1e-4  # regret that is drawn: less than the digits of the table


@dataclass(frozen=True)
class Limits:
    trials: int
    budget: float  # of compute, in whole trainings
    first: int  # rung: 1 is 1/64 of a training, 16 a quarter


def stopper_on(table: Table, name: str, limits: Limits) -> Stopper:
    rungs = table.subset(limits.first, ETA)
    if name == "asha":
        return Asha(rungs, ETA, limits.trials)
    if name == "hyperband":
        brackets = hyperband_brackets(limits.first, rungs[-1], ETA)
        return Hyperband(rungs, ETA, tuple(hyperband_plan(limits.trials, brackets, ETA)))
    return MedianStopper(rungs) if name == "median" else NoStopper(rungs)


# --- the others' own ------------------------------------------------------------------------------------------


def sequential(
    table: Table,
    limits: Limits,
    next_point: Callable[[int], Any],
    goes_on: Callable[[int, int, float], bool],
    ended: Callable[[int, bool, float], None],
) -> list[Moment]:
    """One trial after the other; `goes_on(number, step, loss)` after each rung."""
    results, points, moments, spent = Results(), {}, [], 0.0
    rungs = table.subset(limits.first, ETA)
    for number in range(limits.trials):
        if spent >= limits.budget:
            break
        points[number] = next_point(number)
        before, passed = 0, True
        for step in rungs:
            spent += (step - before) / rungs[-1]
            before, loss = step, table.loss(points[number], step)
            results.report(number, step, loss)
            moments.append(Moment(spent, number + 1, incumbent_regret(table, results, points)))
            passed = goes_on(number, step, loss)
            if not passed:
                break
        ended(number, passed and step == rungs[-1], loss)
    return moments


def optuna_own(table: Table, algorithm: str, stopper: str, limits: Limits, seed: int) -> list[Moment]:
    optuna = import_optuna()
    pruners = optuna.pruners
    pruner = {
        "none": pruners.NopPruner(),
        "median": pruners.MedianPruner(n_startup_trials=5),
        "asha": pruners.SuccessiveHalvingPruner(min_resource=limits.first, reduction_factor=ETA),
        "hyperband": pruners.HyperbandPruner(
            min_resource=limits.first, max_resource=table.rungs[-1], reduction_factor=ETA
        ),
    }[stopper]
    study = optuna.create_study(sampler=sampler_of(algorithm, seed), pruner=pruner, study_name="replay")
    asked: dict[int, Any] = {}

    def next_point(number: int) -> Any:
        asked[number] = study.ask()
        return suggest(asked[number], table.space)

    def goes_on(number: int, step: int, loss: float) -> bool:
        asked[number].report(loss, step)
        return not asked[number].should_prune()

    def ended(number: int, whole: bool, loss: float) -> None:
        if whole and math.isfinite(loss):
            study.tell(asked[number], loss)
        else:
            study.tell(asked[number], state=optuna.trial.TrialState.PRUNED)

    return sequential(table, limits, next_point, goes_on, ended)


@dataclass(eq=False)
class RayTrial:
    """What Ray's schedulers ask of a trial."""

    trial_id: str
    config: dict[str, Any]
    status: str = "RUNNING"

    def is_finished(self) -> bool:
        return False


class RayController:
    """No other trial is alive: one runs after the other."""

    def get_live_trials(self) -> set[RayTrial]:
        return set()


def ray_own(table: Table, algorithm: str, stopper: str, limits: Limits, seed: int) -> list[Moment]:
    """Ray's schedulers with Ray's search through Optuna's sampler."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
    from ray.tune.search.optuna import OptunaSearch

    import_optuna()
    warnings.filterwarnings("ignore", message="Define-by-run function")  # a sampler that took a second
    metric = {"metric": "loss", "mode": "min"}
    clock = {"time_attr": "training_iteration"}
    scheduler: Any = {
        "none": lambda: FIFOScheduler(),
        "median": lambda: MedianStoppingRule(**clock, **metric, grace_period=limits.first, min_samples_required=5),
        "asha": lambda: ASHAScheduler(
            **clock, **metric, max_t=table.rungs[-1], grace_period=limits.first, reduction_factor=ETA
        ),
    }[stopper]()
    search = OptunaSearch(
        lambda trial: suggest(trial, table.space) and None, sampler=sampler_of(algorithm, seed), **metric
    )
    started: dict[int, Any] = {}
    controller = RayController()

    def next_point(number: int) -> Any:
        point = search.suggest(str(number))
        started[number] = RayTrial(str(number), point)
        scheduler.on_trial_add(controller, started[number])
        return point

    def goes_on(number: int, step: int, loss: float) -> bool:
        result = {"training_iteration": step, "loss": loss, "trial_id": str(number), "time_total_s": float(step)}
        search.on_trial_result(str(number), result)
        return scheduler.on_trial_result(controller, started[number], result) == TrialScheduler.CONTINUE

    def ended(number: int, whole: bool, loss: float) -> None:
        result = {"training_iteration": table.rungs[-1], "loss": loss}
        scheduler.on_trial_complete(controller, started[number], result)
        search.on_trial_complete(str(number), result)

    return sequential(table, limits, next_point, goes_on, ended)


# --- all of it ------------------------------------------------------------------------------------------------


Case = tuple[str, str, str]  # who, sampler, stopper


def run_one(job: tuple[str, str, str, Limits, int, str]) -> list[Moment]:
    """A search whose incumbent diverges later has the regret of the worst training that does not."""
    who, algorithm, stopper, limits, seed, path = job
    table = Table.read(Path(path))
    worst = max(curve[-1] for curve in table.losses.values() if math.isfinite(curve[-1])) - table.best
    moments = search(who, table, algorithm, stopper, limits, seed)
    return [replace(moment, regret=min(moment.regret, worst)) for moment in moments]


def search(who: str, table: Table, algorithm: str, stopper: str, limits: Limits, seed: int) -> list[Moment]:
    if who == "optuna":
        return optuna_own(table, algorithm, stopper, limits, seed)
    if who == "ray":
        return ray_own(table, algorithm, stopper, limits, seed)
    judge = stopper_on(table, stopper, limits)
    return replay(table, algorithm, judge, limits.trials, seed, budget=limits.budget)


def has_ray() -> bool:
    try:
        import ray.tune  # noqa: F401
    except ImportError:
        return False
    return True


def summary(each: Sequence[list[Moment]]) -> dict[str, Any]:
    """Median and quartiles over seeds."""

    def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
        known = sorted(value for value in values if value is not None)
        if len(known) < len(values) / 2:
            return None
        low, middle, high = statistics.quantiles(known, n=4) if len(known) > 1 else known * 3
        quartiles = {"median": round(middle, 5), "low": round(low, 5), "high": round(high, 5)}
        return {**quartiles, **mean_of(known)}

    most = statistics.median(moments[-1].trials for moments in each)
    counts = [count for count in (2, 4, 8, 16, 32, 64, 128, 256) if count <= most]
    return {
        "compute": {str(c): spread([regret_at(moments, c) for moments in each]) for c in COMPUTE},
        "trials": {str(n): spread([regret_after(moments, n) for moments in each]) for n in counts},
        "spent": round(statistics.fmean(moments[-1].compute for moments in each), 2),
        "final": spread([moments[-1].regret for moments in each]),
    }


def mean_of(values: Sequence[float]) -> dict[str, Any]:
    """With its 95 % interval."""
    each = np.array(values)
    means = np.random.default_rng(0).choice(each, (DRAWS, len(each))).mean(1)
    return {
        "mean": round(float(each.mean()), 5),
        "ci95": [round(float(q), 5) for q in np.quantile(means, [0.025, 0.975])],
    }


def comparisons(regrets: dict[Case, list[list[Moment]]]) -> list[dict[str, Any]]:
    """For each sampler and compute: the search with the lowest mean regret, and how far our ASHA is from it and from
    the others' ASHA, seed by seed."""
    found = []
    for algorithm in dict.fromkeys(algorithm for _, algorithm, _ in regrets):
        ours = ("lmworks", algorithm, "asha")
        for compute in COMPARED if ours in regrets else ():
            at = {
                case: [one if (one := regret_at(moments, compute)) is not None else math.inf for moments in each]
                for case, each in regrets.items()
                if case[1] == algorithm
            }
            best = min(at, key=lambda case: (statistics.fmean(at[case]), case != ours))
            row: dict[str, Any] = {"algorithm": algorithm, "compute": compute, "best": f"{best[0]} {best[2]}"}
            for name, case in {"best": best, **{case[0]: case for case in at if case[2] == "asha"}}.items():
                differences = [mine - theirs for mine, theirs in zip(at[ours], at[case], strict=True)]
                if case != ours or name == "best":
                    row[f"ours_minus_{name}"] = mean_of(differences)
            found.append(row)
    return found


def draw(found: list[dict[str, Any]], kind: str, label: str, path: Path) -> None:
    """The mean regret of each sampler with the stopper that served it best; ours with its 95 % interval."""
    figure, axes = new_axes("regret: loss above the best of the table")
    colours = dict(zip(ALGORITHMS, ("#808080", "#c08020", "#3060b0", "#30a060", "#a03080"), strict=True))
    styles = {"lmworks": "-", "optuna": "--", "ray": ":"}
    for who in styles:
        for algorithm in ALGORITHMS:
            rows = [row for row in found if row["who"] == who and row["algorithm"] == algorithm]
            if not rows:
                continue
            best = min(rows, key=lambda row: area(row[kind]))
            points = {float(x): one for x, one in best[kind].items() if one}
            if who == "lmworks":
                low, high = ([max(one["ci95"][end], LEAST) for one in points.values()] for end in (0, 1))
                axes.fill_between(list(points), low, high, color=colours[algorithm], alpha=0.15, linewidth=0)
            axes.plot(list(points), [max(one["mean"], LEAST) for one in points.values()], styles[who],
                      color=colours[algorithm], label=f"{who}: {algorithm} + {best['stopper']}")  # fmt: skip
    axes.set(xlabel=label, xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=7)
    save(figure, path)


def area(curve: dict[str, Any]) -> float:
    return statistics.fmean(math.log(max(one["mean"], LEAST)) if one else 0.0 for one in curve.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "tuning_table.csv.gz")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the plots")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--gp-seeds", type=int, default=0, help="of gp, which takes most of the time (as --seeds)")
    parser.add_argument("--trials", type=int, default=256, help="at most")
    parser.add_argument("--budget", type=float, default=24.0, help="compute of a search, in whole trainings")
    parser.add_argument("--first", type=int, default=1, help="first rung in parts of 64: 1, 2, 4 … 32")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--stoppers", default=",".join(STOPPERS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--save", default="tuning_replay", help="name of the result, before the first rung; empty: print it only"
    )
    chosen = parser.parse_args()
    makers = ["lmworks", "optuna", *(["ray"] if has_ray() else [])]
    cases = [
        (who, algorithm, stopper)
        for who in makers
        for algorithm in chosen.algorithms.split(",")
        for stopper in chosen.stoppers.split(",")
        if not (who == "ray" and (stopper == "hyperband" or (algorithm, stopper) == ("gp", "asha")))
    ]
    limits = Limits(chosen.trials, chosen.budget, chosen.first)
    seeds = {
        algorithm: chosen.gp_seeds or chosen.seeds if algorithm == "gp" else chosen.seeds for _, algorithm, _ in cases
    }
    jobs = [(*case, limits, seed, str(chosen.table)) for case in cases for seed in range(seeds[case[1]])]
    jobs.sort(key=lambda job: job[1] != "gp")  # the longest first
    start = time.perf_counter()
    done: dict[Case, list[list[Moment]]] = {case: [] for case in cases}
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for count, (job, moments) in enumerate(zip(jobs, pool.map(run_one, jobs, chunksize=1), strict=True), 1):
            done[job[:3]].append(moments)
            if count % 200 == 0:
                print(f"{count} of {len(jobs)} searches after {time.perf_counter() - start:.0f} s", flush=True)
    found = []
    for (who, algorithm, stopper), each in done.items():
        case = {"who": who, "algorithm": algorithm, "stopper": stopper, "seeds": len(each)}
        row: dict[str, Any] = {**case, **summary(each)}
        found.append(row)
        shown = {c: one["mean"] if one else None for c, one in row["compute"].items()}
        print(f"{who:8} {algorithm:7} {stopper:10} spent {row['spent']:6.1f}  regret by compute {json.dumps(shown)}")
    compared = comparisons(done)
    for one in compared:
        print(json.dumps(one))
    for kind, label in (("compute", "compute, in whole trainings"), ("trials", "trials started")):
        draw(found, kind, label, chosen.out / f"tuning-regret-{kind}-{chosen.first}.png")
    if chosen.save:
        table = Table.read(chosen.table)
        facts = {"points": len(table.losses), "best": table.best, "seeds": chosen.seeds, **asdict(limits)}
        write_result(
            f"{chosen.save}_{chosen.first}",
            {**facts, "eta": ETA, "seconds": round(time.perf_counter() - start), "asha": compared, "rows": found},
        )


if __name__ == "__main__":
    main()
