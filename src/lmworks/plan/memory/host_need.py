"""Host memory that a run keeps: offloaded states, offloaded activations, and the copies that asynchronous saves write.

What is pinned for a GPU comes in powers of two: PyTorch's allocator rounds up to them. `states` (parallel.offload) are
weights, gradients and moments (`rank_weights.py`); `activations` (parallel.offload_activations) a slab for each block
that sends some; `resting` (align.offload) models and optimizer states of post-training between their phases; `staging`
(checkpoint.asynchronous) what a rank writes of a checkpoint, copied: its writer process maps the same memory. Of a
tensor that several ranks hold alike one writes all, whichever has least to write so far: here each has its even part,
which is what all of them together write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ...spec import RunSpec
from ..activation_offload import MIN_TENSOR_BYTES
from ..case import Case, Number
from ..exact.optimizers import STATES
from ..exact.shards import FP32, ROWS_CUT, described, local_shapes, rank_stages
from ..passes import HeldModel, held_models
from ..policies import run_case
from .peak_memory import Activations
from .phases import held_beside, movable_parts
from .rank_weights import Place, RankWeights, pinned_size

GENERATORS = 15_088  # bytes of the states of Python's, NumPy's and torch's: train/rng.py's, as a test holds


@dataclass(frozen=True)
class HostNeed:
    """Bytes of one rank, or of all ranks of a machine."""

    states: int = 0
    activations: int = 0
    staging: int = 0
    resting: int = 0

    @property
    def total(self) -> int:
        return self.states + self.activations + self.staging + self.resting

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def host_need(spec: RunSpec, rank: int, device: str, work: Activations | None = None) -> HostNeed:
    """`work`: the activations of this rank, where they are known already."""
    if work is None:
        case = run_case(spec, device)
        work = Activations.of(case, Place.of(case.grid, rank))
    # What DeepSpeed keeps there is its own, and not known.
    states = host_states(work.case, work.weights) if spec.parallel.engine == "native" else 0
    return HostNeed(int(states), int(work.pinned), staging(spec, rank), resting(spec, rank, device))


def resting(spec: RunSpec, rank: int, device: str) -> int:
    """One buffer for the weights or the optimizer states of each model (align/residency.py)."""
    if spec.align.offload == "none":
        return 0
    models, _ = held_beside(spec, None, rank)
    return sum(pinned_size(size) if device == "cuda" else size for size in movable_parts(spec, models).values())


def host_states(case: Case, held: RankWeights) -> Number:
    """Bytes of weights, gradients and states; of candidates as of one."""
    if case.offload == "none":
        return 0
    if case.device == "cuda":
        return held.pinned_full if case.offload == "full" else held.pinned_optimizer
    if case.offload == "full":
        return held.resident.total
    return 2 * case.software.weights * held.updated + held.master + held.optimizer


def machine_need(spec: RunSpec, ranks: Iterable[int], device: str) -> HostNeed:
    """Of ranks that share a machine."""
    found = [host_need(spec, rank, device) for rank in ranks]
    return HostNeed(*(sum(part) for part in zip(*(one.to_dict().values() for one in found), strict=True)))


def staging(spec: RunSpec, rank: int) -> int:
    """Weights, master, moments, counts of steps, biases of experts and generators; DeepSpeed's are not known."""
    if spec.parallel.engine != "native" or not spec.checkpoint.asynchronous:
        return 0
    grid = Case.of(spec).grid
    alike = grid.world // grid.size("pp")  # ranks of one stage
    size = sum(saved_bytes(model, rank) for model in held_models(spec).values() if model.trained)
    return math.ceil(size / alike + GENERATORS / grid.world)


def saved_bytes(held: HeldModel, rank: int) -> int:
    """Of a model that is trained: what the ranks of a stage write together of it."""
    spec, case, model = held.run, Case.of(held.run), held.run.model
    grid, kind, code = case.grid, case.sharding, case.software
    stages = rank_stages(case, grid.coordinates(rank)["pp"])
    uncut = {weight.name: weight.size for stage in stages for weight in described(model, stage, case.adapters)}
    each = code.weights + code.low_bytes + int(STATES[case.optimizer])
    steps = FP32 * (spec.optim.optimizer == "adamw" or code.weights == 2)
    size = (
        FP32
        * model.experts
        * bool(model.balance_bias)
        * sum(model.has_experts(layer) for stage in stages for layer in stage.layers)
    )
    size *= not held.weights_of  # they are the other model's
    for weight, shape in local_shapes(spec, rank):
        parts = uncut[weight.name] // weight.size  # of tensor and expert parallelism
        own = math.prod(shape)
        if kind == "fsdp1":  # which joins its runs before they are saved
            own = weight.size
        elif kind in ROWS_CUT:
            parts *= grid.size(weight.axis)
        size += each * own * parts + steps
    return size


# --- whether it fits -------------------------------------------------------------------------------------


GIB = 2**30


def refusal(spec: RunSpec, need: HostNeed, ranks: int, there: int | None) -> str:
    """One line where they need more than the bytes that are `there`; none where it fits, or nobody knows."""
    if there is None or need.total <= there:
        return ""
    layout, parts = spec.parallel, {name: size for name, size in need.to_dict().items() if size}
    asked = {
        "states": f"parallel.offload = '{layout.offload}'",
        "activations": f"parallel.offload_activations = {layout.offload_activations:g}",
        "staging": "checkpoint.asynchronous = true",
        "resting": f"align.offload = '{spec.align.offload}'",
    }
    much = f"{gib(need.total / ranks)} of host memory"
    if ranks > 1:
        much += f" for each of the {ranks} ranks on this machine, {gib(need.total)} in all"
    text = f"{listed([asked[name] for name in parts])} need{'s' * (len(parts) == 1)} {much}"
    text += f", and {gib(there)} are free; {what_fits(spec, need, ranks, there)}"
    if "activations" in parts:
        text += ", and parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    return text


def what_fits(spec: RunSpec, need: HostNeed, ranks: int, there: int) -> str:
    """The one change that is enough, or any of them; all of them, where none is."""
    left = {name: there - (need.total - size) for name, size in need.to_dict().items() if size}  # for this one alone
    without = {
        "states": "parallel.offload = 'none'",
        "staging": "checkpoint.asynchronous = false",
        "resting": "align.offload = 'none'",
    }
    enough = [without[name] for name, room in left.items() if name in without and room >= 0]
    if "activations" in left:
        whole = (
            left["activations"] // ranks - spec.model.layers * MIN_TENSOR_BYTES
        )  # a block's last piece may hold a byte
        if most := max(0, whole // (GIB // 10)) / 10:
            enough.append(f"parallel.offload_activations = {most:g}")
        without["activations"] = "parallel.offload_activations = 0"
    if enough:
        return f"{' or '.join(enough)} would fit"
    if list(left) == ["activations"]:
        return "nothing worth the way would fit"
    return f"{listed([without[name] for name in left])} together would fit"


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size < 1000 * GIB else f"{size / GIB:,.0f} GiB"


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
