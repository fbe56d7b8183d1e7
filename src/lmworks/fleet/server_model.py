"""What a simulated server is: the time of its steps, and its sizes.

A step that decodes B sequences with K tokens in the cache, and computes P tokens of prompts, takes

    decode(B) + key·K + prompt_token·P + prompt_key·Σ p·(before + p/2)

decode(B) is a table, linear between its rows, because experts and collectives bend it. So the time of n steps of
decoding has a closed form, and the simulator can leap over them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..plan.serving.plans import Plan
from ..spec import SpecError

STARTUP_S = 60.0  # from the decision to the first request, where nobody measured it: node, image, weights, graphs


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    decode: tuple[tuple[float, float], ...]  # (sequences, seconds of a step that decodes them at no context)
    key: float = 0.0  # a cached token that decoding reads
    prompt_token: float = 0.0
    prompt_key: float = 0.0  # a token of a prompt and a token that it sees

    @cached_property
    def table(self) -> list[float]:
        """decode(B) for B = 0, 1, …; extended by the last slope."""
        places, seconds = zip(*self.decode, strict=True)
        return [float(one) for one in np.interp(np.arange(int(places[-1]) + 1), places, seconds)]

    def decoding(self, sequences: int) -> float:
        if sequences < len(self.table):
            return self.table[sequences]
        slope = self.table[-1] - self.table[-2] if len(self.table) > 1 else 0.0
        return self.table[-1] + slope * (sequences - len(self.table) + 1)

    def steps(self, count: int, sequences: int, keys: int) -> float:
        """Of `count` steps of decoding: each adds a token to the cache of each sequence."""
        grown = sequences * count * (count - 1) / 2
        return count * self.decoding(sequences) + self.key * (count * keys + grown)

    def mixed(self, sequences: int, keys: int, prompt_tokens: int, prompt_pairs: float) -> float:
        """Of one step with prompts in it."""
        return self.steps(1, sequences, keys) + self.prompt_token * prompt_tokens + self.prompt_key * prompt_pairs


@dataclass(frozen=True)
class ServerModel:
    steps: StepTime
    blocks: int  # of the KV cache
    block: int = 16  # tokens
    max_seqs: int = 256
    max_batch_tokens: int = 8192
    request_s: float = 0.0  # of every request, outside of the engine, before its first step
    startup_s: float = STARTUP_S
    prefix_cache: bool = True
    gpus: int = 1
    price_hour: float = 0.0  # $ of one GPU
    source: str = ""  # what the figures come from

    def __post_init__(self) -> None:
        for key in ("blocks", "block", "max_seqs", "max_batch_tokens"):
            if getattr(self, key) < 1:
                raise SpecError(f"server: {key} = {getattr(self, key)} must be at least 1")

    @classmethod
    def of_plan(cls, plan: Plan, startup_s: float = STARTUP_S) -> Self:
        """The planner's deployment: its step time made linear over what the demand may ask of it."""
        deployment, space = plan.deployment, plan.serving_memory
        return cls(
            steps=linear_steps(plan),
            blocks=max(1, int(space.cache // (deployment.cache.block * deployment.cache.token_bytes))),
            block=deployment.cache.block,
            max_seqs=plan.demand.max_batch,
            max_batch_tokens=deployment.chunk,
            request_s=1e-3 * deployment.rates.request_ms,
            startup_s=startup_s,
            gpus=deployment.ranks,
            price_hour=plan.price_hour,
            source=f"planner: {deployment.served.name} on {deployment.ranks} × {deployment.gpu.name}",
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `lmworks fleet fit` wrote."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            steps = StepTime(**{**data["steps"], "decode": tuple(map(tuple, data["steps"]["decode"]))})
            return cls(**{**data, "steps": steps})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = getattr(error, "strerror", None) or repr(error)
            raise SpecError(f"{path}: not a server that `lmworks fleet fit` wrote ({why})") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


def linear_steps(plan: Plan) -> StepTime:
    deployment, lengths = plan.deployment, plan.demand.lengths
    most = max(2, plan.max_batch)
    batches = sorted({0, 1, *(2**n for n in range(1, 14) if 2**n < most), most})
    context = max(2.0, lengths.mean_context)
    # What one more cached token costs, at the demand's own contexts (a window stops reading at its end).
    reading = float(deployment.step(1.0, context) - deployment.step(1.0, 0.0)) / context
    table = tuple((float(b), float(deployment.step(float(b), 0.0))) for b in batches)
    sizes = np.unique(np.geomspace(64, deployment.chunk, 8).round())
    before = np.array([0.0, deployment.chunk / 2, float(deployment.chunk)])
    p, seen = (grid.ravel() for grid in np.meshgrid(sizes, before))
    seconds = np.asarray(deployment.step(0.0, 0.0, p, seen), dtype=float) - table[0][1]
    token, pair = np.linalg.lstsq(np.stack([p, p * (seen + p / 2)], 1) / seconds[:, None], np.ones(len(p)), rcond=None)[
        0
    ]
    return StepTime(table, reading, max(0.0, float(token)), max(0.0, float(pair)))


def capacity(server: ServerModel, prompt: float, answer: float, tpot: float = float("inf")) -> float:
    """Requests a second that a server takes in its steady state, with steps no slower than `tpot`: Little's law.

    tpot(B) = D(B) + B/answer·A as in the planner's steady state, with this server's own step times.
    """
    context = prompt + answer / 2
    most = min(server.max_seqs, int(server.blocks * server.block // (prompt + answer)))
    added = server.steps.prompt_token * prompt + server.steps.prompt_key * prompt**2 / 2
    best = 0.0
    for batch in batches(most):
        pace = server.steps.mixed(batch, round(batch * context), 0, 0) + batch / answer * added
        if pace <= tpot or not best:
            best = max(best, batch / (answer * pace))
    return best


def batches(most: int) -> Sequence[int]:
    return sorted({int(b) for b in np.geomspace(1, max(1, most), 64)})
