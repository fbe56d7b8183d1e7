"""Answers to the prompts of a round: sampled by the engine of this rank, rewarded, gathered from all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..data.example_batches import PromptBatches, PromptExample
from ..data.examples import Text
from ..parallel.world import all_gather_object
from ..record import phase
from ..spec import RunSpec
from .environments import EnvironmentFactory
from .episodes import Episodes
from .rewards import Rewards
from .rollout_engine import ColocatedEngine, RolloutEngine, rollout_seed
from .rollouts import Rollout, added_rewards

HELD_OUT = "held-out"  # prompts that are not trained on


class Sampler(Protocol):
    """Where the rounds of a run get their answers from; called by all ranks of the trainer."""

    metrics: dict[str, float]  # of the round at hand

    def begin_round(self, number: int) -> None:
        """The weights are those that round `number` trains first."""

    def sample(self, draw: int) -> list[Rollout]:
        """Answers to the prompts of a draw, with the rewards of functions."""

    def end_round(self, number: int, last: int) -> None:
        """All draws of the round are there; `last`: the last round of the run."""

    def sample_held_out(self) -> list[Rollout]:
        """Answers to held-out prompts with the weights as they are."""

    def finish_pending(self) -> None:
        """Called before a checkpoint: write what a resumed run could not sample again."""

    def close(self) -> None: ...


class EngineSampler:
    """Samples with the engine in this process; ranks share the prompts of a draw."""

    def __init__(
        self,
        spec: RunSpec,
        engine: RolloutEngine,
        prompts: PromptBatches,
        held_out: PromptBatches,
        rewards: Rewards | None,
        rank: int = 0,
        ranks: int = 1,
        environment: EnvironmentFactory | None = None,
    ) -> None:
        self.spec, self.engine, self.rewards = spec, engine, rewards
        self.prompts, self.held_out = prompts, held_out
        self.rank, self.ranks = rank, ranks
        self.episodes: Episodes | None = None
        if environment is not None:
            self.episodes = Episodes(spec, engine, environment, prompts.split.chat)
        self.version = 0  # of the weights: the round that trains them next
        self.metrics: dict[str, float] = {}
        self.generate_s = 0.0  # of sampling, without rewards

    def sample(self, draw: int) -> list[Rollout]:
        return self.answers(self.prompts, draw)

    def answers(self, prompts: PromptBatches, draw: int, split: str = "") -> list[Rollout]:
        """Answers to the prompts of a draw, over all ranks, with their rewards."""
        examples = prompts.examples(draw)
        mine = range(self.rank, len(examples), self.ranks)
        own, run = {index: examples[index] for index in mine}, f"{self.spec.seed}{split}"
        play = self.single_turns if self.episodes is None else self.episodes.play
        with self.timed_generation():
            found = play(own, run, draw, self.version)
        phase.enter("reward")
        self.reward(found, own)
        return sorted((one for share in all_gather_object(found) for one in share), key=lambda one: one.prompt)

    @contextmanager
    def timed_generation(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.generate_s += time.perf_counter() - began

    def single_turns(self, examples: Mapping[int, PromptExample], run: str, draw: int, version: int) -> list[Rollout]:
        """align.samples answers to each example, by its number in the draw; `run`: the seed of the run."""
        phase.enter("generate")
        seeds = [rollout_seed(run, draw, number) for number in examples]
        found = self.engine.generate([example.ids for example in examples.values()], seeds)
        return [
            Rollout(number, list(example.ids), one.token_ids, one.logps, one.text, one.ended, version=version)
            for (number, example), answers in zip(examples.items(), found, strict=True)
            for one in answers
        ]

    def reward(self, rollouts: Sequence[Rollout], examples: Mapping[int, PromptExample]) -> None:
        if self.rewards is None or not rollouts:
            return
        asked = [examples[rollout.prompt] for rollout in rollouts]
        scores = self.rewards.score(
            [example.prompt for example in asked],
            [completion_of(rollout, example) for rollout, example in zip(rollouts, asked, strict=True)],
            [example.columns for example in asked],
            [example.place for example in asked],
        )
        for index, rollout in enumerate(rollouts):
            rollout.rewards |= {
                name: math.nan if (value := values[index]) is None else value
                for name, values in scores.by_source.items()
            }
            rollout.reward = math.nan if rollout.failure else added_rewards(rollout.reward, scores.total[index])

    def close(self) -> None:
        self.engine.close()


class ColocatedSampler(EngineSampler):
    """The `Sampler` of a trainer whose ranks have an engine each: it sleeps while they train."""

    engine: ColocatedEngine

    def begin_round(self, number: int) -> None:
        self.began = time.perf_counter()
        phase.enter("hand_over")
        self.engine.wake()
        self.woken = time.perf_counter()
        self.metrics = self.engine.hand_over().metrics()
        self.handed_over = time.perf_counter()
        self.version, self.generate_s = number, 0.0

    def end_round(self, number: int, last: int) -> None:
        ended = time.perf_counter()
        self.engine.sleep()
        self.metrics["generate_s"] = self.generate_s
        self.metrics["reward_s"] = ended - self.handed_over - self.generate_s
        self.metrics["sleep_wake_s"] = time.perf_counter() - ended + self.woken - self.began

    def sample_held_out(self) -> list[Rollout]:
        self.engine.wake()
        self.engine.hand_over()
        rollouts = self.answers(self.held_out, 0, HELD_OUT)
        self.engine.sleep()
        return rollouts

    def finish_pending(self) -> None:
        """Nothing: a round that was not begun is sampled with the weights of the checkpoint."""


def completion_of(rollout: Rollout, example: PromptExample) -> Text:
    """As reward functions get it: messages where the prompt is messages, else a text."""
    if isinstance(example.prompt, str):
        return rollout.text
    return rollout.messages or [{"role": "assistant", "content": rollout.text}]
