"""Rounds of an online method: prompts, sampled answers, rewards, advantages, and the batches of the round's steps.

A round is a function of the weights at its first step, the seed and the prompts. Its answers are kept in the run folder
(`rollouts/`), so that a run that is resumed inside of a round goes on with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import committed
from ..checkpoint.format.manifest import read_committed
from ..data import Batch
from ..engine.core.cuda_graphs import paused_gc
from ..parallel.parallel_model import ParallelModel
from ..parallel.world import all_gather_object, run_on_all_ranks, run_on_rank_zero
from ..plan.passes import CRITIC, GENERATE, POLICY, REFERENCE, REWARD, SCORE, scores_policy
from ..record import phase
from ..spec import RunSpec
from ..train.objective import Forward
from .advantages import best_of_n, dynamic_sampling_mask, group_advantages, overlong_penalty, rloo_advantages
from .environments.environment import ENVIRONMENT
from .kl import AdaptiveKL
from .ppo import set_token_advantages
from .residency import Residency
from .reward_scorer import RewardScorer
from .rollouts import Rollout, added_rewards, by_answer, load_round, micro_batches, prune_rounds, save_round
from .sampler import Sampler


class Rounds:
    """The stream of batches that an online method trains on."""

    def __init__(
        self,
        spec: RunSpec,
        parallel_model: ParallelModel,
        sampler: Sampler,
        pad: int,
        folder: Path,
        *,
        reference: Forward | None = None,
        critic: Forward | None = None,
        reward_model: RewardScorer | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.residency = residency or Residency(parallel_model.device, enabled=False)
        self.spec, self.parallel_model, self.sampler = spec, parallel_model, sampler
        self.pad, self.folder = pad, folder  # token that fills rows
        self.reference, self.critic, self.reward_model = reference, critic, reward_model
        align = spec.align
        self.adaptive_kl = AdaptiveKL(align.beta, align.kl_target or 1.0, align.kl_horizon)
        self.positions = 0  # tokens of prompts and answers in the batch taken last
        self.updates = spec.align.updates(spec.data.global_batch)
        self.number = -1  # of the round at hand
        self.rollouts: list[Rollout] = []
        self.metrics: dict[str, float] = {}  # of the round, until a step is taken with them
        self.checkpoint_rounds: dict[Path, int] = {}  # in which the checkpoints of the run were saved

    # --- the stream of batches -----------------------------------------------------------------------------

    def take(self, cursor: int, ahead: int) -> list[Batch]:
        number, update = divmod(cursor, self.updates)
        if number != self.number:  # where its first batches are skipped, a round begins with the next
            with paused_gc():  # it runs while a GPU computes the update, and not between two decode steps
                self.begin(number, cursor, last=(cursor + ahead - 1) // self.updates)
            self.number = number
        elif not self.rollouts:
            self.rollouts = run_on_all_ranks(lambda: load_round(self.path(number)))
        chosen = self.chosen(update)
        self.positions = sum(rollout.length for rollout in chosen)
        return [batch for batch, _ in self.batches(chosen)]

    def peek(self, cursor: int) -> list[Batch] | None:
        return None  # answers depend on the update before them

    def prefetch(self, cursor: int) -> None:
        pass

    def close(self) -> None:
        self.sampler.close()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The answers of that round are read when a step needs them."""
        self.number, self.rollouts, self.metrics = int(state["number"]), [], {}
        self.checkpoint_rounds = {}  # a rewind saves some of them again

    def path(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}.npz"

    def chosen(self, update: int) -> list[Rollout]:
        """The answers of one optimizer step: every epoch is a permutation of the round's."""
        per_epoch = self.updates // self.spec.align.epochs
        epoch, part = divmod(update, per_epoch)
        order = np.random.default_rng([self.spec.seed, self.number, epoch]).permutation(len(self.rollouts))
        return [self.rollouts[index] for index in sorted(np.array_split(order, per_epoch)[part].tolist())]

    def batches(self, rollouts: Sequence[Rollout]) -> list[tuple[Batch, list[int]]]:
        model, data = self.parallel_model, self.spec.data
        rank = 0 if model.mesh is None else model.mesh.rank("dp")
        return micro_batches(rollouts, rank, model.size("dp"), data.seq, data.micro_batch, self.pad)

    # --- a round --------------------------------------------------------------------------------------------

    def begin(self, number: int, step: int, last: int) -> None:
        """Sample and score the answers of a round; `last`: the last round of the run."""
        align = self.spec.align
        self.residency.enter(GENERATE, POLICY)
        self.sampler.begin_round(number)
        rollouts: list[Rollout] = []
        drawn: list[Rollout] = []
        for attempt in range(1 + align.dynamic_sampling):
            sampled = self.sampler.sample(number * (1 + align.dynamic_sampling) + attempt)
            self.finish_rewards(sampled)
            drawn += sampled
            rollouts += informative_groups(sampled, align.samples) if align.dynamic_sampling else sampled
            if len(rollouts) >= align.prompts * align.samples:
                break
        self.sampler.end_round(number, last)
        self.metrics = self.sampler.metrics | summary(drawn, align.samples, align.max_tokens)
        # Without any signal all advantages are 0: the step changes nothing but its KL term.
        self.rollouts = (rollouts or drawn)[: align.prompts * align.samples]
        phase.enter("score")
        scored = time.perf_counter()
        self.score()
        self.metrics |= sampler_mismatch(self.rollouts)
        if self.reference is not None:
            self.metrics["kl_answer"] = math.fsum(map(log_ratio, self.rollouts)) / len(self.rollouts)
        self.set_advantages()
        if align.method == "best_of_n":
            self.rollouts = self.best()
        self.metrics["score_s"] = time.perf_counter() - scored
        run_on_rank_zero(lambda: self.keep(number, step))

    def score(self) -> None:
        """Log-probabilities of the answers before the first update, and those of the reference."""
        align = self.spec.align

        def logps_of(forward: Forward) -> Callable[[Batch], Tensor]:
            return lambda batch: forward(batch, logprobs=True, temperature=align.temperature).logps

        self.residency.enter(SCORE, POLICY)
        if scores_policy(self.spec):
            self.set_token_values("old_logps", logps_of(self.parallel_model.forward))
        if self.reference is not None:
            self.residency.enter(SCORE, REFERENCE)
            self.set_token_values("ref_logps", logps_of(self.reference))
        if self.critic is not None:
            self.residency.enter(SCORE, CRITIC)
            self.set_token_values("values", self.critic)

    @torch.no_grad()
    def set_token_values(self, name: str, compute: Callable[[Batch], Tensor]) -> None:
        """A number of every token of the answers, on all ranks; `compute` gives those of a micro-batch's rows."""
        own: list[tuple[int, list[float]]] = []
        for batch, numbers in self.batches(self.rollouts):
            table = by_answer(compute(batch), batch).tolist()
            own += [
                (number, row[: len(self.rollouts[number].token_ids)])
                for number, row in zip(numbers, table, strict=False)  # a filler has no answers
            ]
        group = None if self.parallel_model.mesh is None else self.parallel_model.mesh.group("dp")
        for number, values in (pair for share in all_gather_object(own, group) for pair in share):
            setattr(self.rollouts[number], name, values)

    def finish_rewards(self, rollouts: Sequence[Rollout]) -> None:
        """Add the reward model's opinion to the others', and take the penalty of long answers off."""
        align = self.spec.align
        if self.reward_model is not None:
            self.residency.enter(GENERATE, REWARD)
            for rollout, score in zip(rollouts, self.reward_model.score(rollouts, self.batches), strict=True):
                rollout.rewards["reward_model"] = score
                rollout.reward = math.nan if rollout.failure else added_rewards(rollout.reward, score)
            self.residency.enter(GENERATE, POLICY)
        if align.overlong_buffer:
            lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
            penalties = overlong_penalty(lengths, align.max_tokens, align.overlong_buffer)
            for rollout, penalty in zip(rollouts, penalties.tolist(), strict=True):
                rollout.reward += penalty

    def set_advantages(self) -> None:
        align = self.spec.align
        if align.method == "distill":
            return
        if align.method == "ppo":
            set_token_advantages(self.rollouts, align, self.adaptive_kl.coef)
            self.metrics["kl_coef"] = self.adaptive_kl.coef
            if self.reference is not None and align.kl_target:
                self.adaptive_kl.update(self.metrics["kl_answer"], len(self.rollouts))
            return
        rewards = torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float64)
        if align.method == "rloo":
            if self.reference is not None:
                rewards -= align.beta * torch.tensor([log_ratio(rollout) for rollout in self.rollouts])
            advantages = rloo_advantages(rewards, align.samples)
        else:
            advantages = group_advantages(rewards, align.samples, normalize_by_std=align.method != "dr_grpo")
        for rollout, advantage in zip(self.rollouts, advantages.tolist(), strict=True):
            rollout.advantage = advantage

    def best(self) -> list[Rollout]:
        """The best answer to every prompt that has a reward."""
        rewards = torch.tensor([rollout.reward for rollout in self.rollouts])
        return [self.rollouts[index] for index in best_of_n(rewards, self.spec.align.samples).tolist() if index >= 0]

    def keep(self, number: int, step: int) -> None:
        self.folder.mkdir(exist_ok=True)
        save_round(self.path(number), step, self.rollouts)
        checkpoints = committed(self.folder.parent / "checkpoints")
        self.checkpoint_rounds = {
            path: self.checkpoint_rounds[path] if path in self.checkpoint_rounds else round_of(path)
            for path in checkpoints
        }
        needed = {self.path(round_number) for round_number in self.checkpoint_rounds.values()}
        prune_rounds(self.folder, "round-*.npz", needed)


def round_of(checkpoint: Path) -> int:
    """The round that a checkpoint was saved in: after skipped batches it does not follow from the step."""
    return int(read_committed(checkpoint).meta["align"]["rounds"]["number"])


def informative_groups(rollouts: Sequence[Rollout], samples: int) -> list[Rollout]:
    """Answers of groups whose rewards differ."""
    mask = dynamic_sampling_mask(torch.tensor([rollout.reward for rollout in rollouts]), samples)
    return [rollout for rollout, kept in zip(rollouts, mask.tolist(), strict=True) if kept]


def log_ratio(rollout: Rollout) -> float:
    """log π(answer) − log π_ref(answer), by the sampler where the trainer has not scored the answer itself."""
    own = rollout.sampler_logps if rollout.old_logps is None else rollout.old_logps
    return math.fsum(own) - math.fsum(rollout.ref_logps or ())


def sampler_mismatch(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's, where they were computed before the update."""
    if any(rollout.old_logps is None for rollout in rollouts):
        return {}
    differences = np.concatenate(
        [
            np.abs(np.subtract(one.old_logps or [], one.sampler_logps))[np.array(one.mask, bool)][one.stale_tokens :]
            for one in rollouts
        ]
    )
    if not differences.size:
        return {}
    return {"sampler_diff/mean": float(differences.mean()), "sampler_diff/max": float(differences.max())}


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    known = [rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)]
    return math.fsum(known) / len(known) if known else math.nan


def summary(rollouts: Sequence[Rollout], samples: int, max_tokens: int) -> dict[str, float]:
    """Metrics of a round's answers."""
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    found = {
        "completion/mean_length": float(lengths.mean()),
        "completion/max_length": float(lengths.max()),
        "completion/ended": float(np.mean([rollout.ended for rollout in rollouts])),
        "completion/clipped": float(np.mean(lengths >= max_tokens)),
    }
    if not rollouts[0].rewards:  # distillation needs none
        return found
    rewards = np.array([rollout.reward for rollout in rollouts])
    groups = rewards.reshape(-1, samples)
    groups = groups[~np.isnan(groups).all(axis=1)]  # those with a reward
    known = len(groups) > 0
    found |= {
        "reward/mean": float(np.nanmean(groups)) if known else math.nan,
        "reward/std": float(np.nanstd(groups, axis=1).mean()) if known else math.nan,
        "reward/equal_groups": float(np.mean(np.nanmax(groups, axis=1) == np.nanmin(groups, axis=1))) if known else 1.0,
    }
    if ENVIRONMENT in rollouts[0].rewards:
        found["environment/turns"] = float(np.mean([rollout.turns for rollout in rollouts]))
        found["environment/observation_tokens"] = float(np.mean([one.mask.count(0) for one in rollouts]))
        found["environment/failures"] = float(np.mean([bool(rollout.failure) for rollout in rollouts]))
    for name in rollouts[0].rewards:
        values = np.array([rollout.rewards[name] for rollout in rollouts])
        found[f"reward/{name}"] = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
    return found
