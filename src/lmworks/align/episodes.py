"""Episodes: turns of the policy and observations of environments, until an environment is done, or turns or tokens are
used up.

All episodes write a turn, then all environments answer at the same time, in threads: which sequences are computed
together does not depend on how long an environment takes, so a round can be repeated bitwise.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..data.chat_template import Message
from ..data.chat_tokenizer import ChatTokenizer
from ..data.example_batches import PromptExample
from ..data.examples import Text
from ..record import phase
from ..sandbox import SandboxError
from ..spec import RunSpec
from ..spec.errors import DataError, LMWorksError
from .environments import Environment, Step, Turn
from .environments.environment import ENVIRONMENT
from .environments.load import EnvironmentFactory
from .environments.rendering import EpisodeRenderer
from .environments.tool_calls import assistant_message, read_turn
from .imports import summary
from .parallel_calls import call_all
from .rollout_engine import Completion, RolloutEngine, rollout_seed
from .rollouts import Rollout


@dataclass
class Episode:
    prompt: int  # number of the prompt within the draw
    number: int  # of the episode within the draw
    environment: Environment
    prompt_ids: list[int]
    conversational: bool
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    done: bool = False
    ended: bool = False  # the last turn ended by itself, and no further one was due
    failure: str = ""

    def add_turn(self, completion: Completion, turn: Turn) -> None:
        self.token_ids += completion.token_ids
        self.logps += completion.logps
        self.mask += [1] * len(completion.token_ids)
        self.messages.append(assistant_message(turn))
        self.texts.append(completion.text)
        self.ended = completion.ended

    def add_observation(self, ids: Sequence[int], message: Message) -> None:
        self.token_ids += ids
        self.logps += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.messages.append(message)
        self.texts.append(f"\n{message['content']}\n")

    def add_reward(self, reward: float | None) -> None:
        if reward is not None:
            self.rewards.append(float(reward))

    def fail(self, error: BaseException) -> None:
        self.failure, self.done = summary(error), True

    def rollout(self, version: int) -> Rollout:
        known = self.rewards and not self.failure
        reward = math.fsum(self.rewards) if known else math.nan
        return Rollout(
            self.prompt,
            self.prompt_ids,
            self.token_ids,
            self.logps,
            "".join(self.texts),
            self.ended,
            mask=self.mask,
            failure=self.failure,
            messages=self.messages if self.conversational else [],
            reward=reward,
            rewards={ENVIRONMENT: reward},
            version=version,
        )


class Episodes:
    """Plays the episodes of a draw with the engine of this process."""

    def __init__(self, spec: RunSpec, engine: RolloutEngine, factory: EnvironmentFactory, chat: ChatTokenizer) -> None:
        self.spec, self.engine, self.factory = spec, engine, factory
        self.renderer = EpisodeRenderer(chat, factory().tools)

    def play(self, examples: Mapping[int, PromptExample], run: str, draw: int, version: int) -> list[Rollout]:
        """align.samples answers to each example, by its number in the draw; `run`: the seed of the run."""
        align = self.spec.align
        groups = self.begin(examples)
        episodes = [episode for group in groups for episode in group]
        for turn in range(align.max_turns):
            phase.enter("generate")
            if turn == 0:
                seeds = [rollout_seed(run, draw, number) for number in examples]
                found = self.engine.generate([group[0].prompt_ids for group in groups], seeds)
                completions = [one for answers in found for one in answers]
                active = episodes
            else:
                active = [episode for episode in episodes if not episode.done]
                if not active and self.engine.group is None:
                    break  # the ranks of a tensor-parallel engine generate together, each as often as the others
                completions = self.next_turns(active, f"{run}/turn-{turn}", draw)
            turns = [read_turn(one.text, cut=not one.ended) for one in completions]
            for episode, completion, said in zip(active, completions, turns, strict=True):
                episode.add_turn(completion, said)
            phase.enter("environment")
            self.answer(active, turns, last=turn + 1 == align.max_turns)
        return [episode.rollout(version) for episode in episodes]

    def begin(self, examples: Mapping[int, PromptExample]) -> list[list[Episode]]:
        """The episodes of each prompt."""
        samples = self.spec.align.samples
        environments = [[self.factory() for _ in range(samples)] for _ in examples]
        records = [{"prompt": example.prompt, **example.columns} for example in examples.values()]
        pairs = [(one, record) for group, record in zip(environments, records, strict=True) for one in group]
        found = call_all([partial(one.reset, record) for one, record in pairs])
        self.raise_own_errors(found, [example for example in examples.values() for _ in range(samples)])
        return [
            self.begin_group(number, example, group, found[place * samples : (place + 1) * samples])
            for place, ((number, example), group) in enumerate(zip(examples.items(), environments, strict=True))
        ]

    def begin_group(
        self, number: int, example: PromptExample, environments: Sequence[Environment], resets: Sequence[Any]
    ) -> list[Episode]:
        prompts = [one for one in resets if not isinstance(one, BaseException)] or [example.prompt]
        if any(one != prompts[0] for one in prompts):
            raise LMWorksError(
                f"{example.place}: align.environment begins answers to one example with different prompts; they are "
                "compared with each other, so `reset` must depend on the example alone"
            )
        prompt: Text = prompts[0]
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt))):
            wrong = f"reset returned {described(prompt)}, not a text or messages"
            raise LMWorksError(f"align.environment = {self.spec.align.environment!r}: {wrong}")
        ids = self.renderer.prompt(prompt)
        room = self.spec.data.seq - self.spec.align.max_tokens
        if len(ids) > room:
            raise DataError(
                f"{example.place}: the prompt that align.environment makes of it has {len(ids)} tokens, and {room} fit "
                f"beside align.max_tokens; raise data.seq = {self.spec.data.seq}"
            )
        episodes = [
            Episode(number, number * len(environments) + sample, environment, ids, not isinstance(prompt, str))
            for sample, environment in enumerate(environments)
        ]
        for episode, result in zip(episodes, resets, strict=True):
            if isinstance(result, BaseException):
                episode.fail(result)
        return episodes

    def next_turns(self, active: Sequence[Episode], run: str, draw: int) -> list[Completion]:
        """What came before is in the engine's prefix cache."""
        prompts = [[*one.prompt_ids, *one.token_ids] for one in active]
        left = [self.spec.align.max_tokens - len(one.token_ids) for one in active]
        seeds = [rollout_seed(run, draw, one.number) for one in active]
        return [one for (one,) in self.engine.generate(prompts, seeds, samples=1, max_tokens=left)]

    def answer(self, active: Sequence[Episode], turns: Sequence[Turn], last: bool) -> None:
        pairs = [(episode, turn) for episode, turn in zip(active, turns, strict=True) if not episode.failure]
        found = call_all([partial(episode.environment.step, turn) for episode, turn in pairs])
        self.raise_own_errors(found)
        cut: list[Episode] = []
        for (episode, turn), step in zip(pairs, found, strict=True):
            if isinstance(step, BaseException):
                episode.fail(step)
                continue
            check_step(self.spec.align.environment, step)
            episode.add_reward(step.reward)
            episode.done = step.done
            if not step.done and (last or turn.cut or not self.observe(episode, turn, step)):
                episode.done = True
                cut.append(episode)
        ends = call_all([episode.environment.finish for episode in cut])
        self.raise_own_errors(ends)
        for episode, reward in zip(cut, ends, strict=True):
            if isinstance(reward, BaseException):
                episode.fail(reward)
            else:
                check_reward(self.spec.align.environment, "finish", reward)
                episode.add_reward(reward)

    def observe(self, episode: Episode, turn: Turn, step: Step) -> bool:
        """Append the observation; False: it leaves no room for another turn."""
        ids = self.renderer.observation(step.observation, episode.conversational, bool(turn.tool_calls))
        if len(episode.token_ids) + len(ids) >= self.spec.align.max_tokens:
            episode.ended = False
            return False
        role = self.renderer.role(bool(turn.tool_calls)) if episode.conversational else "user"
        episode.add_observation(ids, {"role": role, "content": step.observation})
        return True

    def raise_own_errors(self, found: Sequence[Any], examples: Sequence[PromptExample] = ()) -> None:
        """Wrong specs and data end the run; what else goes wrong in an environment is of its episode alone."""
        for number, error in enumerate(found):
            if isinstance(error, LMWorksError) and not isinstance(error, SandboxError):
                if examples:
                    raise type(error)(f"{examples[number].place}: {error}") from error
                raise error


def check_step(name: str, step: Any) -> None:
    """Raise where it is not what the protocol says."""
    if not isinstance(step, Step):
        raise LMWorksError(f"align.environment = {name!r}: step returned {described(step)}, not a Step")
    observation: Any = step.observation
    if not isinstance(observation, str):
        wrong = f"the observation of a step is {described(observation)}, not a text"
        raise LMWorksError(f"align.environment = {name!r}: {wrong}")
    check_reward(name, "step", step.reward)


def check_reward(name: str, method: str, reward: Any) -> None:
    if reward is not None and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise LMWorksError(
            f"align.environment = {name!r}: the reward of {method} is {described(reward)}, not a finite number or None"
        )


def described(value: Any) -> str:
    return f"{value!r}" if value is None or isinstance(value, float | str) else f"a {type(value).__name__}"
