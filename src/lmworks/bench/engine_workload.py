"""The workload of engine benchmarks: random prompts, random input and output lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

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
