"""The run that a budget buys: a law joined with the planner.

N and D by the law over shapes with exact counts; batch and learning rate by a fitted law or a published rule; layout,
days, dollars and memory by the planner's search. A budget of days or dollars is turned into FLOPs by the speed of the
layout that is found, and found again, until the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..plan.money import Site, goodput
from ..plan.search.candidates import OFFLOAD_GIB, problem_of
from ..plan.search.request import Request, run_of_layout
from ..plan.search.search import Found, search
from ..plan.serving.batching import Lengths
from ..plan.serving.plans import Demand, Slo
from ..plan.serving.plans import choose as choose_serving
from ..plan.serving.served_model import ServedModel
from ..spec import Cluster, Gpu, RunSpec, SpecError
from ..spec.hardware import parse_cluster
from . import rules
from .compute_optimal import Allocation, least_loss, least_total_cost
from .downstream import Downstream
from .fitting import FittedLaw
from .hyperparameter_laws import HyperparameterLaw
from .rules import Recommended
from .shapes import Shape, family

DAYS = 30.0  # that a run may take where only FLOPs or dollars are given
DEFAULT_GPU = "h100"
GUESS_MFU = 0.4  # of the first guess, before a layout is known
PLAIN = {"offload": "none", OFFLOAD_GIB: 0}  # what a machine keeps in host memory is not in the catalogue
QUICK = {**PLAIN, "schedule": "1f1b"}  # of searches on the way to the budget
AGREE = 0.02  # of the budget
ROUNDS = 6
REQUEST = Lengths(1024, 256)  # of --serve: tokens in and out
MOST_GPUS = 65_536
SHAPE_KEYS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"),
    *("rope_theta", "tie_embeddings"),
)


class NothingFits(SpecError):
    """No layout of the cluster has room for the run."""


@dataclass(frozen=True)
class Budget:
    """What is given; None: not said."""

    flops: float | None = None
    cluster: str | None = None
    days: float | None = None
    dollars: float | None = None
    serve: float | None = None  # tokens to be served in the model's life
    vocab: int | None = None
    seq: int | None = None
    data: str = ""


@dataclass(frozen=True)
class Recommendation:
    choice: Allocation
    optimal: Allocation  # of training alone; the same where nothing is served
    found: Found
    spec: RunSpec
    lr: Recommended
    batch: Recommended
    compared: tuple[tuple[Allocation, float, float], ...]  # with --serve: dollars of training and of serving
    notes: tuple[str, ...]


def recommend(
    fitted: FittedLaw,
    budget: Budget,
    lr_law: HyperparameterLaw | None = None,
    batch_law: HyperparameterLaw | None = None,
) -> Recommendation:
    check(fitted, budget)
    planner = Planner.of(fitted, budget, lr_law, batch_law)
    cluster = budget.cluster or planner.smallest_cluster()
    flops = budget.flops or planner.flops_of_time(cluster)
    optimal = planner.best(flops)
    choice, notes = optimal, list[str]()
    compared: list[tuple[Allocation, float, float]] = []
    if budget.serve:
        choice, compared = planner.with_serving(optimal, cluster, budget.serve)
        if not budget.cluster:
            cluster = planner.enough_gpus(choice, cluster)
        more = choice.flops / optimal.flops - 1
        times = choice.tokens / optimal.tokens
        smaller = f"trained on {times:.2g} times the tokens ({more:+.0%} training FLOPs) is as good and cheaper in all"
        answer = f"a smaller model {smaller}" if choice is not optimal else "no smaller model pays"
        notes.append(f"to serve {budget.serve:.3g} tokens, {answer}")
    found, spec, lr, batch = planner.run(choice, cluster, PLAIN)
    return Recommendation(choice, optimal, found, spec, lr, batch, tuple(compared), tuple(notes))


def check(fitted: FittedLaw, budget: Budget) -> None:
    if not {"n", "d"} <= set(fitted.law.variables):
        raise SpecError(
            f"--law {fitted.law.name} does not say how loss depends on N and D; chinchilla, tied, kaplan do"
        )
    given = [name for name in ("flops", "dollars") if getattr(budget, name) is not None]
    if budget.days is not None and budget.cluster:
        given.append("days")
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "none"
        raise SpecError(f"give one budget: --flops, --dollars, or --cluster with --days (given: {said})")
    for name in ("flops", "days", "dollars", "serve"):
        value = getattr(budget, name)
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(f"--{name} {value:g} must be more than 0")


@dataclass(frozen=True)
class Planner:
    fitted: FittedLaw
    budget: Budget
    shapes: tuple[Shape, ...]
    lr_law: HyperparameterLaw | None
    batch_law: HyperparameterLaw | None

    @classmethod
    def of(
        cls,
        fitted: FittedLaw,
        budget: Budget,
        lr_law: HyperparameterLaw | None = None,
        batch_law: HyperparameterLaw | None = None,
    ) -> Planner:
        """A law with a term for the context length is used at the longest that its runs had."""
        flops = budget.flops or guess_flops(budget)
        longest = int(fitted.ranges["seq"][1]) if "seq" in fitted.law.variables and "seq" in fitted.ranges else 0
        shapes = family(budget.vocab or rules.vocabulary(flops), budget.seq or longest or rules.sequence(flops))
        return cls(fitted, budget, shapes, lr_law, batch_law)

    def best(self, flops: float) -> Allocation:
        return least_loss(self.fitted, self.shapes, flops)

    def run(
        self, choice: Allocation, cluster: str, pinned: dict[str, Any]
    ) -> tuple[Found, RunSpec, Recommended, Recommended]:
        """The fastest layout that fits, and the spec of the run."""
        shape, tokens, gpus = choice.shape, choice.tokens, parse_cluster(cluster).gpus
        size = shape.size(self.fitted.convention)
        batch, lr = rules.batch_tokens(tokens), rules.learning_rate(shape.n_no_embed, tokens)
        if self.batch_law:
            batch = Recommended(self.batch_law.at(size, tokens)["batch"], "fitted to the runs")
        if self.lr_law:
            lr = Recommended(self.lr_law.at(size, tokens)["lr"], "fitted to the runs")
        sequences = rules.sequences_of_batch(batch.value, shape.seq, gpus)
        keys = {
            "name": f"scaling-{short_name(shape.n)}",
            "model": {key: value for key, value in shape.model.to_dict().items() if key in SHAPE_KEYS},
            "data": {"path": self.budget.data, "seq": shape.seq, "micro_batch": 1, "global_batch": sequences},
            "optim": {"lr": float(f"{lr.value:.3g}")},
            "precision": {"dtype": "bf16"},
            "parallel": {"compile": True},
        }
        base = RunSpec.from_dict(keys)
        problem = problem_of(base, cluster, compile=True, pinned=pinned)
        result = search([problem])
        if not result.front:
            raise NothingFits(f"no layout of {shape.n:.3g} parameters fits on {cluster}; give a larger --cluster")
        request = Request(base, Cluster(), pinned, tokens, frozenset({"optim.lr", "data.seq", "data.global_batch"}))
        return result.front[0], run_of_layout(result.front[0], request), lr, batch

    def days(self, choice: Allocation, cluster: str) -> float:
        found, *_ = self.run(choice, cluster, QUICK)
        return float(found.bill(choice.tokens).hours) / 24

    def flops_of_time(self, cluster: str) -> float:
        """What the cluster computes in the days, or for the dollars: a fixed point of the layout's speed."""
        days, flops = days_of(self.budget, cluster), guess_flops(self.budget, cluster)
        for _ in range(ROUNDS):
            ratio = self.days(self.best(flops), cluster) / days
            if abs(ratio - 1) < AGREE:
                break
            flops /= ratio
        return flops

    def smallest_cluster(self) -> str:
        """The fewest H100s, a power of two, that have room for the run and take no longer than the days."""
        days = self.budget.days or DAYS
        gpus = 1
        while gpus <= MOST_GPUS:
            cluster = f"{gpus}x{DEFAULT_GPU}"
            flops = self.budget.flops or guess_flops(self.budget, cluster)
            enough = guess_flops(Budget(days=days), cluster) / GUESS_MFU > flops  # at the peak
            if self.budget.dollars is not None:
                enough = days_of(self.budget, cluster) <= days
            with suppress(NothingFits):
                if enough and (self.days(self.best(flops), cluster) <= days or self.budget.dollars is not None):
                    return cluster
            gpus *= 2
        raise SpecError(f"that is more than {MOST_GPUS:,} {DEFAULT_GPU}s do in {days:g} days; name a --cluster")

    def enough_gpus(self, choice: Allocation, cluster: str) -> str:
        """As many more, by doubling, as keep the days: a small model that is served trains for longer."""
        days, gpus = self.budget.days or DAYS, parse_cluster(cluster).gpus
        while self.days(choice, f"{gpus}x{DEFAULT_GPU}") > days:
            gpus *= 2
            if gpus > MOST_GPUS:
                raise SpecError(f"more than {MOST_GPUS:,} {DEFAULT_GPU}s train it in {days:g} days; name a --cluster")
        return f"{gpus}x{DEFAULT_GPU}"

    def with_serving(
        self, optimal: Allocation, cluster: str, tokens: float
    ) -> tuple[Allocation, list[tuple[Allocation, float, float]]]:
        """Dollars: training at the speed of the optimal run, serving by the planner's cheapest deployment."""
        found, *_ = self.run(optimal, cluster, QUICK)
        price = found.price_hour
        if not price:
            raise SpecError(
                f"--serve compares dollars, and the price of {found.problem.gpu.name} is not in the catalogue"
            )
        a_flop = float(found.bill(optimal.tokens).dollars) / optimal.flops

        def train_cost(shape: Shape, trained: float) -> float:
            return a_flop * shape.flops_per_token * trained

        return least_total_cost(self.fitted, self.shapes, optimal, train_cost, serving_cost(found, tokens))


def serving_cost(found: Found, tokens: float) -> Callable[[Shape], float]:
    def cost(shape: Shape) -> float:
        model = shape.model.replace(context=max(shape.model.context, REQUEST.total))
        served = ServedModel.of(model, "model")
        plans = choose_serving(served, found.problem.gpu, Demand(REQUEST, Slo()))
        return tokens / 1e6 * plans[0].dollars_per_million()[2]

    return cost


def days_of(budget: Budget, cluster: str) -> float:
    if budget.dollars is None:
        return budget.days or DAYS
    machines, gpu = machines_of(cluster)
    if not gpu.price_hour:
        raise SpecError(f"--dollars: the price of {gpu.name} is not in the catalogue")
    return budget.dollars / (machines.gpus * gpu.price_hour * 24)


def guess_flops(budget: Budget, cluster: str = "") -> float:
    """At 40 % of the peak."""
    cluster = cluster or budget.cluster or DEFAULT_GPU
    machines, gpu = machines_of(cluster)
    seconds = 86_400 * days_of(budget, cluster) * float(goodput(machines.gpus, Site()))
    return machines.gpus * (gpu.peak_flops("bf16") or 0.0) * GUESS_MFU * seconds


def machines_of(cluster: str) -> tuple[Cluster, Gpu]:
    machines = parse_cluster(cluster)
    gpu = machines.accelerator
    assert gpu is not None
    if not gpu.peak_flops("bf16"):
        raise SpecError(f"--cluster {cluster}: the speed of {gpu.name} in bf16 is not in the catalogue")
    return machines, gpu


def short_name(n: float) -> str:
    for unit, size in (("t", 1e12), ("b", 1e9), ("m", 1e6)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def result(fitted: FittedLaw, found: Recommendation, metric: Downstream | None = None) -> dict[str, Any]:
    """For `--json`."""
    choice, shape, spec = found.choice, found.choice.shape, found.spec
    bill, layout = found.found.bill(choice.tokens), found.found
    at = {"n": float(shape.size(fitted.convention)), "d": choice.tokens, "seq": float(shape.seq), "flops": choice.flops}
    loss = fitted.predict(**at)
    model = spec.model
    outside = fitted.outside({"n": float(shape.size(fitted.convention)), "d": choice.tokens, "flops": choice.flops})
    outside = [warning.replace("the optimum", "the run") for warning in outside]
    if found.lr.source == rules.LR_SOURCE:
        outside += rules.beyond_tested(shape.n_no_embed, choice.tokens)
        outside += rules.unlike_runs(fitted.ranges)
    return {
        "law": {"method": fitted.law.name, "params": fitted.params, "source": fitted.source},
        "n": shape.n,
        "n_no_embed": shape.n_no_embed,
        "d": choice.tokens,
        "tokens_per_param": choice.tokens_per_param,
        "flops": choice.flops,
        "shape": {key: getattr(model, key) for key in SHAPE_KEYS},
        "shape_text": shape.text,
        "seq": spec.data.seq,
        "global_batch": spec.data.global_batch,
        "batch_tokens": spec.tokens_per_step,
        "steps": spec.optim.steps,
        "lr": spec.optim.lr,
        "rules": {"lr": found.lr.source, "batch": found.batch.source},
        "loss": loss["loss"],
        "interval": loss.get("interval"),
        "run_interval": loss.get("run_interval"),
        "scores": {metric.column: metric.at(loss["loss"], fitted.losses(at))} if metric else {},
        "level": fitted.level,
        "cluster": {"gpu": layout.problem.gpu.name, "gpus": layout.problem.world},
        "layout": layout.layout,
        "layout_text": layout.case.text,
        "step_s": layout.step_s,
        "tokens_per_s": layout.tokens_per_s,
        "mfu": mfu(layout),
        "memory_bytes": layout.reserved,
        "days": float(bill.hours) / 24,
        "dollars": float(bill.dollars) or None,
        "compute_optimal": {"n": found.optimal.shape.n, "d": found.optimal.tokens, "flops": found.optimal.flops},
        "serving": serving_table(found),
        "notes": list(found.notes),
        "warnings": [*fitted.warnings, *outside],
    }


def mfu(found: Found) -> float:
    from ..plan.step.price import price

    return float((found.price or price(found.case)).mfu)


def serving_table(found: Recommendation) -> list[dict[str, float]] | None:
    """What was compared, the cheapest in all first."""
    if not found.compared:
        return None
    rows = [
        {
            "n": one.shape.n,
            "d": one.tokens,
            "tokens_per_param": one.tokens_per_param,
            "train_dollars": train,
            "serve_dollars": serve,
            "total_dollars": train + serve,
        }
        for one, train, serve in found.compared
    ]
    return sorted(rows, key=lambda row: row["total_dollars"])
