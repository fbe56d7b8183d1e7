"""The memory sheet of one rank, in bytes: what is always there, and the moment at which most is.

Weights, master weights and optimizer states are exact for our own trainer (`rank_weights.py`). What a step needs beside
them is worked out for the few moments that can be the highest: activations and the loss (`peak_memory.py`), gradients
and what data parallelism has on its way (`dp_buffers.py`). Every moment is a list of rows; the peak is the largest sum.
On a GPU it is what tensors hold, as `max_memory_allocated` counts it: context and allocator come on top (`reserve.py`).
On a CPU it is the growth of the resident set, so what the allocator cannot use again is a row as well.

`memory` is the sheet of a rank of a run, `budget` the same rows by kind, of one candidate or of thousands at once.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...spec import Gpu, Grid, RunSpec, SpecError
from ...spec.layout import SPLIT_BACKWARD
from ..case import Case, Number
from ..exact.shards import rank_stages
from ..passes import (
    CRITIC,
    GENERATE,
    OPTIMIZER,
    POLICY,
    REWARD,
    UPDATE,
    UPDATE_CRITIC,
    WEIGHTS,
    HeldModel,
    Part,
    held_models,
    needed,
    trained_model,
)
from ..policies import run_case
from ..saved_activations import total
from .dp_buffers import dp_buffers
from .host_need import HostNeed, host_need, host_states, resting, staging
from .peak_memory import IN_BACKWARD, LOSS, Activations, Row, candidate_peaks, row, sum_bytes
from .phases import (
    ModelMemory,
    PhaseSheet,
    Update,
    engine_memory,
    forward_working,
    generate_working,
    held_beside,
    movable_parts,
    phase_sheet,
    resting_gradients,
    rollout_rank,
)
from .rank_weights import Place, Resident, deepspeed_resident, distinct, on_device
from .reserve import WORKSPACES, reserved

MASTER = {4: "fp32 copies of what this rank updates", 2: "2 B for each weight updated, with which it is an fp32 number"}
OVERHEAD = ("allocator holes", "cuBLAS workspaces", "copy for a save")  # rows that are not tensors
HELD = ("parameters", "padding", "master weights", "optimizer states")  # by a rank between steps, of a trained model
# Rows of a budget's kinds; all others are activations.
LOGITS = ("loss: chunk of logits", "loss: logits")
BUFFERS = (
    "weight casts", "gathered weights", "messages", "pipeline buffers", "padding", "embedding gradient",
    "gradients that wait", "loss: gradients", "cuBLAS workspaces",
)  # fmt: skip


@dataclass(frozen=True)
class MemorySheet:
    """Rows add up to `total`, the predicted peak; `peaks` has the sum of each moment."""

    moment: str
    rows: tuple[Row, ...]
    peaks: dict[str, Any]
    notes: tuple[str, ...] = ()
    host_parts: HostNeed = HostNeed()  # what it keeps in host memory

    @property
    def total(self) -> Any:
        return sum(row.bytes for row in self.rows)

    @property
    def host(self) -> int:
        return self.host_parts.total

    @property
    def tensors(self) -> Any:
        """What tensors hold; exact for dense models on one rank, see tests/plan/test_memory.py."""
        return sum(row.bytes for row in self.rows if row.name not in OVERHEAD)


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank. The first four are those just before the update, the next three at the highest moment."""

    parameters: Number
    gradients: Number
    master: Number
    optimizer: Number
    activations: Number
    logits: Number
    buffers: Number  # gathered weights, messages, gradients on their way, workspaces
    absent: Number  # gradients that are not made yet at the highest moment
    left: Number  # freed before it, but in blocks that nothing of that moment fits
    host: Number  # in host memory
    others: Number = 0.0  # other models of post-training: weights, and optimizer states of a critic
    engine: Number = 0.0  # weights of the engine that samples answers, whose cache sleeps

    @property
    def allocated(self) -> Number:
        there = self.parameters + self.gradients + self.master + self.optimizer
        return there + self.activations + self.logits + self.buffers - self.absent + self.others + self.engine

    @property
    def reserved(self) -> Number:
        return reserved(self.allocated) + self.left

    def to_dict(self) -> dict[str, float]:
        found = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return found | {"allocated": float(self.allocated), "reserved": float(self.reserved)}


# --- one rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPeaks:
    """Rows of every moment of one rank, and what they stand on."""

    state: Resident
    work: Activations
    moments: dict[str, list[Row]]


def rank_peaks(case: Case, place: Place, state: Resident | None = None, copies: int = 1) -> RankPeaks:
    """`state`: of another engine than ours; `copies` of a message on its way: 2 on a CPU, where gloo makes one more."""
    if case.recompute == "budget" and not case.policies:
        raise SpecError("parallel.recompute = 'budget' has no closed form; plan with none, selective, mlp or full")
    work = Activations.of(case, place)
    state = state or on_device(work.weights.resident, case.offload)
    static = [*static_rows(case, state, work), *overhead_rows(case, work)]
    passes, beside = candidate_peaks(work, place), dp_buffers(case, work.weights, state, copies)
    moments = {moment: [*static, *rows, *passes.get(moment, [])] for moment, rows in beside.items()}
    return RankPeaks(state, work, moments)


def static_rows(case: Case, state: Resident, work: Activations) -> list[Row]:
    load, code = work.net.load, case.software
    ids, each = 3 if load.documents else 2, code.weights
    tokens = case.micro_batch * case.seq * np.where(np.greater(case.pp, 1), case.accumulation, 1)[()]
    master = MASTER.get(each, "") if case.is_lmworks else "fp32 copies of what this rank updates"

    count, name = state.parameters // each, case.optimizer.removesuffix("-bf16")
    of_each = state.optimizer / np.maximum(1, count)
    return [
        row("parameters", state.parameters, "{} B × {:,}", each, count),
        row("padding", state.parameter_padding, "allocated with the parameters, and no part of any"),
        row("master weights", state.master, master),
        row("optimizer states", state.optimizer, "{}: {:.3g} B for each weight held", name, of_each),
        row("batch", 8 * ids * tokens, "int64 tokens and targets: {} B × {:,} tokens", 8 * ids, tokens),
        *pipeline_rows(case, work),
    ]


def pipeline_rows(case: Case, work: Activations) -> list[Row]:
    """PyTorch receives every micro-batch's hidden states, and their gradients, in a buffer of its own."""
    if np.all(np.equal(case.pp, 1)) or case.software.master:
        return []
    ends = 2 * case.virtual - sum(work.stages.first) - sum(work.stages.last)
    ends = np.where(np.greater(case.pp, 1), ends, 0)[()]
    size = case.software.stream * work.net.load.sp_tokens * case.model.hidden
    count = case.accumulation
    return [row("pipeline buffers", ends * count * size, "{} × {} hidden states", ends, count)]


def overhead_rows(case: Case, work: Activations) -> list[Row]:
    """On a GPU the scratch of matrix products, which PyTorch's allocator counts with the tensors.

    On a CPU glibc serves an aligned block only from a larger one, so a freed tensor leaves a hole that the next tensor
    of the same size cannot take: what every block frees in its forward pass stays resident until all is freed.
    """
    if case.device == "cuda":
        return [row("cuBLAS workspaces", WORKSPACES, "32 MiB for the forward and 32 MiB for the backward pass")]
    if platform.libc_ver()[0] != "glibc":
        return []
    block, size = work.net.block, 0.0
    for stage in range(len(work.stages.layers)):
        for policy, count in work.policies(stage).items():
            size += count * np.maximum(0.0, total(block) + total(block, "transient") - work.saved[policy][1])
    return [row("allocator holes", size, "freed by each block in its forward pass")]


# --- a run ----------------------------------------------------------------------------------------------


def memory(spec: RunSpec, device: str = "cpu", rank: int = 0, copies: int = 0) -> MemorySheet:
    """`copies` of a message on its way: 2 on a CPU, where gloo makes one more. Rollout ranks follow the trainer's."""
    if rank >= spec.parallel.world:
        sheets, away = rollout_sheet(spec, device), HostNeed()
    else:
        sheets, away = step_sheets(spec, device, rank, copies)
        if spec.align.method:
            sheets |= generate_sheet(spec, device, rank, sheets) | critic_sheets(spec, device, rank, sheets, copies)
    sums = {moment: sum_bytes(rows) for moment, rows in sheets.items()}
    moment = max(sums, key=lambda name: sums[name])
    return MemorySheet(moment, sheets[moment], sums, tuple(notes(spec)), away)


def step_sheets(
    spec: RunSpec, device: str, rank: int = 0, copies: int = 0
) -> tuple[dict[str, tuple[Row, ...]], HostNeed]:
    """Rows of every moment of a training step, and what is in host memory."""
    case = run_case(spec, device)
    other = deepspeed_resident(spec) if spec.parallel.engine == "deepspeed" else None
    found = rank_peaks(case, Place.of(case.grid, rank), other, copies or (2 if device == "cpu" else 1))
    away = host_need(spec, rank, device, found.work)
    host = []
    if device == "cpu":
        host.append(row("activations on the host", away.activations, "which is the device"))
        host.append(row("copy for a save", away.staging, "that is written while training goes on"))
        host.append(row("models at rest", away.resting, "on the host, which is the device"))
    if spec.align.method:
        host += beside_rows(spec, spec.cluster.accelerator if device == "cuda" else None, rank, UPDATE, POLICY)
    sheets = {moment: tuple(one for one in (*rows, *host) if one.bytes) for moment, rows in found.moments.items()}
    return sheets, away


def generate_sheet(
    spec: RunSpec, device: str, rank: int, step: dict[str, tuple[Row, ...]]
) -> dict[str, tuple[Row, ...]]:
    """While the engine of an online method samples, and while a reward model scores what it has sampled."""
    gpu = spec.cluster.accelerator if device == "cuda" else None
    models, engine = held_beside(spec, gpu, rank)
    if engine is None:
        return {}
    rows = policy_at_rest(spec, models, step)
    rows.append(row("engine: KV cache", engine.cache, "for the answers that are sampled at once"))
    work = row("engine: activations", generate_working(spec, rank, device), "of its largest step, or of a hand-over")
    found = {GENERATE: (*rows, work, *beside_rows(spec, gpu, rank, GENERATE, POLICY))}
    if judge := held_models(spec).get(REWARD):
        size = round(forward_working(judge, spec, spec.data.micro_batch, rank, gpu))
        work = row("reward model: activations", size, "of answers that the engine has sampled")
        found[f"{GENERATE}, {REWARD}"] = (*rows, work, *beside_rows(spec, gpu, rank, GENERATE, REWARD))
    return found


def critic_sheets(
    spec: RunSpec, device: str, rank: int, step: dict[str, tuple[Row, ...]], copies: int
) -> dict[str, tuple[Row, ...]]:
    """Every moment of an update of PPO's critic, with the policy at rest."""
    critic = held_models(spec).get(CRITIC)
    if critic is None:
        return {}
    gpu = spec.cluster.accelerator if device == "cuda" else None
    models, _ = held_beside(spec, gpu, rank)
    case = critic_case(spec, critic, device)
    found = rank_peaks(case, Place.of(case.grid, rank), None, copies or (2 if device == "cpu" else 1))
    rest = [*policy_at_rest(spec, models, step), *beside_rows(spec, gpu, rank, UPDATE_CRITIC, CRITIC)]
    rest += [one for one in next(iter(step.values())) if one.name == "copy for a save"]
    known = (*HELD, "cuBLAS workspaces")
    return {
        f"{UPDATE_CRITIC}, {moment}": (
            *rest,
            *(replace(one, name=f"{CRITIC}: {one.name}") for one in rows if one.bytes and one.name not in known),
        )
        for moment, rows in found.moments.items()
    }


def critic_case(spec: RunSpec, critic: HeldModel, device: str) -> Case:
    """It trains on the rows of the policy."""
    several = bool(critic.weights_of)
    case = run_case(critic.run, device)
    return case.replace(micro_batch=spec.data.micro_batch, documents=True, several_adapters=several)


def policy_at_rest(spec: RunSpec, models: tuple[ModelMemory, ...], step: dict[str, tuple[Row, ...]]) -> list[Row]:
    """What the policy has on the device while it computes nothing."""
    own = {"parameters", "padding", "cuBLAS workspaces", "models at rest"}
    if (POLICY, OPTIMIZER) not in movable_parts(spec, models):
        own |= {"master weights", "optimizer states"}
    return [one for one in next(iter(step.values())) if one.name in own]


def rollout_sheet(spec: RunSpec, device: str) -> dict[str, tuple[Row, ...]]:
    gpu = spec.cluster.accelerator if device == "cuda" else None
    engine, found = engine_memory(spec, (), gpu), rollout_rank(spec, gpu)
    if engine is None or found is None:
        return {}
    rows = (
        row("engine: weights", engine.weights, "of a rollout rank"),
        row("engine: KV cache", engine.cache, "for the answers that are sampled at once"),
        row("engine: activations", found.working, "of its largest step, or a weight that arrives"),
    )
    return {GENERATE: rows}


def beside_rows(spec: RunSpec, gpu: Gpu | None, rank: int, phase: str, model: str) -> list[Row]:
    """What post-training has on the device beside the policy, while `model` computes."""
    models, engine = held_beside(spec, gpu, rank)
    movable, there = movable_parts(spec, models), needed(phase, model)

    def stays(part: Part) -> bool:
        return part not in movable or part in there

    others = [one for one in models[1:] if stays((one.name, WEIGHTS))]
    found = [row(f"{one.name}: weights", one.weights, "beside those of the model above") for one in others]
    trained = [one for one in models[1:] if stays((one.name, OPTIMIZER))]
    found += [row(f"{one.name}: optimizer states", one.optimizer, "at rest") for one in trained]
    if resting_gradients(spec, models):
        idle = [one for one in models if phase == GENERATE or one.name != model]
        found += [row(f"{one.name}: gradients", one.gradients, "buckets that DDP keeps") for one in idle]
    if engine is not None:
        found.append(row("engine: weights", engine.weights, "those that are not the trainer's own"))
    return found


def notes(spec: RunSpec) -> Iterable[str]:
    if spec.parallel.compile:
        yield "what torch.compile fuses, and so does not keep, is estimated op by op"
    if spec.model.experts:
        yield "experts are taken as evenly loaded"
    if spec.parallel.schedule in SPLIT_BACKWARD and spec.parallel.pp > 1 and spec.parallel.recompute == "none":
        yield "PyTorch frees a split backward pass late: up to a tenth more than this sheet says"
    if spec.parallel.engine == "deepspeed":
        yield "DeepSpeed's own buckets and copies are taken to be like ours"


# --- by kind, of one candidate or of many ---------------------------------------------------------------


def budget(case: Case, stage: Number | None = None) -> Budget:
    """Of pipeline rank `stage`, or of the one that needs most: the first two, the last and the fullest are asked.

    The first has most micro-batches in flight, the second receives messages of both sides, the last has the logits, and
    ranks in between may have a block more.
    """
    if stage is not None:
        return budget_at(case, Place(stage))
    found = budget_at(case, Place(0))
    if np.any(np.greater(case.pp, 1)):
        found = larger(found, budget_at(case, Place(case.pp - 1)))
    if np.any(np.greater(case.pp, 2)):
        second, fullest = np.minimum(1, case.pp - 1), rank_of_most_blocks(case)
        found = larger(found, budget_at(case, Place(second)))
        if np.any(second != fullest):
            found = larger(found, budget_at(case, Place(fullest)))
    return found


def rank_of_most_blocks(case: Case) -> Number:
    """The first of them, and so with most micro-batches in flight, of the pipeline ranks between the ends."""

    def one(pp: int, virtual: int) -> Place:
        cut = case.replace(pp=pp, virtual=virtual)
        between = range(1, pp - 1) if pp > 2 else range(pp - 1, pp)
        return Place(max(between, key=lambda rank: sum(len(stage.layers) for stage in rank_stages(cut, rank))))

    return distinct(one, case.pp, case.virtual).pp


def run_budget(spec: RunSpec, stage: int | None = None) -> Budget:
    """Of a run of our own trainer, with what its checkpoints take in host memory."""
    if stage is None:
        return max((run_budget(spec, rank) for rank in range(spec.parallel.pp)), key=lambda one: float(one.allocated))
    found, rank = budget(run_case(spec, "cuda"), stage), Grid.of(spec.parallel).rank(pp=stage)
    _, engine = held_beside(spec, spec.cluster.accelerator, rank)
    sampler = float(engine.weights) if engine else 0.0  # its cache sleeps
    others = float(sum_bytes(beside_rows(spec, spec.cluster.accelerator, rank, UPDATE, POLICY))) - sampler
    host = found.host + staging(spec, rank) + resting(spec, rank, "cuda")
    return replace(found, host=host, others=others, engine=sampler)


def run_phases(spec: RunSpec, gpu: Gpu | None, device: str = "cuda") -> PhaseSheet:
    """The phases of a post-training run, of the rank that needs most."""
    if device == "cuda":
        found = run_budget(spec)
        trainer = float(found.allocated - found.others - found.engine)
        updates = {trained_model(spec): Update(trainer, float(found.gradients - found.absent))}
        return phase_sheet(spec, updates | critic_update(spec, device), gpu)
    highest = max(step_sheets(spec, device)[0].values(), key=sum_bytes)
    beside = sum_bytes(beside_rows(spec, None, 0, UPDATE, POLICY))
    beside += sum_bytes(one for one in highest if one.name == "models at rest")
    made = sum_bytes(one for one in highest if one.name == "gradients")
    updates = {trained_model(spec): Update(sum_bytes(highest) - beside, made)}
    return phase_sheet(spec, updates | critic_update(spec, device), None)


def critic_update(spec: RunSpec, device: str) -> dict[str, Update]:
    critic = held_models(spec).get(CRITIC)
    if critic is None:
        return {}
    found = budget(critic_case(spec, critic, device), 0)
    return {CRITIC: Update(float(found.allocated), float(found.gradients - found.absent))}


def larger(one: Budget, other: Budget) -> Budget:
    worse = np.greater(other.allocated, one.allocated)
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(Budget)}
    return Budget(**{name: np.where(worse, b, a)[()] for name, (a, b) in pairs.items()})


def budget_at(case: Case, place: Place) -> Budget:
    found = rank_peaks(case, place)
    state, sums = found.state, [sum_bytes(rows) for rows in found.moments.values()]
    highest = np.stack(np.broadcast_arrays(*sums)).argmax(axis=0)

    def at_highest(*names: str) -> Any:
        """Of rows with these names, bytes at the highest moment."""
        each = [sum_bytes(one for one in rows if one.name in names) for rows in found.moments.values()]
        return np.choose(highest, np.broadcast_arrays(*each, highest)[:-1])[()]

    there, buffers, logits = at_highest("gradients"), at_highest(*BUFFERS), at_highest(*LOGITS)
    rest = np.choose(highest, np.broadcast_arrays(*sums, highest)[:-1])[()] - there - buffers - logits
    forward = np.isin(highest, [n for n, moment in enumerate(found.moments) if moment in (LOSS, IN_BACKWARD[LOSS])])
    return Budget(
        parameters=state.parameters,
        gradients=state.gradients,
        master=state.master,
        optimizer=state.optimizer,
        activations=rest - state.parameters - state.master - state.optimizer,
        logits=logits,
        buffers=buffers + np.maximum(0, there - state.gradients),
        absent=np.maximum(0, state.gradients - there),
        left=found.work.unusable() * forward,
        host=host_states(case, found.work.weights) + found.work.pinned,
    )


def saved_by_blocks(case: Case, rank: Number = 0) -> Number:
    """What the blocks of a pipeline rank keep between forward and backward, of all micro-batches under way."""
    passes = candidate_peaks(Activations.of(case, Place(rank)), Place(rank))
    rows = [passes[moment] for moment in (LOSS, IN_BACKWARD[LOSS]) if moment in passes]
    return max(sum_bytes(one for one in found if one.name == "activations of blocks") for found in rows)
