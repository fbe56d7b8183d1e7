"""`lmworks bench kernels`: every implementation of every op of a training step, beside the floor of the device.

The floor of an op is the longer of two times: its bytes at the rate at which this device copies memory, its FLOPs at
the rate of its matrix products. Both rates are measured first, in the same process. Implementations of a case take
turns, so that a device that slows down slows them all; the median of the turns is kept. Before every turn other memory
is written, which leaves nothing of the operands in the caches.

What fails is a row that says so. Whose results are far from those of PyTorch is not chosen, however fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.progress import Progress, silent
from ..kernels import dispatch
from ..spec import LMWorksError, ModelSpec, SpecError, dump_toml
from ..spec.errors import did_you_mean
from ..spec.files import write_whole
from .calibrate import about
from .clock import Clock
from .kernel_ops import BOTH, FORWARD, OPS, Case, Place, Work
from .kernel_timing import DTYPES, device_name, digits
from .roofline import measured_ceilings

# Sequences and their length by model: those of the training figures in docs/training.md.
SHAPES = {"gpt2-small": (64, 1024), "llama3-1b": (4, 4096), "llama3-8b": (2, 8192)}
MODELS = {"cpu": ("cpu-3m",), "cuda": tuple(SHAPES)}
SMALL = (2, 128)  # of a model without a shape of its own on a CPU
HEADER = "# Which implementation was fastest, by device, op and shape; `lmworks bench kernels --record` writes it.\n\n"
ROUNDS = 11
MARGIN = 0.03  # by which another must be faster than PyTorch to be chosen
FAR = 0.05  # relative difference from PyTorch's results that rounding does not explain


@dataclass(frozen=True)
class Roof:
    """What this device does at best, measured."""

    copy: float  # bytes read and written a second
    product: float  # FLOP/s

    def floor(self, bytes_: float, flops: float) -> float:
        return max(bytes_ / self.copy, flops / self.product)


@dataclass(frozen=True)
class Row:
    """One implementation of one case."""

    op: str
    part: str
    model: str
    shape: Mapping[str, int]
    implementation: str
    chosen_from: bool  # whether training may be given it
    bytes: float
    flops: float
    floor_s: float
    seconds: float | None = None  # None: it failed
    memory_bytes: int | None = None  # at most, beyond its inputs; None on a CPU
    off: float | None = None  # relative difference from the first implementation's results; None: nothing to compare
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        of_floor = None if self.seconds is None else digits(self.floor_s / self.seconds)
        return {**asdict(self), "of_floor": of_floor}


def bench_kernels(
    device: torch.device,
    models: Sequence[str] = (),
    only: Sequence[str] = (),
    rounds: int = ROUNDS,
    batch: int | None = None,
    seq: int | None = None,
    progress: Progress = silent,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """`keep` gets what is known after every op of every model: an end that comes too early loses one of them."""
    for op in only:
        if op not in OPS:
            raise SpecError(f"--only {op}: there is no such op{did_you_mean(op, OPS)}")
    name = "bf16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[name]
    clock = Clock(device, patience=1.0)
    places = [place_of(model, batch, seq, device, dtype) for model in models or MODELS[device.type]]
    best = measured_ceilings(device, name)
    roof = Roof(best.bandwidth, best.flops[name])
    rows: list[Row] = []
    wanted = [(op, place) for op in only or OPS for place in places]
    about_run = {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_s": digits(roof.copy),
        "product_flops": digits(roof.product),
        "rounds": rounds,
        "made": made(),
    }
    facts: dict[str, Any] = {**about_run, "rows": [], "winners": {}}
    with any_number_of_shapes(device):
        for done, (op, place) in enumerate(wanted):
            progress(f"{op} of {place.name}", done, len(wanted))
            for case in OPS[op](place):
                rows += measure(clock, case, place.name, roof, rounds)
            told = [row.to_dict() for row in (*rows, *backward_rows(rows, roof))]
            # A CPU has no choice.
            facts = {**about_run, "rows": told, "winners": winners(rows) if device.type == "cuda" else {}}
            if keep is not None:
                keep(facts)
    return facts


def any_number_of_shapes(device: torch.device) -> AbstractContextManager[Any]:
    """The ninth shape of a function would else not be compiled but run as it is."""
    if device.type == "cpu":  # where nothing is compiled, and the compiler takes seconds to import
        return nullcontext()
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)


def place_of(name: str, batch: int | None, seq: int | None, device: torch.device, dtype: torch.dtype) -> Place:
    model = ModelSpec.from_preset(name)
    own = SHAPES.get(name, (4, 4096)) if device.type == "cuda" else SMALL
    return Place(name, model, batch or own[0], min(seq or own[1], model.context), device, dtype)


def made() -> dict[str, Any]:
    with suppress(metadata.PackageNotFoundError):
        return {**about(), "triton": metadata.version("triton")}
    return about()


# --- one case -------------------------------------------------------------------------------------------


def measure(clock: Clock, case: Case, model: str, roof: Roof, rounds: int) -> Iterator[Row]:
    """A row for every implementation."""
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()
    about_case = partial(
        Row,
        case.op,
        case.part,
        model,
        case.shape,
        bytes=case.bytes,
        flops=case.flops,
        floor_s=roof.floor(case.bytes, case.flops),
    )
    try:
        works = case.make()
    except Exception as error:
        yield about_case("all", False, error=said(error))
        return
    tried = {name: attempt(work, clock.device) for name, work in works.items()}
    first = next((one.results for one in tried.values() if one.results is not None), None)
    off = {name: difference(one.results, first) for name, one in tried.items() if not one.error}
    memory = {name: one.memory for name, one in tried.items()}
    errors = {name: one.error for name, one in tried.items()}
    del tried, first  # results, which need not be there while others are timed
    times: dict[str, list[float]] = {name: [] for name in off}
    for _ in range(rounds):
        for name, found in times.items():
            found.append(clock.once(works[name]).wall)
    for name in works:
        seconds = statistics.median(times[name]) if name in times else None
        yield about_case(name, name in case.choices, seconds=seconds, memory_bytes=memory[name], off=off.get(name),
                         error=errors[name])  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    results: Any = None
    memory: int | None = None
    error: str = ""


def attempt(work: Work, device: torch.device) -> Attempt:
    """Twice: the first run compiles, and may need more memory than any other."""
    try:
        work()
        if device.type == "cpu":
            return Attempt(work())
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        results = work()
        torch.cuda.synchronize(device)
        return Attempt(results, torch.cuda.max_memory_allocated(device) - before)
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Attempt(error=said(error))


def said(error: Exception) -> str:
    """Its last word: compilers say much."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def difference(found: Any, wanted: Any) -> float | None:
    """The largest relative difference of any tensor; None where an op changes its inputs instead."""
    pairs = [
        (a.detach().float(), b.detach().float())
        for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    ]
    if not pairs:
        return None
    return digits(max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs))


def backward_rows(rows: Sequence[Row], roof: Roof) -> Iterator[Row]:
    """What both passes take beyond the forward pass."""
    alone = {(row.op, row.model, str(row.shape), row.implementation): row for row in rows if row.part == FORWARD}
    for both in rows:
        forward = alone.get((both.op, both.model, str(both.shape), both.implementation))
        if both.part == BOTH and forward and forward.seconds is not None and both.seconds is not None:
            bytes_, flops = both.bytes - forward.bytes, both.flops - forward.flops
            yield replace(
                both, part="backward", chosen_from=False, bytes=bytes_, flops=flops, floor_s=roof.floor(bytes_, flops),
                seconds=both.seconds - forward.seconds, memory_bytes=None, off=None,
            )  # fmt: skip


# --- what is chosen -------------------------------------------------------------------------------------


def winners(rows: Iterable[Row]) -> dict[str, dict[str, str]]:
    """By op and shape, of those that training may be given: in both passes where an op has two."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row.part == BOTH):  # which then takes the place of the forward pass
        if row.chosen_from and row.part in (FORWARD, BOTH) and row.seconds is not None:
            found.setdefault((row.op, dispatch.text_of(row.shape)), {})[row.implementation] = row
    best: dict[str, dict[str, str]] = {}
    for (op, shape), ways in found.items():
        if dispatch.TORCH in ways:
            best.setdefault(op, {})[shape] = winner(ways)
    return best


def winner(ways: Mapping[str, Row]) -> str:
    near = {name: row.seconds for name, row in ways.items() if row.seconds and (row.off is None or row.off <= FAR)}
    return min(near, key=lambda name: near[name] * (1 + MARGIN * (name != dispatch.TORCH)), default=dispatch.TORCH)


def refuse_record(device: torch.device) -> None:
    """Before minutes are spent."""
    if device.type == "cpu":
        raise SpecError("--record: on a CPU every op is PyTorch's; run it where there is a GPU")


def record(facts: Mapping[str, Any]) -> Path:
    """Write the winners for this device to where `kernels.dispatch` reads them; other devices, ops and shapes stay."""
    kept = dict(dispatch.table())
    versions = ", ".join(f"{name} {facts['made'][name]}" for name in ("torch", "triton") if name in facts["made"])
    before, winners = kept.get(facts["device"], {}), facts["winners"]
    dates = {**before.get("measured", {}), **dict.fromkeys(winners, f"{facts['made']['date']}, {versions}")}
    points = {op: {**before.get(op, {}), **winners.get(op, {})} for op in {**before, **winners} if op != "measured"}
    kept[facts["device"]] = {"measured": dates, **points}
    try:
        write_whole(dispatch.MEASURED, HEADER + dump_toml(kept).lstrip("\n"))
    except OSError as error:
        raise LMWorksError(f"--record: cannot write {dispatch.MEASURED}: {error.strerror}") from None
    return dispatch.MEASURED
