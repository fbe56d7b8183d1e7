"""`lmworks bench kernels`: every implementation of every op of a training step, beside the roofline of the device.

The roofline of an op is the larger of two times: its bytes at the copy bandwidth of this device, its FLOPs at its
matmul rate. Both are measured first, in the same process. Runs of all implementations of a case are interleaved, so
that throttling affects all of them; the median counts. Caches are flushed before every run.

A failure is a row with an error. An implementation whose results differ from PyTorch's is never chosen.
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
from .calibrate import environment_info
from .clock import Clock
from .kernel_ops import BOTH, FORWARD, OPS, Case, OpConfig, TimedCall
from .kernel_timing import DTYPES, device_name, digits
from .roofline import measured_peak_rates

# (batch, seq) by model, as in docs/training.md.
SHAPES = {"gpt2-small": (64, 1024), "llama3-1b": (4, 4096), "llama3-8b": (2, 8192), "qwen3-30b-a3b": (4, 4096)}
MODELS = {"cpu": ("cpu-3m",), "cuda": tuple(SHAPES)}
SMALL = (2, 128)  # of other models on a CPU
HEADER = "# Which implementation was fastest, by device, op and shape; `lmworks bench kernels --record` writes it.\n\n"
ROUNDS = 11
MARGIN = 0.03  # by which an implementation must beat PyTorch to be chosen
MAX_ERROR = 0.05  # relative difference from PyTorch's results, above which it is not rounding


@dataclass(frozen=True)
class DeviceRoofline:
    """Measured peak rates of this device."""

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
    chosen_from: bool  # whether training may use it
    bytes: float
    flops: float
    floor_s: float
    seconds: float | None = None  # None: it failed
    memory_bytes: int | None = None  # peak beyond its inputs; None on a CPU
    off: float | None = None  # relative difference from the first implementation; None: not comparable
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
    """`keep` gets the results after every op of every model, so that an early end loses only one of them."""
    for op in only:
        if op not in OPS:
            raise SpecError(f"--only {op}: there is no such op{did_you_mean(op, OPS)}")
    name = "bf16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[name]
    clock = Clock(device, max_overrun=1.0)
    configs = [op_config(model, batch, seq, device, dtype) for model in models or MODELS[device.type]]
    best = measured_peak_rates(device, name)
    roofline = DeviceRoofline(best.bandwidth, best.flops[name])
    rows: list[Row] = []
    wanted = [(op, config) for op in only or OPS for config in configs]
    about_run = {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "copy_bytes_s": digits(roofline.copy),
        "product_flops": digits(roofline.product),
        "rounds": rounds,
        "made": made(),
    }
    facts: dict[str, Any] = {**about_run, "rows": [], "winners": {}}
    with unlimited_recompiles(device):
        for done, (op, config) in enumerate(wanted):
            progress(f"{op} of {config.name}", done, len(wanted))
            for case in OPS[op](config):
                rows += measure(clock, case, config.name, roofline, rounds)
            written = [row.to_dict() for row in (*rows, *backward_rows(rows, roofline))]
            # On a CPU PyTorch is the only choice.
            facts = {**about_run, "rows": written, "winners": winners(rows) if device.type == "cuda" else {}}
            if keep is not None:
                keep(facts)
    return facts


def unlimited_recompiles(device: torch.device) -> AbstractContextManager[Any]:
    """By default Dynamo stops compiling a function at its ninth shape."""
    if device.type == "cpu":  # nothing is compiled, and importing the compiler takes seconds
        return nullcontext()
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)


def op_config(name: str, batch: int | None, seq: int | None, device: torch.device, dtype: torch.dtype) -> OpConfig:
    model = ModelSpec.from_preset(name)
    own = SHAPES.get(name, (4, 4096)) if device.type == "cuda" else SMALL
    return OpConfig(name, model, batch or own[0], min(seq or own[1], model.context), device, dtype)


def made() -> dict[str, Any]:
    with suppress(metadata.PackageNotFoundError):
        return {**environment_info(), "triton": metadata.version("triton")}
    return environment_info()


# --- one case -------------------------------------------------------------------------------------------


def measure(clock: Clock, case: Case, model: str, roofline: DeviceRoofline, rounds: int) -> Iterator[Row]:
    """One row per implementation."""
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
        floor_s=roofline.floor(case.bytes, case.flops),
    )
    try:
        timed_calls = case.make()
    except Exception as error:
        yield about_case("all", False, error=error_text(error))
        return
    tried = {name: try_run(work, clock.device) for name, work in timed_calls.items()}
    first = next((one.results for one in tried.values() if one.results is not None), None)
    off = {name: difference(one.results, first) for name, one in tried.items() if not one.error}
    memory = {name: one.memory for name, one in tried.items()}
    errors = {name: one.error for name, one in tried.items()}
    del tried, first  # free their memory before timing
    times: dict[str, list[float]] = {name: [] for name in off}
    for _ in range(rounds):
        for name, found in times.items():
            found.append(clock.time_once(timed_calls[name]).wall)
    for name in timed_calls:
        seconds = statistics.median(times[name]) if name in times else None
        yield about_case(name, name in case.choices, seconds=seconds, memory_bytes=memory[name], off=off.get(name),
                         error=errors[name])  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    results: Any = None
    memory: int | None = None
    error: str = ""


def try_run(work: TimedCall, device: torch.device) -> Attempt:
    """Runs twice: the first run compiles and may need more memory."""
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
        return Attempt(error=error_text(error))


def error_text(error: Exception) -> str:
    """Type and first line: compiler errors are long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def difference(found: Any, wanted: Any) -> float | None:
    """The largest relative difference of any tensor; None for in-place ops."""
    pairs = [
        (a.detach().float(), b.detach().float())
        for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
    ]
    if not pairs:
        return None
    return digits(max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs))


def backward_rows(rows: Sequence[Row], roofline: DeviceRoofline) -> Iterator[Row]:
    """Backward time: both passes less the forward pass."""
    alone = {(row.op, row.model, str(row.shape), row.implementation): row for row in rows if row.part == FORWARD}
    for both in rows:
        forward = alone.get((both.op, both.model, str(both.shape), both.implementation))
        if both.part == BOTH and forward and forward.seconds is not None and both.seconds is not None:
            bytes_, flops = both.bytes - forward.bytes, both.flops - forward.flops
            yield replace(
                both, part="backward", chosen_from=False, bytes=bytes_, flops=flops, floor_s=roofline.floor(bytes_,
                flops), seconds=both.seconds - forward.seconds, memory_bytes=None, off=None,
            )  # fmt: skip


# --- choice of implementations --------------------------------------------------------------------------


def winners(rows: Iterable[Row]) -> dict[str, dict[str, str]]:
    """The fastest implementation by op and shape, of those that training may use; by both passes if an op has two."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row.part == BOTH):  # replaces the row of the forward pass
        if row.chosen_from and row.part in (FORWARD, BOTH) and row.seconds is not None:
            found.setdefault((row.op, dispatch.shape_text(row.shape)), {})[row.implementation] = row
    best: dict[str, dict[str, str]] = {}
    for (op, shape), variants in found.items():
        if dispatch.TORCH in variants:
            best.setdefault(op, {})[shape] = winner(variants)
    return best


def winner(variants: Mapping[str, Row]) -> str:
    near = {
        name: row.seconds for name, row in variants.items() if row.seconds and (row.off is None or row.off <= MAX_ERROR)
    }
    return min(near, key=lambda name: near[name] * (1 + MARGIN * (name != dispatch.TORCH)), default=dispatch.TORCH)


def check_record(device: torch.device) -> None:
    """Checked before the benchmark."""
    if device.type == "cpu":
        raise SpecError("--record: on a CPU every op is PyTorch's; run it on a GPU")


def record(facts: Mapping[str, Any]) -> Path:
    """Write the winners for this device to the table of `kernels.dispatch`; other devices, ops and shapes stay."""
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
