"""Rewards as plain Python functions: found by name, called on a batch, checked value by value, and added up.

A reward is `f(prompts, completions, **columns) -> list[float | None]`, as TRL has it; None: no opinion on that sample.
A function whose arguments are `prompt` or `completion` is called for each sample and returns one value. Completions are
texts, or lists of messages, as the prompts are.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec.errors import LMWorksError, SpecError, did_you_mean, near_names, suggestion
from .imports import import_module, split_arguments, summary
from .verifiers import VERIFIERS

Column = Sequence[Any]
KEY = "align.rewards"
OWN = {"prompt", "prompts", "completion", "completions"}
FORMS = "path/file.py:function, package.module:function or one of: " + ", ".join(VERIFIERS)


class RewardError(LMWorksError):
    """A reward function failed on a sample, or returned what is no reward."""

    final = True


@dataclass(frozen=True)
class Reward:
    name: str  # as in the spec
    function: Callable[..., Any]
    weight: float = 1.0


@dataclass(frozen=True)
class Scores:
    total: list[float]  # weighted sum; NaN where no function has an opinion
    by_source: dict[str, list[float | None]]  # name of the reward → its values, without its weight

    def metrics(self) -> dict[str, float]:
        """Means over the samples that a function has an opinion on."""
        known = {name: [one for one in values if one is not None] for name, values in self.by_source.items()}
        return {f"reward/{name}": sum(values) / len(values) for name, values in known.items() if values}


@dataclass(frozen=True)
class Rewards:
    sources: tuple[Reward, ...]

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        records: Sequence[Mapping[str, Any]],
        places: Sequence[str] | None = None,
    ) -> Scores:
        """`records`: the other columns of each sample; `places`: its file and line, for errors."""
        names = {name: None for record in records for name in record}  # in their order
        batch = Batch(prompts, completions, {name: [record.get(name) for record in records] for name in names}, places)
        by_source = {reward.name: call(reward, batch) for reward in self.sources}
        weights = [reward.weight for reward in self.sources]
        total = [weighted_sum(weights, values) for values in zip(*by_source.values(), strict=True)]
        return Scores(total, by_source)


def weighted_sum(weights: Sequence[float], values: Sequence[float | None]) -> float:
    known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    return math.fsum(known) if known else math.nan


# --- calling ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Column]
    places: Sequence[str] | None

    def sample(self, index: int) -> Batch:
        columns = {name: values[index : index + 1] for name, values in self.columns.items()}
        places = self.places[index : index + 1] if self.places else None
        return Batch(self.prompts[index : index + 1], self.completions[index : index + 1], columns, places)

    def place(self, index: int) -> str:
        return f"sample {index}" + (f", {self.places[index]}" if self.places else "")


def call(reward: Reward, batch: Batch) -> list[float | None]:
    try:
        found = invoke(reward, batch)
    except LMWorksError:
        raise
    except (Exception, SystemExit) as error:
        where = failing_sample(reward, batch)
        raise RewardError(f"{KEY}: {reward.name!r} failed on {where}: {summary(error)}") from error
    values = found.tolist() if hasattr(found, "tolist") else found  # an array, a tensor
    if not isinstance(values, list | tuple):
        raise RewardError(f"{KEY}: {reward.name!r} returned {type(values).__name__}; it must return a list of numbers")
    if len(values) != len(batch.completions):
        count = f"{len(values)} values for {len(batch.completions)} completions"
        raise RewardError(f"{KEY}: {reward.name!r} returned {count}; it must return one for each")
    return [checked(value, reward, batch.place(index)) for index, value in enumerate(values)]


def invoke(reward: Reward, batch: Batch) -> Any:
    parameters = inspect.signature(reward.function).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    kept = OWN | options_of(reward.function)  # these are not filled by columns of the same name
    wanted = [name for name in batch.columns if name not in kept and (every or name in parameters)]
    columns = {name: list(batch.columns[name]) for name in wanted}
    given = OWN | columns.keys()
    for name, one in parameters.items():
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and name not in given:
            there = ", ".join(batch.columns) or "none beside the prompt"
            raise RewardError(f"{KEY}: {reward.name!r} needs the column {name!r}; the data has {there}")
    if {"prompt", "completion"} & parameters.keys():
        own = [{"prompt": p, "completion": c} for p, c in zip(batch.prompts, batch.completions, strict=True)]
        rows = ({name: values[index] for name, values in columns.items()} for index in range(len(own)))
        return [
            reward.function(**{name: value for name, value in one.items() if every or name in parameters}, **row)
            for one, row in zip(own, rows, strict=True)
        ]
    lists = {"prompts": list(batch.prompts), "completions": list(batch.completions)}
    return reward.function(**{name: value for name, value in lists.items() if every or name in parameters}, **columns)


def options_of(function: Callable[..., Any]) -> set[str]:
    """Arguments given in the spec, and all options of a built-in reward."""
    if isinstance(function, functools.partial):
        return {*function.keywords, *options_of(function.func)}
    if function not in VERIFIERS.values():
        return set()
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}


def failing_sample(reward: Reward, batch: Batch) -> str:
    """The first that fails alone, too."""
    for index in range(len(batch.completions)):
        try:
            invoke(reward, batch.sample(index))
        except (Exception, SystemExit):
            return batch.place(index)
    return f"the batch of {batch.place(0)} and {len(batch.completions) - 1} more"


def checked(value: Any, reward: Reward, place: str) -> float | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        shown = f"{value!r:.40}" if isinstance(value, numbers.Real) else f"{type(value).__name__} {value!r:.40}"
        raise RewardError(f"{KEY}: {reward.name!r} returned {shown} for {place}; a finite number or None would do")
    return float(value)


# --- finding ---------------------------------------------------------------------------------------------


def load_rewards(names: Sequence[str], weights: Sequence[float] = ()) -> Rewards:
    """A name is FORMS, with arguments for the function after it: `numeric(tolerance=1e-3)`."""
    if not names:
        raise SpecError(f"{KEY} is empty; give {FORMS}")
    if len(set(names)) != len(names):
        raise SpecError(f"{KEY}: {max(names, key=list(names).count)!r} is there twice; give it once, with its weight")
    if weights and len(weights) != len(names):
        raise SpecError(
            f"align.reward_weights has {len(weights)} weights; {KEY} has {len(names)}: one for each, or none"
        )
    return Rewards(tuple(map(load_reward, names, weights or [1.0] * len(names))))


def load_reward(name: str, weight: float = 1.0) -> Reward:
    target, arguments = split_arguments(KEY, name)
    function = find_function(name, target)
    if arguments:
        try:
            known = inspect.signature(function).parameters
        except (TypeError, ValueError):
            known = {}  # type: ignore[assignment]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for argument in arguments:
            if argument not in known and (not takes_any or target in VERIFIERS):
                options = [one.name for one in known.values() if one.kind is one.KEYWORD_ONLY]
                raise SpecError(f"{KEY} = {name!r}: no argument {argument!r}{did_you_mean(argument, options)}")
        function = functools.partial(function, **arguments)
    if target in VERIFIERS:
        for option, one in inspect.signature(function).parameters.items():
            if one.kind is one.KEYWORD_ONLY and one.default is one.empty:
                raise SpecError(f"{KEY} = {name!r}: give its argument, as in {target}({option}=100)")
    return Reward(name, function, weight)


def find_function(name: str, target: str) -> Callable[..., Any]:
    if target in VERIFIERS:
        return VERIFIERS[target]
    place, colon, attribute = target.rpartition(":")
    if not colon and target.endswith(".py"):
        raise SpecError(f"{KEY} = {name!r}: name a function of the file, as in {target}:reward")
    if not colon:
        near = suggestion(near_names(target, sorted(VERIFIERS)))
        raise SpecError(f"{KEY} = {name!r}: no such reward{near or ';'} give {FORMS}")
    module = import_module(KEY, name, place, FORMS)
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [one for one, value in vars(module).items() if inspect.isfunction(value) and not one.startswith("_")]
        raise SpecError(f"{KEY} = {name!r}: {place} has no function {attribute!r}{did_you_mean(attribute, own)}")
    return function
