"""Workloads of benchmarks, generated beforehand from a seed: random prompts and lengths for an engine, requests with
their arrival times for a server.

    load = Load(requests=200, arrivals=Arrivals(rate=8.0), lengths=Lengths(input=(100, 1024), output=(16, 256)))
    requests = load.draw("completions", "my-model")
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from ..engine.core.request import Request
from ..engine.core.sampling_params import SamplingParams
from ..spec import SpecError

Range = tuple[int, int]


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at once; lengths are uniform, both ends included."""

    requests: int = 256
    input: Range = (100, 1024)
    output: Range = (100, 1024)
    seed: int = 0
    temperature: float = 0.6

    def __post_init__(self) -> None:
        for name, (low, high) in (("input", self.input), ("output", self.output)):
            if not 1 <= low <= high:
                raise SpecError(f"{name} = {low}:{high}: write LOW:HIGH with 1 ≤ LOW ≤ HIGH, e.g. 100:1024")

    def within(self, context: int) -> Self:
        """The workload for a smaller context: both ranges shrink in proportion if the longest request does not fit."""
        longest = self.input[1] + self.output[1]
        if longest <= context:
            return self
        if context < 4:
            raise SpecError(f"a context of {context} tokens is too short to measure anything")

        def shrink(low: int, high: int) -> Range:
            return max(1, low * context // longest), max(1, high * context // longest)

        return replace(self, input=shrink(*self.input), output=shrink(*self.output))

    def draw(self, vocab: int) -> list[Request]:
        """Uniform ids, so prompts share no prefix. Answers ignore EOS."""
        rng = random.Random(self.seed)
        lengths = [rng.randint(*self.input) for _ in range(self.requests)]  # first: the same for every vocabulary
        answers = [rng.randint(*self.output) for _ in range(self.requests)]
        requests = []
        for number, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
            params = SamplingParams(
                temperature=self.temperature, ignore_eos=True, max_tokens=answer, seed=self.seed + number
            )
            requests.append(Request([rng.randrange(vocab) for _ in range(length)], params))
        return requests


def read_range(text: str, name: str) -> Range:
    """100:1024, or one number for a fixed length."""
    low, colon, high = text.partition(":")
    if not text.isascii() or not low.isdecimal() or (colon and not high.isdecimal()):
        raise SpecError(f"{name} = {text!r}: write LOW:HIGH, e.g. 100:1024, or one number")
    return int(low), int(high if colon else low)


def make_workload(requests: int, input: str, output: str, seed: int, quick: bool) -> Workload:
    """From command-line options. `quick`: an eighth of the requests and of their lengths."""

    work = Workload(requests, read_range(input, "--input"), read_range(output, "--output"), seed)
    return (
        replace(work, requests=max(1, requests // 8)).within(sum((work.input[1], work.output[1])) // 8)
        if quick
        else work
    )


# --- serve workload --------------------------------------------------------------------------------------


Endpoint = Literal["completions", "chat"]

# Token ids that every vocabulary has (mostly bytes), without the first few, which are often special tokens.
FIRST_ID, LAST_ID = 3, 255
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # a letter and a space are about one token


@dataclass(frozen=True)
class Arrivals:
    """Arrival times: Poisson with `rate` per second, `burst` at a time. A burst alone arrives once a second; without
    either, all requests arrive at once.

    `concurrency`: a closed loop with that many requests in flight; the next is sent when one has ended. A closed loop
    waits while a server stalls, so its latencies flatter the server; an open loop with a rate does not.
    """

    rate: float = 0.0
    burst: int = 0
    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.concurrency and (self.rate or self.burst):
            raise SpecError("--concurrency (closed loop) cannot be combined with --rate or --burst (open loop)")
        if min(self.rate, self.burst, self.concurrency) < 0:
            raise SpecError("--rate, --burst and --concurrency cannot be negative")

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Seconds from the start. Gaps between bursts are exponential, their mean burst / rate."""
        if not self.rate:
            return [float(number // self.burst) if self.burst else 0.0 for number in range(count)]
        burst = self.burst or 1
        times, now = list[float](), 0.0
        while len(times) < count:
            times += [now] * burst
            now += rng.expovariate(self.rate / burst)
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
    """Tokens of prompts and answers, uniform in a range or from a list of pairs."""

    input: Range = (100, 1024)
    output: Range = (100, 1024)
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in (("--input", self.input), ("--output", self.output)):
            if not 1 <= low <= high:
                raise SpecError(f"{name} {low}:{high}: write LOW:HIGH with 1 ≤ LOW ≤ HIGH, e.g. 100:1024")

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """One pair per line: {"input": 812, "output": 97}. Pairs are sampled with replacement."""
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
            raise SpecError(f"--lengths {path}: the file is empty")
        return cls(pairs=tuple(pairs))

    def draw(self, rng: random.Random) -> tuple[int, int]:
        if self.pairs:
            return rng.choice(self.pairs)
        return rng.randint(*self.input), rng.randint(*self.output)


@dataclass(frozen=True)
class TimedRequest:
    """One request, ready to be sent."""

    at: float  # seconds after the start; 0 in a closed loop
    body: bytes
    max_tokens: int


@dataclass(frozen=True)
class Load:
    requests: int = 256
    arrivals: Arrivals = Arrivals()
    lengths: Lengths = Lengths()
    shared_prefix: int = 0  # tokens that all prompts of a group begin with, in addition to the sampled length
    groups: int = 1
    temperature: float = 0.6
    ignore_eos: bool = True  # answers of exactly the sampled length; some servers reject the parameter
    seed: int = 0

    def draw(self, endpoint: Endpoint, model: str) -> list[TimedRequest]:
        rng = random.Random(self.seed)
        times = self.arrivals.times(self.requests, rng)
        lengths = [self.lengths.draw(rng) for _ in times]
        prefixes = [random_ids(self.shared_prefix, rng) for _ in range(self.groups)]
        write: Callable[[list[int]], dict[str, Any]] = as_ids if endpoint == "completions" else as_message
        requests = []
        for number, (at, (prompt, answer)) in enumerate(zip(times, lengths, strict=True)):
            ids = rng.choice(prefixes) + random_ids(prompt, rng)
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
            requests.append(TimedRequest(at, json.dumps(body, separators=(",", ":")).encode(), answer))
        return requests


def random_ids(count: int, rng: random.Random) -> list[int]:
    """Uniform, so that prompts share no prefix but the intended one."""
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def as_ids(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids}


def as_message(ids: list[int]) -> dict[str, Any]:
    """Chat messages are text, about one letter per token; the server reports the exact number in `usage`."""
    return {"messages": [{"role": "user", "content": " ".join(LETTERS[number % len(LETTERS)] for number in ids)}]}


def read_prefix(text: str) -> tuple[int, int]:
    """512: tokens of a prefix of all prompts. 512x4: four such prefixes."""
    tokens, cross, groups = text.partition("x")
    if not text.isascii() or not tokens.isdecimal() or (cross and not (groups.isdecimal() and int(groups))):
        raise SpecError(f"--shared-prefix {text!r}: write TOKENS, e.g. 512, or TOKENSxGROUPS, e.g. 512x4")
    return int(tokens), int(groups) if cross else 1
