"""The memory of post-training: what every model of a run holds, and what a rank needs at most in each phase.

    generate   the engine samples: its weights, its KV cache, and the trainer's models and states at rest; then the
               engine sleeps, and the memory of its cache is the trainer's
    score      forward passes without gradients (old log-probabilities, reference)
    hand over  with align.rollout_ranks a rank of the trainer has no engine: weights are gathered and sent one at a time
    update     forward and backward passes of a model that is trained, and its optimizer; the critic's is a phase of its
               own

    save       of a checkpoint, where models rest: all that is trained is on the device

Weights, gradients and states are exact (`rank_weights.py`). With align.offload = "resting" what a phase does not need
is in host memory (`passes.needed`), and models that score come one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...spec import EngineSpec, Gpu, RunSpec
from ..case import Case
from ..exact.hand_over import HandOverBytes, engine_weights, engine_width, hand_over_bytes, hand_over_working
from ..exact.shards import gathered_bytes
from ..passes import (
    GENERATE,
    HAND_OVER,
    OPTIMIZER,
    POLICY,
    REWARD,
    SAVE,
    SCALAR,
    SCORE,
    STATES,
    TEACHER,
    WEIGHTS,
    HeldModel,
    Part,
    held_models,
    needed,
    passes,
)
from ..policies import run_case
from ..saved_activations import stream_bytes, total
from ..serving.served_model import Cache
from .peak_memory import Activations, logprob_chunk_bytes
from .rank_weights import Place, Resident, adapter_resident, frozen_resident, on_device, resident
from .reserve import WORKSPACES, capacity, reserve

MAX_SEQS = {"cuda": 1024, "cpu": 64}  # as in align/rollout_engine.py, which a test compares
BATCH_TOKENS = {"cuda": 8192, "cpu": 512}  # of one step, as spec/serving.py has it
CPU_CACHE = 2**30  # as in engine/core/kv_cache.py


@dataclass(frozen=True)
class ModelMemory:
    """Of one model on one rank, in bytes."""

    name: str
    parameters: int  # of the whole model
    trained: int  # of them, those with gradients
    weights: int
    gradients: int
    optimizer: int  # states and master weights
    shares: str = ""  # whose weights it uses; those that are counted here are of its adapter


@dataclass(frozen=True)
class EngineMemory:
    weights: int  # of its own, beside those that it shares with the trainer
    shared: int
    cache: int  # 0: no room for one, so the run does not start


@dataclass(frozen=True)
class PhaseMemory:
    """`peak` = resting + gradients + working."""

    phase: str
    runs: tuple[str, ...]  # models at work
    resting: int  # weights and optimizer states on the device, the engine's weights and, while it samples, its cache
    gradients: int
    working: int  # activations, logits, gathered weights, messages

    @property
    def peak(self) -> int:
        return self.resting + self.gradients + self.working

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak}


@dataclass(frozen=True)
class Update:
    """Of one model alone, in bytes: the highest moment of a step, and the gradients that are there then."""

    peak: float
    gradients: float


@dataclass(frozen=True)
class PhaseSheet:
    models: tuple[ModelMemory, ...]
    engine: EngineMemory | None
    phases: tuple[PhaseMemory, ...]  # of a rank of the trainer
    hand_over: HandOverBytes | None = None  # of weights to the engine, in every round
    rollout_rank: PhaseMemory | None = None  # one of align.rollout_ranks: an engine that is always awake
    host: int = 0  # bytes of models and states that rest in host memory while a phase does not need them

    @property
    def highest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def engine_starts(self) -> bool:
        return self.engine is None or self.engine.cache > 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "models": [asdict(model) for model in self.models],
            "engine": asdict(self.engine) if self.engine else None,
            "hand_over": asdict(self.hand_over) if self.hand_over else None,
            "phases": [phase.to_dict() for phase in self.phases],
            "rollout_rank": self.rollout_rank.to_dict() if self.rollout_rank else None,
            "highest_phase": self.highest.phase,
            "host": self.host,
        }


def phase_sheet(spec: RunSpec, updates: Mapping[str, Update], gpu: Gpu | None, rank: int = 0) -> PhaseSheet:
    """`updates`: of each model that is trained."""
    held = held_models(spec)
    models, engine = held_beside(spec, gpu, rank)
    movable = movable_parts(spec, models)
    always = sum(model.weights + model.optimizer for model in models) - sum(movable.values())
    always += engine.weights if engine else 0
    kept = resting_gradients(spec, models)

    def phase(name: str, model: str, working: float, gradients: int = kept) -> PhaseMemory:
        there = needed(name, model)
        resting = always + sum(size for part, size in movable.items() if part in there)
        resting += engine.cache if engine and name == GENERATE else 0
        return PhaseMemory(name, (model,), resting, gradients, round(working))

    generated: list[PhaseMemory] = []
    if engine is not None:
        generated.append(phase(GENERATE, POLICY, generate_working(spec, rank, "cpu" if gpu is None else "cuda")))
    if spec.align.rollout_ranks:
        generated.append(phase(HAND_OVER, POLICY, hand_over_working(spec)))
    if engine is not None and REWARD in held:  # it scores answers before the engine sleeps
        rows = spec.data.micro_batch
        generated.append(phase(GENERATE, REWARD, forward_working(held[REWARD], spec, rows, rank, gpu)))
    scored = {
        one.model: phase(SCORE, one.model, forward_working(held[one.model], spec, one.rows, rank, gpu))
        for one in passes(spec)
        if one.phase == SCORE and not (one.model == REWARD and engine is not None)
    }
    found = [*together(generated, bool(movable)), *together(list(scored.values()), bool(movable))]
    for one in passes(spec):
        if one.backward:
            step, alone = updates[one.model], resident(held[one.model].run, rank)
            states = alone.parameters + alone.parameter_padding + alone.optimizer + alone.master
            others = kept - (kept and next(model.gradients for model in models if model.name == one.model))
            working = step.peak - states - step.gradients
            found.append(phase(one.phase, one.model, working, round(step.gradients) + others))
    if movable:
        trained = tuple(model.name for model in models if model.trained)
        found.append(replace(phase(SAVE, POLICY, 0), runs=trained))
    hand_over = hand_over_bytes(spec, rank) if spec.align.online else None
    return PhaseSheet(models, engine, tuple(found), hand_over, rollout_rank(spec, gpu), sum(movable.values()))


def together(rows: list[PhaseMemory], apart: bool) -> list[PhaseMemory]:
    """One row for models that are all on the device, whichever computes."""
    if apart or not rows:
        return rows
    return [replace(max(rows, key=lambda row: row.peak), runs=tuple(name for row in rows for name in row.runs))]


def movable_parts(spec: RunSpec, models: tuple[ModelMemory, ...]) -> dict[Part, int]:
    """Bytes of what rests in host memory: whole models beside the policy, and optimizer states.

    Adapters stay: FSDP2 gathers those of a block with it.
    """
    if spec.align.offload == "none":
        return {}
    weights = {(model.name, WEIGHTS): model.weights for model in models[1:] if not model.shares}
    return weights | {(model.name, OPTIMIZER): model.optimizer for model in models if model.trained}


def held_beside(spec: RunSpec, gpu: Gpu | None, rank: int) -> tuple[tuple[ModelMemory, ...], EngineMemory | None]:
    """The models of a run, the trained one first, and its engine, unless other ranks have it."""
    if spec.parallel.engine != "native":
        return (), None
    models = tuple(model_memory(model, rank) for model in held_models(spec).values())
    return models, None if spec.align.rollout_ranks else engine_memory(spec, models, gpu)


def model_memory(model: HeldModel, rank: int) -> ModelMemory:
    run, case = model.run, Case.of(model.run)
    adapter = run.model.layers * sum(weight.size for weight in case.adapters)
    parameters = run.model.params + adapter  # adapters are no part of ModelSpec.params
    if model.weights_of:
        held = adapter_resident(run, rank) if adapter else Resident()
    else:
        held = resident(run, rank) if model.trained else on_device(frozen_resident(run, rank), run.parallel.offload)
    weights = held.parameters + held.parameter_padding
    if not model.trained:
        return ModelMemory(model.name, parameters, 0, weights, 0, 0, model.weights_of)
    trained = adapter + run.model.hidden * run.model.scalar_head if adapter else parameters
    gradients, states = held.gradients + held.gradient_padding, held.optimizer + held.master
    return ModelMemory(model.name, parameters, trained, weights, gradients, states, model.weights_of)


def resting_gradients(spec: RunSpec, models: tuple[ModelMemory, ...]) -> int:
    """DDP keeps its buckets from step to step."""
    return sum(model.gradients for model in models) if Case.of(spec).sharding == "ddp" else 0


# --- engine ---------------------------------------------------------------------------------------------


def engine_memory(spec: RunSpec, models: tuple[ModelMemory, ...], gpu: Gpu | None) -> EngineMemory | None:
    """Of a rank's shard of an engine (align/rollout_engine.py).

    It takes align.engine_memory of the GPU for its cache, less what is allocated when it starts: weights of all models
    and its own, and optimizer states that do not wait for the first step. More than all its sequences at full length
    need it does not take.
    """
    if not spec.align.online:
        return None
    weights = engine_weights(spec)
    own = sum(weight.bytes for weight in weights if not weight.shared)
    cache = Cache.of(spec.model, tp=spec.align.engine_tp)
    block = EngineSpec().block
    block_bytes = round(block * cache.token_bytes * engine_width(spec) / 2)
    device = "cpu" if gpu is None else "cuda"
    most = engine_sequences(spec, device) * -(-spec.data.seq // block)
    room = float(CPU_CACHE)
    if gpu is not None:
        early = spec.precision.low_precision_optimizer(spec.optim.optimizer)
        held = sum(model.weights + early * model.optimizer for model in models)
        movable = movable_parts(spec, models).items()
        away = sum(size for (_, kind), size in movable if early or kind == WEIGHTS)
        there = held - away + own + engine_working(spec, device)
        room = spec.align.engine_memory * capacity(gpu) - reserve().context - there
    blocks = max(0, min(int(room) // block_bytes, most))
    return EngineMemory(own, sum(weight.bytes for weight in weights if weight.shared), blocks * block_bytes)


def rollout_rank(spec: RunSpec, gpu: Gpu | None) -> PhaseMemory | None:
    """A rank that only samples: nothing beside its engine, and a whole weight while new ones arrive."""
    if not spec.align.rollout_ranks or (engine := engine_memory(spec, (), gpu)) is None:
        return None
    largest = max(weight.whole for weight in engine_weights(spec))
    working = max(engine_working(spec, "cpu" if gpu is None else "cuda"), largest)
    return PhaseMemory(GENERATE, (POLICY,), engine.weights + engine.cache, 0, working)


def engine_sequences(spec: RunSpec, device: str) -> int:
    """Answers that one engine runs at once."""
    answers = -(-spec.align.prompts * spec.align.samples * spec.align.engine_tp // spec.sampling_ranks)
    return min(answers, MAX_SEQS[device])


def engine_working(spec: RunSpec, device: str) -> int:
    """Of its largest step: a chunk of prompts through one block, and logits of all sequences in fp32, twice."""
    m, width, tokens = spec.model, engine_width(spec), BATCH_TOKENS[device]
    inside = max(3 * m.ffn, 2 * m.heads * m.head_dim) // spec.align.engine_tp
    return width * tokens * (2 * m.hidden + inside) + 2 * 4 * engine_sequences(spec, device) * m.vocab


def generate_working(spec: RunSpec, rank: int, device: str) -> int:
    """Of the engine, or of a hand-over while it is awake."""
    return max(engine_working(spec, device), hand_over_working(spec, rank))


# --- passes without gradients ---------------------------------------------------------------------------


def forward_working(model: HeldModel, spec: RunSpec, rows: int, rank: int, gpu: Gpu | None) -> float:
    """Of a forward pass without gradients: the stream and the larger half of one block, or a chunk of logits."""
    case = run_case(spec, "cpu" if gpu is None else "cuda").replace(model=model.run.model, micro_batch=rows)
    if model.name == TEACHER:
        case = case.replace(head=STATES, adapters=(), frozen_base="")
    work = Activations.of(case, Place.of(case.grid, rank))
    net = work.net
    inside = 2 * stream_bytes(net) + max(total(half) for half in net.halves)
    last = 0.0 if case.head in (SCALAR, STATES) else float(logprob_chunk_bytes(net.load)[0])
    casts = 2.0 * work.head if net.load.cast else 0.0
    gathered = 0.0
    if case.sharding == "fsdp2":
        blocks = 1 + min(case.prefetch, case.model.layers - 1)
        gathered = case.software.weights * work.weights.gathered_root
        gathered += gathered_bytes(case, 0) * work.weights.gathered_block * blocks
    workspaces = WORKSPACES if gpu is not None else 0
    return float(np.maximum(inside, stream_bytes(net) + last + casts) + gathered + workspaces)
