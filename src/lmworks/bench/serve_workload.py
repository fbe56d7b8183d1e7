"""What is sent to a server to measure it, and when: drawn before the first request leaves, the same for the same seed.

load = Load(requests=200, arrivals=Arrivals(rate=8.0), lengths=Lengths(input=(100, 1024), output=(16, 256)))
shots = load.draw("completions", "my-model")
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ..spec import SpecError
from .engine_workload import Range

Endpoint = Literal["completions", "chat"]

# Token ids that every vocabulary has (as bytes, mostly), less the first few, which begin or end texts in some.
FIRST_ID, LAST_ID = 3, 255
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # a letter and a space are about one token


@dataclass(frozen=True)
class Arrivals:
    """When requests come: `rate` a second by chance (Poisson), `burst` at a time. A burst alone comes once a second;
    without either, all requests come at once.

    `concurrency` closes the loop: so many are under way at any time, and the next one comes when one has ended. Such
    a client waits politely while a server stalls, so its latencies flatter the server; rates do not.
    """

    rate: float = 0.0
    burst: int = 0
    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.concurrency and (self.rate or self.burst):
            raise SpecError("--concurrency cannot be asked for together with --rate or --burst: either requests come "
                            "on their own account, or each waits for another to end")  # fmt: skip
        if min(self.rate, self.burst, self.concurrency) < 0:
            raise SpecError("--rate, --burst and --concurrency cannot be negative")

    def times(self, count: int, luck: random.Random) -> list[float]:
        """Seconds from the start. Gaps between bursts are exponential, their mean burst / rate."""
        if not self.rate:
            return [float(number // self.burst) if self.burst else 0.0 for number in range(count)]
        burst = self.burst or 1
        times, now = list[float](), 0.0
        while len(times) < count:
            times += [now] * burst
            now += luck.expovariate(self.rate / burst)
        return times[:count]

    @property
    def text(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} at a time"
        if not self.rate:
            return f"{self.burst} at once, every second" if self.burst else "all at once"
        return f"{self.rate:g} a second" + (f", {self.burst} at once" if self.burst else "")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of its answer, drawn evenly between two ends or from a list of pairs."""

    input: Range = (100, 1024)
    output: Range = (100, 1024)
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in (("--input", self.input), ("--output", self.output)):
            if not 1 <= low <= high:
                raise SpecError(f"{name} {low}:{high}: write LOW:HIGH with 1 ≤ LOW ≤ HIGH, e.g. 100:1024")

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """A line a request: {"input": 812, "output": 97}. They are drawn in no order, each as often as it may be."""
        pairs = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SpecError(f"--lengths {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                pair = json.loads(line)
                lengths = pair["input"], pair["output"]
                if not all(isinstance(length, int) and length >= 1 for length in lengths):
                    raise ValueError
            except (ValueError, TypeError, KeyError):
                raise SpecError(f'{path}, line {number}: write {{"input": 812, "output": 97}}') from None
            pairs.append(lengths)
        if not pairs:
            raise SpecError(f"--lengths {path}: there is no line in it")
        return cls(pairs=tuple(pairs))

    def draw(self, luck: random.Random) -> tuple[int, int]:
        if self.pairs:
            return luck.choice(self.pairs)
        return luck.randint(*self.input), luck.randint(*self.output)


@dataclass(frozen=True)
class Shot:
    """One request, ready to be sent."""

    at: float  # seconds after the start; 0 where requests wait for each other
    body: bytes
    max_tokens: int


@dataclass(frozen=True)
class Load:
    requests: int = 256
    arrivals: Arrivals = Arrivals()
    lengths: Lengths = Lengths()
    shared_prefix: int = 0  # tokens that all prompts of a group begin with; the drawn length comes on top
    groups: int = 1
    temperature: float = 0.6
    ignore_eos: bool = True  # answers as long as they were drawn: servers that do not know the word refuse it
    seed: int = 0

    def draw(self, endpoint: Endpoint, model: str) -> list[Shot]:
        luck = random.Random(self.seed)
        times = self.arrivals.times(self.requests, luck)
        lengths = [self.lengths.draw(luck) for _ in times]
        prefixes = [pieces(self.shared_prefix, luck) for _ in range(self.groups)]
        write: Callable[[list[int]], dict[str, Any]] = as_ids if endpoint == "completions" else as_message
        shots = []
        for number, (at, (prompt, answer)) in enumerate(zip(times, lengths, strict=True)):
            ids = luck.choice(prefixes) + pieces(prompt, luck)
            body = {
                "model": model,
                **write(ids),
                "max_tokens": answer,
                "temperature": self.temperature,
                "seed": self.seed + number,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"ignore_eos": True} if self.ignore_eos else {}),
            }
            shots.append(Shot(at, json.dumps(body, separators=(",", ":")).encode(), answer))
        return shots


def pieces(count: int, luck: random.Random) -> list[int]:
    """Drawn evenly: beyond what they share on purpose, no two prompts begin alike for long."""
    return [luck.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def as_ids(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids}


def as_message(ids: list[int]) -> dict[str, Any]:
    """Chats are texts, so how many tokens they have is the server's to say (`usage`); here a letter is one."""
    return {"messages": [{"role": "user", "content": " ".join(LETTERS[number % len(LETTERS)] for number in ids)}]}


def read_prefix(text: str) -> tuple[int, int]:
    """512: tokens that all prompts begin with. 512x4: four such beginnings."""
    tokens, cross, groups = text.partition("x")
    if not text.isascii() or not tokens.isdecimal() or (cross and not (groups.isdecimal() and int(groups))):
        raise SpecError(f"--shared-prefix {text!r}: write TOKENS, e.g. 512, or TOKENSxGROUPS, e.g. 512x4")
    return int(tokens), int(groups) if cross else 1
