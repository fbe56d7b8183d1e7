"""Parity of layouts with one rank: the same seed and data, and everything that was computed is compared.

A plausible loss proves little: a wrongly scaled gradient still points downhill. So every gradient of every step is
compared on every rank that holds a shard of it, and every weight after five steps.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data import prepare
from ..parallel.comm_counter import Row as Traffic
from ..parallel.local_ranks import RankFailed, on_ranks
from ..parallel.preflight import check_fits_memory
from ..plan.exact.shards import local_shapes
from ..plan.memory.peak_memory import Row
from ..spec import RunSpec, SpecError
from ..spec.layouts import ZERO_CAUSE, Layout, zero_gradients
from .planner_agreement import disagreements
from .rank_record import QUICK_STEPS, STEPS, RankRecord, record_runs
from .rounding import Worst, gradient_errors, rounding_verdict, scalar_errors, weight_errors, worst

OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {}, "adamw": {"optimizer": "adamw", "lr": 1e-3}}
# Gradients of five steps, the weight and its index, and both of these again for AdamW.
BYTES_PER_WEIGHT = 5 * 4 + 2 * (4 + 8)
COPIES = 3  # at once, measured: in the rank, in transit, in the comparing process


@dataclass(frozen=True)
class Result:
    """One row of the table. Differences are relative to one rank in the same precision."""

    layout: str
    ranks: int
    loss_diff: float = float("nan")
    worst_grad: float = float("nan")
    worst_grad_name: str = ""
    worst_param: float = float("nan")  # after five steps of SGD
    worst_param_name: str = ""
    adamw_param: float = float("nan")  # after five steps of AdamW: reported, without a limit
    grad_norm_diff: float = float("nan")
    times_one_rank: float | None = None  # low precision: the error against fp32 (see `rounding`)
    times_one_rank_limit: float | None = None  # its limit
    tokens: int = 0
    peak_bytes: int = 0  # the largest of all ranks
    peak_bytes_by_rank: list[int] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)  # of one step, each from the rank with most bytes
    plan_diff: str = ""  # differences between planned and measured bytes and collectives
    cause: str = ""  # of a wider tolerance
    ok: bool = False
    failure: str = ""  # what exceeded its tolerance, with the name of the parameter
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: NaN becomes null."""
        return {key: None if value != value else value for key, value in asdict(self).items()}


class Parity:
    """Compares layouts one after another; runs on one rank are shared by layouts that need the same one.

    `quick`: three steps, no AdamW and no peak memory. `timeout`: seconds for each run.
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
        self.optimizers = {"sgd": OPTIMIZERS["sgd"]} if quick else OPTIMIZERS
        self.data = None if given is not None else write_corpus(root)
        self.single_rank_records: dict[str, dict[str, RankRecord]] = {}

    def prove(self, layout: Layout) -> Result:
        began = time.monotonic()
        spec = self.with_data(layout.run(self.given))
        if spec.parallel.engine == "deepspeed":
            raise SpecError(
                "parallel.engine = 'deepspeed' does not expose its gradients; parity compares 'native' ones"
            )
        if not self.force:
            check_fits_memory(spec, torch.device("cpu"), beside=comparison_memory, own_layout=False)
        one = self.single_rank(layout)
        try:
            ranks = self.train(spec)
        except RankFailed as error:
            return Result(layout.name, spec.parallel.world, failure=str(error), seconds=time.monotonic() - began)
        oracle = self.single_rank(layout, "fp32") if spec.precision.dtype != "fp32" else None
        return compare_layout(layout, spec, ranks, one, oracle, began)

    def single_rank(self, layout: Layout, dtype: str | None = None) -> dict[str, RankRecord]:
        spec = self.with_data(layout.alone(self.given, dtype)).replace(name="one")
        key = str(spec)
        if key not in self.single_rank_records:
            self.single_rank_records[key] = self.train(spec, launched=False)[0]
        return self.single_rank_records[key]

    def train(self, spec: RunSpec, launched: bool = True) -> list[dict[str, RankRecord]]:
        folder = Path(tempfile.mkdtemp(dir=self.root))
        try:
            steps = QUICK_STEPS if self.quick else STEPS
            what = spec, folder / "run", self.optimizers, not self.quick, steps
            return on_ranks(spec.parallel.world, record_runs, *what, launched=launched, timeout=self.timeout)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def with_data(self, spec: RunSpec) -> RunSpec:
        return spec if self.data is None else spec.replace(data=spec.data.replace(path=str(self.data)))


@contextmanager
def parity(
    given: dict[str, Any] | None = None, quick: bool = False, timeout: float = 120, force: bool = False
) -> Iterator[Parity]:
    """A `Parity` with a temporary folder for data and runs.

    Ranks are forked, layout after layout. Threads that this process had started in between would be missing in the next
    ranks, whose matrix products wait for them for ever (Linux on aarch64): it computes on one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="lmworks-parity-") as root:
            yield Parity(Path(root), given, quick, timeout, force)
    finally:
        torch.set_num_threads(threads)


def comparison_memory(spec: RunSpec, rank: int) -> list[Row]:
    """Memory of a rank's records in the rank, in transit and in the comparing process, and of the single rank's."""
    own = BYTES_PER_WEIGHT * sum(math.prod(shape) for _, shape in local_shapes(spec, rank))
    found = [
        Row("gradients and weights to compare", COPIES * own, f"{BYTES_PER_WEIGHT} B for each weight, {COPIES} copies")
    ]
    if rank == 0:
        records = 1 if spec.precision.dtype == "fp32" else 2  # in its own precision, and in fp32
        found.append(
            Row(
                "what one rank computed",
                records * BYTES_PER_WEIGHT * spec.model.params,
                f"{records} × {BYTES_PER_WEIGHT} B a weight",
            )
        )
    return found


def compare_layout(
    layout: Layout,
    spec: RunSpec,
    ranks: list[dict[str, RankRecord]],
    one: dict[str, RankRecord],
    oracle: dict[str, RankRecord] | None,
    began: float,
) -> Result:
    tolerance, reference, zero = layout.tolerance, one["sgd"], zero_gradients(spec.model)
    many = [records["sgd"] for records in ranks]
    measured = [list(records.values())[-1] for records in ranks]
    # The loss of a policy gradient is 0 but for its KL term: advantages add up to 0.
    least = 1.0 if spec.align.online else 1e-30
    loss = scalar_errors(reference.losses, [record.losses for record in many], least)
    norms = scalar_errors(reference.norms, [record.norms for record in many])
    gradient = worst(gradient_errors(reference, many, zero))
    weights = worst(weight_errors(reference, many, zero))
    adamw = Worst(float("nan"))
    if "adamw" in one:
        adamw = worst(weight_errors(one["adamw"], [records["adamw"] for records in ranks], zero))
    failures = [
        f"rank {rank} trained on {record.tokens} tokens, one rank on {reference.tokens}"
        for rank, record in enumerate(many)
        if record.tokens != reference.tokens
    ]
    worst_ratio, cause = None, tolerance.cause or (ZERO_CAUSE if zero else "")
    if oracle is None:
        checks = [
            (f"the gradient of {gradient.name}", gradient.value, tolerance.gradient),
            (f"{weights.name} after {len(reference.losses)} steps", weights.value, tolerance.weights),
            ("the loss", loss, tolerance.loss),
            ("the gradient norm", norms, tolerance.gradient),
        ]
        failures += [
            f"{what} differs by {off:.1e}, more than {limit:g}" for what, off, limit in checks if not off <= limit
        ]
    else:
        verdict = rounding_verdict(reference, many, oracle["sgd"], spec)
        worst_ratio, cause = verdict.worst, verdict.cause or cause
        failures += [verdict.failure] if verdict.failure else []
    peaks = [record.peak_bytes for record in measured]
    planned = spec.replace(optim=spec.optim.replace(**OPTIMIZERS[list(one)[-1]]))
    plan_diff = "; ".join(disagreements(planned, measured))
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
        times_one_rank=worst_ratio.value if worst_ratio else None,
        times_one_rank_limit=worst_ratio.limit if worst_ratio else None,
        tokens=reference.tokens,
        peak_bytes=max(peaks),
        peak_bytes_by_rank=peaks,
        collectives=busiest_calls(measured),
        plan_diff=plan_diff,
        cause=cause,
        ok=not failures,
        failure="; ".join(failures),
        seconds=time.monotonic() - began,
    )


def busiest_calls(ranks: list[RankRecord]) -> list[dict[str, Any]]:
    """Each kind of collective from the rank with most bytes: stages of a pipeline differ."""
    rows: dict[tuple[str, str, int], Traffic] = {}
    for row in (row for record in ranks for row in record.collectives):
        key = row.kind, row.group, row.ranks
        if key not in rows or row.bytes > rows[key].bytes:
            rows[key] = row
    return [asdict(row) for row in sorted(rows.values(), key=lambda row: -row.bytes)]


# --- data ------------------------------------------------------------------------------------------------


WORDS = ("def", "return", "for", "in", "x", "y", "if", "not", "self", "import")


def write_corpus(root: Path, documents: int = 1000) -> Path:
    """Random documents as byte tokens, the same each time; so short that most sequences hold a document boundary."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(documents))
    source = root / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return prepare([str(source)], root / "tokens", workers=1).folder
