"""The time of a step or round of post-training by phase: hand-over of weights, generation, scoring, updates.

    hand over  weights that the engine does not share, from the trainer's layout to its own (`exact/hand_over.py`)
    generate   prompts are computed once, then a token of every answer that has not ended in each step of the engine
               (`serving/inference.py`); answers that do not fit at once run in waves
    score      forward passes without gradients, of every model that scores
    update     steps of the policy, and of a critic, by the model of training steps (`step/price.py`)

With align.rollout_ranks weights are also broadcast, and generation runs on other ranks: where their answers may be
stale it overlaps with scores and updates, and a round takes as long as the longer of the two, and the hand-over.

Rewards by functions and the host are not priced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import Gpu, RunSpec
from .case import Case
from .exact.hand_over import moved_weights
from .memory.phases import MAX_SEQS
from .passes import GENERATE, HAND_OVER, POLICY, SCALAR, STATES, TEACHER, held_models, passes
from .serving.inference import Deployment, Rates
from .serving.served_model import ServedModel
from .step.comm import Links
from .step.constants import constants
from .step.price import Step, price
from .step.uncalibrated import Uncalibrated

ENGINE = "vllm"  # whose fitted overheads stand for those of our engine


@dataclass(frozen=True)
class Answers:
    """What a round samples, on one replica of the engine."""

    prompts: int
    samples: int  # answers to each
    prompt_tokens: int
    mean_tokens: float  # of an answer
    max_tokens: int

    @property
    def count(self) -> int:
        return self.prompts * self.samples

    def running(self) -> NDArray[Any]:
        """Share of the answers that have not ended before their t-th token: an exponential tail, cut at the longest.

        The mean of min(X, L) with a rate r is (1 − e^(−rL)) / r.
        """
        steps, longest = np.arange(self.max_tokens), float(self.max_tokens)
        if self.mean_tokens >= longest:
            return np.ones(self.max_tokens)
        low, high = 1e-9, 10.0
        for _ in range(80):
            rate = (low + high) / 2
            low, high = (rate, high) if (1 - np.exp(-rate * longest)) / rate > self.mean_tokens else (low, rate)
        return np.exp(-low * steps)


def generate_seconds(engine: Deployment, answers: Answers, at_once: int) -> float:
    """Answers run in waves of `at_once`; a wave ends with its longest."""
    prefill = answers.prompts * answers.prompt_tokens
    chunks = max(1, -(-prefill // engine.chunk))
    total = chunks * float(engine.step(prefill=prefill / chunks, prompts=max(1, answers.prompts / chunks)))
    waves = -(-answers.count // at_once)
    batch = np.maximum(1.0, answers.running() * answers.count / waves)
    context = answers.prompt_tokens + np.arange(answers.max_tokens)
    return total + waves * float(np.sum(engine.step(decode=batch, context=context)))


def hand_over_seconds(spec: RunSpec, case: Case) -> float:
    """Weights one after the other: sent, then read and written once by the copy."""
    links, moved = Links.of(case), moved_weights(spec)
    sent = [links.seconds(one.axis, one.kind, one.bytes) for weight in moved for one in weight.transfers]
    copies = 2 * sum(weight.bytes for weight in moved) / (case.gpu.bandwidth_gbs * 1e9)
    seconds = copies + sum(float(one.intra_node + one.inter_node) for one in sent)
    if spec.align.rollout_ranks:  # the ring of a broadcast sends every byte once over each link
        whole, far = sum(weight.whole for weight in moved), spec.parallel.world
        seconds += float(links.fabric.seconds("send", whole, 2, far))
    return seconds


def forward_seconds(case: Case) -> float:
    """Forward passes of all micro-batches of a step, without gradients."""
    step = Step.of(Uncalibrated.of(case), constants())
    one = step.micro_batch
    blocks = step.rank.layers * one.block.forward.seconds
    return float(case.accumulation * (blocks + one.stem.forward.seconds + one.loss.forward.seconds))


def update_seconds(case: Case) -> float:
    """One optimizer step."""
    return float(price(case).seconds)


@dataclass(frozen=True)
class PhaseTime:
    phase: str
    model: str
    seconds: float  # of one round, or of one step where a method has no rounds


def round_seconds(spec: RunSpec, gpu: Gpu, mean_tokens: float = 0.0) -> list[PhaseTime]:
    """`mean_tokens` of an answer (0: as many as the longest has). Prompts are as long as data.seq leaves room for."""
    align, found = spec.align, list[PhaseTime]()
    updates, case = 1, Case.of(spec, gpu)
    if align.online:
        mean, longest = mean_tokens or float(align.max_tokens), align.max_tokens
        prompts = -(-align.prompts * align.engine_tp // spec.sampling_ranks)
        answers = Answers(prompts, align.samples, spec.data.seq - longest, mean, longest)
        engine = Deployment(ServedModel.of(spec.model), gpu, Rates.of(ENGINE), tp=align.engine_tp)
        if moved_weights(spec):
            found.append(PhaseTime(HAND_OVER, POLICY, hand_over_seconds(spec, case)))
        found.append(PhaseTime(GENERATE, POLICY, generate_seconds(engine, answers, MAX_SEQS["cuda"])))
        updates = align.updates(spec.data.global_batch)
        # Answers are packed: rows hold as many as fit.
        rows = spec.data.global_batch * (answers.prompt_tokens + mean) / spec.data.seq / spec.parallel.dp
        case = case.replace(accumulation=max(1, -(-rows // spec.data.micro_batch)))
    models, whole = held_models(spec), align.answers / spec.data.global_batch if align.online else 1.0
    for one in passes(spec):
        head = STATES if one.model == TEACHER else case.head
        head = SCALAR if models[one.model].run.model.scalar_head else head
        adapters = Case.of(models[one.model].run).adapters
        own = case.replace(model=models[one.model].run.model, micro_batch=one.rows, head=head, adapters=adapters)
        seconds = updates * update_seconds(own) if one.backward else whole * forward_seconds(own)
        found.append(PhaseTime(one.phase, one.model, seconds))
    return found


@dataclass(frozen=True)
class RunTime:
    """Of a whole run."""

    phases: tuple[PhaseTime, ...]  # of one round, or step
    rounds: int
    price_hour: float  # of all its accelerators; 0: not known
    overlaps: bool = False  # the next round is sampled while this one is trained on

    @property
    def seconds(self) -> float:
        """Of one round."""
        whole = sum(phase.seconds for phase in self.phases)
        if not self.overlaps:
            return whole
        times = {kind: sum(one.seconds for one in self.phases if one.phase == kind) for kind in (HAND_OVER, GENERATE)}
        generate, hand_over = times[GENERATE], times[HAND_OVER]
        return hand_over + max(generate, whole - generate - hand_over)

    @property
    def hours(self) -> float:
        return self.rounds * self.seconds / 3600

    @property
    def dollars(self) -> float:
        return self.hours * self.price_hour

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "hours": self.hours, "dollars": self.dollars}


def run_time(spec: RunSpec, gpu: Gpu, mean_tokens: float = 0.0) -> RunTime:
    """optim.steps optimizer steps, in rounds where the method samples its answers."""
    updates = spec.align.updates(spec.data.global_batch) if spec.align.online else 1
    price = (spec.cluster.price_hour or gpu.price_hour or 0.0) * spec.ranks
    overlaps = bool(spec.align.rollout_ranks and spec.align.max_staleness)
    return RunTime(tuple(round_seconds(spec, gpu, mean_tokens)), -(-spec.optim.steps // updates), price, overlaps)
