"""Every layout against one rank: the same seed, the same data, and everything that was computed compared.

A loss that looks right proves little: a gradient may be scaled wrongly and still point downhill. So each gradient of
each step is compared, on every rank that holds a part of it, and each weight after five steps.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..parallel.comm_counter import Row as Traffic
from ..parallel.local_ranks import RankFailed, on_ranks
from ..parallel.memory_preflight import refuse_oversized
from ..plan.exact.shards import local_shapes
from ..plan.memory.peak_memory import Row
from ..spec import RunSpec, SpecError
from ..spec.layouts import ZERO_CAUSE, Layout, zero_gradients
from .compare import Worst, gradient_errors, scalar_errors, weight_errors, worst
from .corpus import write_corpus
from .planner_agreement import disagreements
from .rounding import judged
from .trial import STEPS, Trial, run_trials

RULES: dict[str, dict[str, Any]] = {"sgd": {}, "adamw": {"optimizer": "adamw", "lr": 1e-3}}
# Bytes for each weight of a rank: gradients of five steps, the weight and its place, and both of these again of AdamW.
KEPT = 5 * 4 + 2 * (4 + 8)
COPIES = 3  # of that at once, measured: with its rank, on its way, with who compares


@dataclass(frozen=True)
class Result:
    """One row of the table. Differences are relative, and against one rank in the same precision."""

    layout: str
    ranks: int
    loss_diff: float = float("nan")
    worst_grad: float = float("nan")
    worst_grad_name: str = ""
    worst_param: float = float("nan")  # after five steps of SGD
    worst_param_name: str = ""
    adamw_param: float = float("nan")  # after five steps of AdamW: reported, not judged
    grad_norm_diff: float = float("nan")
    times_one_rank: float | None = None  # low precision: the error against fp32 (see `rounding`)
    times_one_rank_limit: float | None = None  # what that may be
    tokens: int = 0
    peak_bytes: int = 0  # of the rank that needs most
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)  # of one step, each on the rank that calls it most
    plan_diff: str = ""  # where the planner's bytes and collectives are not those of the ranks
    cause: str = ""  # of a tolerance wider than usual
    ok: bool = False
    failure: str = ""  # what was outside, with the name of the parameter
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a number that is none is null."""
        return {key: None if value != value else value for key, value in asdict(self).items()}


class Parity:
    """Proves layouts one after another; what one rank computes is computed once for all that share it.

    `quick` only judges: no steps of AdamW, no highest memory. `timeout` is in seconds, for each training.
    """

    def __init__(
        self,
        root: Path,
        given: dict[str, Any] | None = None,
        quick: bool = False,
        timeout: float = 120,
        force: bool = False,
    ) -> None:
        self.root, self.given, self.quick, self.timeout, self.force = root, given, quick, timeout, force
        self.rules = {"sgd": RULES["sgd"]} if quick else RULES
        self.data = None if given is not None else write_corpus(root)
        self.known: dict[str, dict[str, Trial]] = {}

    def prove(self, layout: Layout) -> Result:
        began = time.monotonic()
        spec = self.with_data(layout.run(self.given))
        if spec.parallel.engine == "deepspeed":
            raise SpecError(
                "parallel.engine = 'deepspeed' keeps its gradients to itself; parity compares 'native' ones"
            )
        if not self.force:
            refuse_oversized(spec, torch.device("cpu"), beside=compared_rows, own_layout=False)
        one = self.alone(layout)
        try:
            ranks = self.train(spec)
        except RankFailed as error:
            return Result(layout.name, spec.parallel.world, failure=str(error), seconds=time.monotonic() - began)
        oracle = self.alone(layout, "fp32") if spec.precision.dtype != "fp32" else None
        return judge(layout, spec, ranks, one, oracle, began)

    def alone(self, layout: Layout, dtype: str | None = None) -> dict[str, Trial]:
        spec = self.with_data(layout.alone(self.given, dtype)).replace(name="one")
        key = str(spec)
        if key not in self.known:
            self.known[key] = self.train(spec, launched=False)[0]
        return self.known[key]

    def train(self, spec: RunSpec, launched: bool = True) -> list[dict[str, Trial]]:
        folder = Path(tempfile.mkdtemp(dir=self.root))
        try:
            what = spec, folder / "run", self.rules, not self.quick
            return on_ranks(spec.parallel.world, run_trials, *what, launched=launched, timeout=self.timeout)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def with_data(self, spec: RunSpec) -> RunSpec:
        return spec if self.data is None else spec.replace(data=spec.data.replace(path=str(self.data)))


@contextmanager
def parity(
    given: dict[str, Any] | None = None, quick: bool = False, timeout: float = 120, force: bool = False
) -> Iterator[Parity]:
    """With a folder for data and runs that lasts as long as it."""
    with tempfile.TemporaryDirectory(prefix="lmworks-parity-") as root:
        yield Parity(Path(root), given, quick, timeout, force)


def compared_rows(spec: RunSpec, rank: int) -> list[Row]:
    """What a rank keeps of its trials, on its way to the process that compares, and there; one rank's beside it."""
    own = KEPT * sum(math.prod(shape) for _, shape in local_shapes(spec, rank))
    found = [Row("gradients and weights to compare", COPIES * own, f"{KEPT} B for each weight, {COPIES} copies")]
    if rank == 0:
        trials = 1 if spec.precision.dtype == "fp32" else 2  # in its own precision, and in fp32
        found.append(Row("what one rank computed", trials * KEPT * spec.model.params, f"{trials} × {KEPT} B a weight"))
    return found


def judge(
    layout: Layout,
    spec: RunSpec,
    ranks: list[dict[str, Trial]],
    one: dict[str, Trial],
    oracle: dict[str, Trial] | None,
    began: float,
) -> Result:
    limit, truth, zero = layout.tolerance, one["sgd"], zero_gradients(spec.model)
    many = [trials["sgd"] for trials in ranks]
    observed = [list(trials.values())[-1] for trials in ranks]
    loss = scalar_errors(truth.losses, [trial.losses for trial in many])
    norms = scalar_errors(truth.norms, [trial.norms for trial in many])
    gradient = worst(gradient_errors(truth, many, zero))
    weights = worst(weight_errors(truth, many, zero))
    adamw = Worst(float("nan"))
    if "adamw" in one:
        adamw = worst(weight_errors(one["adamw"], [trials["adamw"] for trials in ranks], zero))
    failures = [
        f"rank {rank} trained on {trial.tokens} tokens, one rank on {truth.tokens}"
        for rank, trial in enumerate(many)
        if trial.tokens != truth.tokens
    ]
    furthest, cause = None, limit.cause or (ZERO_CAUSE if zero else "")
    if oracle is None:
        checks = [
            (f"the gradient of {gradient.name}", gradient.value, limit.gradient),
            (f"{weights.name} after {STEPS} steps", weights.value, limit.weights),
            ("the loss", loss, limit.loss),
            ("the gradient norm", norms, limit.gradient),
        ]
        failures += [
            f"{what} differs by {off:.1e}, more than {most:g}" for what, off, most in checks if not off <= most
        ]
    else:
        judgement = judged(truth, many, oracle["sgd"], spec)
        furthest, cause = judgement.worst, judgement.cause or cause
        failures += [judgement.failure] if judgement.failure else []
    peaks = [trial.peak_bytes for trial in observed]
    planned = spec.replace(optim=spec.optim.replace(**RULES[list(one)[-1]]))
    plan_diff = "; ".join(disagreements(planned, observed))
    if plan_diff:
        failures.append(f"the planner is wrong about it: {plan_diff}")
    return Result(
        layout=layout.name,
        ranks=len(ranks),
        loss_diff=loss,
        worst_grad=gradient.value,
        worst_grad_name=gradient.name,
        worst_param=weights.value,
        worst_param_name=weights.name,
        adamw_param=adamw.value,
        grad_norm_diff=norms,
        times_one_rank=furthest.value if furthest else None,
        times_one_rank_limit=furthest.most if furthest else None,
        tokens=truth.tokens,
        peak_bytes=max(peaks),
        peak_bytes_by_rank=peaks,
        collectives=busiest(observed),
        plan_diff=plan_diff,
        cause=cause,
        ok=not failures,
        failure="; ".join(failures),
        seconds=time.monotonic() - began,
    )


def busiest(ranks: list[Trial]) -> list[dict[str, Any]]:
    """Each kind of collective as the rank has it that calls it most: stages of a pipeline differ."""
    rows: dict[tuple[str, str, int], Traffic] = {}
    for row in (row for trial in ranks for row in trial.collectives):
        key = row.kind, row.group, row.ranks
        if key not in rows or row.bytes > rows[key].bytes:
            rows[key] = row
    return [asdict(row) for row in sorted(rows.values(), key=lambda row: -row.bytes)]
