"""The protocol of an environment: the policy's turns in, observations and rewards out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...data.chat_template import Tools
from ...data.examples import Text

ENVIRONMENT = "environment"  # as a source of rewards


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the policy has written."""

    text: str  # calls left out
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False  # a tool call that cannot be read
    cut: bool = False  # by align.max_tokens: it is the last one


@dataclass(frozen=True)
class Step:
    """What follows from a turn. Without `done` the observation is shown to the policy, and it writes the next turn."""

    observation: str = ""
    reward: float | None = None  # None: none in this step. That of an episode is the sum; without any it has no reward
    done: bool = False


class Environment(ABC):
    """State of one episode; every answer to a prompt has an environment of its own.

    Turns, observations and rewards should be functions of the example and of the turns: then a run that was killed
    repeats its round bitwise. Steps of different environments run at the same time, in threads. An exception in any
    method ends the episode without a reward, and is counted.
    """

    tools: ClassVar[Tools] = ()  # functions that the policy may call, in OpenAI's format, shown in the prompt
    columns: ClassVar[tuple[str, ...]] = ()  # of the data, without which it has no reward

    @abstractmethod
    def reset(self, example: Mapping[str, Any]) -> Text:
        """Begin; `example` has all columns of the data. Returns the prompt, the same for every answer to an example."""

    @abstractmethod
    def step(self, turn: Turn) -> Step: ...

    def finish(self) -> float | None:
        """The last reward of an episode that ends before it is done: no turns or no tokens are left."""
        return None
