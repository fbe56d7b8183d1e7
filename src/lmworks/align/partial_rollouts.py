"""Partial rollouts: a round does not wait for its longest answers, which go on in the next one.

More prompts are in flight than a round trains on. A round ends when the answers to align.prompts of them have all
finished; groups stay together. What is unfinished keeps its tokens, with the log-probabilities of the weights that
sampled them, and goes on from there with the weights of the next round: importance weights correct for the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import committed
from ..checkpoint.format.manifest import read_committed
from ..data.example_batches import PromptBatches, PromptExample
from ..engine.core.detokenizer import decode
from ..parallel.world import all_gather_object, run_on_all_ranks, run_on_rank_zero
from ..record import phase
from ..spec import RunSpec
from .prompts import in_flight
from .rewards import Rewards
from .rollout_engine import ColocatedEngine, Completion, PromptRequest, rollout_seed
from .rollouts import Rollout, load_round, prune_rounds, save_round
from .sampler import ColocatedSampler


@dataclass
class Group:
    """The answers to one prompt."""

    number: int  # of the prompt in the order of the run
    answers: list[Rollout]

    @property
    def finished(self) -> bool:
        return not any(answer.unfinished for answer in self.answers)


class PartialSampler(ColocatedSampler):
    def __init__(
        self,
        spec: RunSpec,
        engine: ColocatedEngine,
        prompts: PromptBatches,
        held_out: PromptBatches,
        rewards: Rewards | None,
        rank: int,
        ranks: int,
        folder: Path,
    ) -> None:
        super().__init__(spec, engine, prompts, held_out, rewards, rank, ranks)
        self.folder = folder  # `rollouts/` of the run
        self.carried: list[Group] = []  # in flight, the same on all ranks
        self.prompts_taken = 0
        self.round = -1  # after which they were carried over
        self.returned: list[Rollout] = []  # in the round at hand

    def begin_round(self, number: int) -> None:
        super().begin_round(number)
        self.round, self.returned = number, []
        for group in self.carried:
            for answer in group.answers:
                answer.stale_tokens = len(answer.token_ids)

    def sample(self, draw: int) -> list[Rollout]:
        """Of align.prompts groups, the oldest ones that have finished."""
        align = self.spec.align
        pool = [*self.carried, *self.new_groups(in_flight(align.prompts, align.partial_rollouts) - len(self.carried))]
        examples = self.examples_of(pool)
        mine = pool[self.rank :: self.ranks]
        phase.enter("generate")
        with self.timed_generation():
            self.generate_rest(mine, len(range(self.rank, align.prompts, self.ranks)))
        pool = sorted((group for share in all_gather_object(mine) for group in share), key=lambda group: group.number)
        chosen = [group for group in pool if group.finished][: align.prompts]
        taken = {group.number for group in chosen}
        self.carried = [group for group in pool if group.number not in taken]
        phase.enter("reward")
        own = [answer for group in chosen[self.rank :: self.ranks] for answer in group.answers]
        self.reward(own, examples)
        found = sorted((one for share in all_gather_object(own) for one in share), key=lambda one: one.prompt)
        self.returned += found
        return found

    def new_groups(self, count: int) -> list[Group]:
        numbers = range(self.prompts_taken, self.prompts_taken + count)
        self.prompts_taken = numbers.stop
        groups = [Group(number, []) for number in numbers]
        for number, example in self.examples_of(groups).items():
            blank = [
                Rollout(number, list(example.ids), [], [], "", False, unfinished=True)
                for _ in range(self.spec.align.samples)
            ]
            groups[number - numbers.start].answers = blank
        return groups

    def examples_of(self, groups: list[Group]) -> dict[int, PromptExample]:
        numbers = [group.number for group in groups]
        return dict(zip(numbers, self.prompts.numbered(np.array(numbers, np.int64)), strict=True))

    def generate_rest(self, groups: list[Group], count: int) -> None:
        """Sample until `count` of the groups have finished."""
        count -= sum(group.finished for group in groups)
        asked: list[PromptRequest] = []
        answers: list[list[Rollout]] = []  # of each request
        for group in groups if count > 0 else []:
            new = not any(answer.token_ids for answer in group.answers)
            for some in [group.answers] if new else [[answer] for answer in group.answers if answer.unfinished]:
                asked.append(self.request(group, some))
                answers.append(some)
        found = self.engine.generate_until(asked, max(0, count))
        for some, completions in zip(answers, found, strict=True):
            for answer, completion in zip(some, completions, strict=True):
                self.extend(answer, completion)

    def request(self, group: Group, answers: list[Rollout]) -> PromptRequest:
        """For all answers to a new prompt, which is computed once, or for the rest of one answer."""
        first = answers[0]
        place = next(index for index, answer in enumerate(group.answers) if answer is first)
        part = f"{self.spec.seed}/{len(first.token_ids)}" if first.token_ids else str(self.spec.seed)
        seed = rollout_seed(part, place, group.number)
        left = self.spec.align.max_tokens - len(first.token_ids)
        return PromptRequest([*first.prompt_ids, *first.token_ids], seed, len(answers), left, group.number)

    def extend(self, answer: Rollout, completion: Completion) -> None:
        answer.token_ids += completion.token_ids
        answer.sampler_logps += completion.logps
        answer.mask += [1] * len(completion.token_ids)
        answer.ended, answer.unfinished, answer.version = completion.ended, completion.unfinished, self.version
        ids = answer.token_ids
        answer.text = decode(self.prompts.tokenizer, ids[:-1] if answer.ended else ids)

    # --- checkpoints ----------------------------------------------------------------------------------------

    def end_round(self, number: int, last: int) -> None:
        super().end_round(number, last)
        begun = sum(answer.stale_tokens > 0 for answer in self.returned)
        waiting = sum(bool(answer.token_ids) for group in self.carried for answer in group.answers)
        self.metrics["partial/carried_over"] = begun / len(self.returned)  # share that began in an earlier round
        self.metrics["partial/reused_tokens"] = float(sum(answer.stale_tokens for answer in self.returned))
        self.metrics["partial/waiting"] = float(waiting)  # answers that go on in the next round
        run_on_rank_zero(self.keep)

    def keep(self) -> None:
        self.folder.mkdir(exist_ok=True)
        save_round(self.path(self.round), self.round, [answer for group in self.carried for answer in group.answers])
        needed = {self.path(round_of(path)) for path in committed(self.folder.parent / "checkpoints")}
        prune_rounds(self.folder, "carried-*.npz", needed)

    def path(self, number: int) -> Path:
        return self.folder / f"carried-{number:06d}.npz"

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "prompts_taken": self.prompts_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, self.prompts_taken = int(state["round"]), int(state["prompts_taken"])
        answers = run_on_all_ranks(lambda: load_round(self.path(self.round))) if self.round >= 0 else []
        samples = self.spec.align.samples
        groups = (answers[place : place + samples] for place in range(0, len(answers), samples))
        self.carried = [Group(some[0].prompt, some) for some in groups]


def round_of(checkpoint: Path) -> int:
    return int(read_committed(checkpoint).meta["align"]["sampler"]["round"])
