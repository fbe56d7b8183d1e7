"""PBT and PB2 in real trainings, beside Ray Tune's own and a population that exchanges nothing, at equal compute.

    python benchmarks/tuning_population.py TEXT_FOLDER              # 5 arms × 5 seeds × 8 members of 1.4M parameters
    python benchmarks/tuning_population.py TEXT_FOLDER --arms ray   # these only; the others stay as the result has them
    python benchmarks/tuning_population.py TEXT_FOLDER --tiny       # a few thousand parameters, 2 seeds, on a CPU

The members of all seeds of an arm train at once (stacked_models.py), every arm with the same steps. For one seed all
arms begin with the same keys and weights, and each member keeps its own order of the data. After every interval each
population is compared on held-out text, and the worst quarter copies weights and optimizer states of the best: by our
`tune.population` and `tune.bandit`, or by the decisions of Ray Tune's schedulers (left out where Ray is missing).

Result: results/tuning_population.json and a plot.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from common import RESULTS, write_result
from stacked_models import StackedAdamW, Update, initial_weights, losses, windows
from tuning_table import TINY, Settings, autocast, gather, held_out_losses, read_text

from lmworks.report.plots import new_axes, save
from lmworks.sweep.space import Dimension, Point, Space
from lmworks.tune.bandit import Interval, choose
from lmworks.tune.population import draw, explore, quantiles

SPACE = Space(
    (
        Dimension("lr", range=(2e-4, 5e-2), log=True),
        Dimension("weight_decay", range=(0.01, 1.0), log=True),
        Dimension("beta2", range=(0.9, 0.999)),
    )
)
BATCH, WARMUP, INTERVALS = 16, 0.05, 16

Exchange = tuple[int, int, Point]  # member, the member that it copies, its new keys


class Population(Protocol):
    points: list[Point]

    def exchange(self, step: int, losses: Sequence[float]) -> list[Exchange]: ...


@dataclass
class Fixed:
    """Random search: nothing is exchanged."""

    points: list[Point]
    seed: int

    def exchange(self, step: int, losses: Sequence[float]) -> list[Exchange]:
        return []


@dataclass
class Ours(Fixed):
    bandit: bool = False
    history: list[Interval] = field(default_factory=list)
    before: dict[int, tuple[int, float]] = field(default_factory=dict)  # member → step and loss that it started from

    def exchange(self, step: int, losses: Sequence[float]) -> list[Exchange]:
        for member, loss in enumerate(losses):
            if member in self.before and math.isfinite(loss):
                start, earlier = self.before[member]
                gain = (earlier - loss) / (step - start)
                self.history.append(Interval(step, -earlier, gain, dict(self.points[member])))
        found: list[Exchange] = []
        worst, best = quantiles(dict(enumerate(losses)))
        for member in worst:
            rng = random.Random(f"{self.seed}/{step}/{member}")
            parent = rng.choice(best)
            given = [point for _, _, point in found]
            chosen = None
            if self.bandit:
                chosen = choose(SPACE, self.history, step, -losses[parent], given, rng.randrange(2**31))
            found.append((member, parent, chosen or explore(SPACE, self.points[parent], rng)))
        copied = {member: parent for member, parent, _ in found}
        self.before = {m: (step, losses[copied.get(m, m)]) for m in range(len(losses))}
        self.before = {m: one for m, one in self.before.items() if math.isfinite(one[1])}
        return found


@dataclass(eq=False)
class RayTrial:
    """What Ray's schedulers ask of a trial."""

    trial_id: str
    config: Point
    experiment_tag: str = ""

    def is_finished(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.trial_id


@dataclass
class Rays(Fixed):
    bandit: bool = False
    scheduler: Any = None
    trials: list[RayTrial] = field(default_factory=list)

    def __post_init__(self) -> None:
        import numpy as np
        from ray import tune
        from ray.tune.schedulers import PopulationBasedTraining
        from ray.tune.schedulers.pb2 import PB2
        from ray.tune.schedulers.pbt import _PBTTrialState

        random.seed(self.seed)
        np.random.seed(self.seed)
        common = {"time_attr": "step", "metric": "loss", "mode": "min", "perturbation_interval": 1}
        bounds = {one.key: list(one.range or ()) for one in SPACE.dimensions}
        if self.bandit:
            self.scheduler = PB2(**common, hyperparam_bounds=bounds, synch=True)
        else:
            ranges = {
                one.key: (tune.loguniform if one.log else tune.uniform)(*bounds[one.key]) for one in SPACE.dimensions
            }
            self.scheduler = PopulationBasedTraining(**common, hyperparam_mutations=ranges, synch=True)
        self.trials = [RayTrial(str(member), dict(point)) for member, point in enumerate(self.points)]
        self.scheduler._trial_state = {trial: _PBTTrialState(trial) for trial in self.trials}

    def exchange(self, step: int, losses: Sequence[float]) -> list[Exchange]:
        states = self.scheduler._trial_state
        for trial, loss in zip(self.trials, losses, strict=True):
            score = loss if math.isfinite(loss) else 99.0
            self.scheduler._save_trial_state(states[trial], step, {"step": step, "loss": score}, trial)
        lower, upper = self.scheduler._quantiles()
        found: list[Exchange] = []
        for trial in lower:
            parent = random.choice(upper)
            config, _ = self.scheduler._get_new_config(trial, parent)
            found.append((int(trial.trial_id), int(parent.trial_id), config))
        for member, _, config in found:
            self.trials[member].config = dict(config)
        return found


def arms() -> dict[str, Callable[[list[Point], int], Population]]:
    found: dict[str, Callable[[list[Point], int], Population]] = {
        "random": Fixed,
        "lmworks pbt": Ours,
        "lmworks pb2": lambda points, seed: Ours(points, seed, bandit=True),
    }
    try:
        import ray.tune.schedulers.pb2  # noqa: F401
    except ImportError:
        return found
    return found | {"ray pbt": Rays, "ray pb2": lambda points, seed: Rays(points, seed, bandit=True)}


def first_points(members: int, seed: int) -> list[Point]:
    rng = random.Random(seed)
    return [{one.key: draw(one, rng) for one in SPACE.dimensions} for _ in range(members)]


def train(
    populations: Sequence[Population], seeds: Sequence[int], settings: Settings, text: Sequence[torch.Tensor]
) -> list[list[list[float]]]:
    """Held-out losses by interval, population and member."""
    train_text, held_out = text
    device, members = train_text.device, len(populations[0].points)
    steps = settings.tokens // (BATCH * settings.seq)
    own = [seed * members + member + 1 for seed in seeds for member in range(members)]
    weights = initial_weights(settings.shape, own, device)

    def column(key: str) -> torch.Tensor:
        return torch.tensor([point[key] for each in populations for point in each.points], device=device)

    update = Update(
        column("lr"), torch.full((len(own),), WARMUP, device=device), column("weight_decay"), column("beta2")
    )
    optimizer = StackedAdamW(weights, update)
    order = torch.tensor(own, device=device)
    due = {round(steps * (index + 1) / INTERVALS) for index in range(INTERVALS)}
    history = []
    for step in range(1, steps + 1):
        tokens = gather(train_text, windows(order, step, BATCH, len(train_text) - settings.seq - 1), settings.seq)
        with autocast(device):
            loss = losses(weights, tokens, settings.shape)
        loss.sum().backward()
        optimizer.step(step, steps)
        if step not in due:
            continue
        read = [one if math.isfinite(one) else math.inf for one in held_out_losses(weights, held_out, settings)]
        history.append([read[index * members : (index + 1) * members] for index in range(len(populations))])
        if step == steps:
            break
        for index, population in enumerate(populations):
            copy_members(population.exchange(step, history[-1][index]), population, index * members, optimizer)
    return history


@torch.no_grad()
def copy_members(exchanges: Sequence[Exchange], population: Population, first: int, optimizer: StackedAdamW) -> None:
    """Weights, moments and keys; a member's order of the data stays."""
    for member, parent, point in exchanges:
        for each in (optimizer.weights, optimizer.mean, optimizer.square):
            for tensor in each.values():
                tensor[first + member] = tensor[first + parent]
        population.points[member] = dict(point)
        for key in ("lr", "weight_decay", "beta2"):
            getattr(optimizer.update, key)[first + member] = float(point[key])


def plot(results: dict[str, Any], path: Path) -> None:
    """How far each arm's best member is below random search's, after every interval and at the end by seed."""
    figure, axes = new_axes("loss below random search: mean; dots: seeds")
    random_search = results["random"]
    for name, row in results.items():
        gains = [base - own for own, base in zip(row["by_interval"], random_search["by_interval"], strict=True)]
        (line,) = axes.plot(range(1, INTERVALS + 1), gains, "--" if name.startswith("ray") else "-", label=name)
        ends = [base - own for own, base in zip(row["final"], random_search["final"], strict=True)]
        axes.plot([INTERVALS] * len(ends), ends, "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="interval")
    axes.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder of text or source files")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--arms", default="", help="only arms whose name has this in it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--plot", type=Path, default=Path("docs/images/tuning-population.png"))
    chosen = parser.parse_args()
    settings = replace(TINY, tokens=1 << 16) if chosen.tiny else Settings()
    seeds = range(2 if chosen.tiny else chosen.seeds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = [part.to(device) for part in read_text(chosen.text, 64_000_000)]
    start, results = time.perf_counter(), {}
    if chosen.arms and not chosen.tiny:
        results = json.loads((RESULTS / "tuning_population.json").read_text())["arms"]
    for name, make in arms().items():
        if chosen.arms not in name:
            continue
        populations = [make(first_points(chosen.members, seed), seed) for seed in seeds]
        history = train(populations, seeds, settings, text)
        best = [[min(population) for population in moment] for moment in history]  # by interval and seed
        results[name] = {
            "final": best[-1],
            "mean": statistics.fmean(best[-1]),
            "std": statistics.stdev(best[-1]),
            "by_interval": [statistics.fmean(moment) for moment in best],
        }
        seconds = time.perf_counter() - start
        print(f"{name:12} {results[name]['mean']:.4f} ± {results[name]['std']:.4f} after {seconds:.0f} s", flush=True)
    plot(results, chosen.plot)
    if not chosen.tiny:
        facts = {
            "members": chosen.members,
            "seeds": len(seeds),
            "intervals": INTERVALS,
            "params": settings.shape.params,
        }
        write_result("tuning_population", {**facts, "arms": results})


if __name__ == "__main__":
    main()
