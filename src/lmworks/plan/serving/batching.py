"""Continuous batching in its steady state: what a replica does at a given number of running sequences.

New prompts join the steps of running sequences, in chunks. In a long stretch of time every request takes `output` steps
of decoding and the time that its prompt adds to some of them, so with b sequences running

    time between tokens   tpot = max(D(b) + b/output × A(b), H(b))
    requests a second     rate = b / (output × tpot)            (Little's law)

D is a step of decoding alone, A what one prompt adds to the steps that it joins. Weights are read and launches are paid
once for both, so A is less than the prompt would take alone. H is what the host needs for as many tokens (`host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import SpecError
from .host import HostLimits
from .inference import Deployment


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request: of its prompt, and of its answer."""

    input: int
    output: int

    def __post_init__(self) -> None:
        for key in ("input", "output"):
            if getattr(self, key) < 1:
                raise SpecError(f"{key} = {getattr(self, key)} tokens: a request has at least 1")

    @property
    def total(self) -> int:
        return self.input + self.output

    @property
    def mean_context(self) -> float:
        """Of a running sequence, over its life."""
        return self.input + self.output / 2


@dataclass(frozen=True)
class Point:
    """A steady state: numbers, or arrays of them. Seconds."""

    batch: Any  # sequences that decode, of one attention group
    decode: Any  # a step without a prompt
    added: Any  # what one prompt adds to the steps that it joins
    prefill: Any  # those steps in full: from the first chunk to the first token
    tpot: Any
    rate: Any  # requests a second, of the replica
    host: Any  # the least time between tokens that the host allows

    @property
    def host_bound(self) -> Any:
        return np.greater_equal(self.host, self.tpot)

    @property
    def prefill_share(self) -> Any:
        """Of the engine's time, spent on prompts."""
        return self.rate * self.added


def chunks(prompt: int, chunk: int) -> list[tuple[int, int]]:
    """(new tokens, tokens already in the cache) of each step that a prompt joins."""
    return [(min(chunk, prompt - before), before) for before in range(0, prompt, chunk)]


def steady(deployment: Deployment, lengths: Lengths, batch: Any) -> Point:
    context = lengths.mean_context
    decode = deployment.step(batch, context)
    new, before = np.array(chunks(lengths.input, deployment.chunk), dtype=float).T
    joined = deployment.step(np.asarray(batch, dtype=float)[..., None], context, new, before)  # (…, chunks)
    prefill = joined.sum(-1)
    added = prefill - len(new) * decode
    host = HostLimits.measured().seconds(batch, lengths.output)
    tpot = np.maximum(decode + batch / lengths.output * added, host)
    return Point(batch, decode, added, prefill, tpot, deployment.attention_dp * batch / (lengths.output * tpot), host)


def queueing_seconds(share: Any, service: Any, quantile: float | None = None) -> Any:
    """Seconds a prompt waits for its turn: an M/M/1 queue, its mean or a quantile of it.

    Prompts of equal length would wait half as long; real ones differ, and the factor 2 is the margin for it.
    P(wait > t) = share × exp(−(1 − share)·t / service).
    """
    free = np.maximum(1 - share, 1e-9)
    if quantile is None:
        return share * service / free
    return np.maximum(0.0, service / free * np.log(np.maximum(share, 1e-300) / (1 - quantile)))
