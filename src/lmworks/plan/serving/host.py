"""What the host of a serving engine allows: processes that work beside the device, each at its own pace.

    engine    schedules the running sequences, packs their inputs and reads their tokens in every step
    API       sends every token on, one by one as a stream; and for each request takes its HTTP and its prompt

Device, engine and API are a pipeline, so the slowest sets the time between tokens. For small models, few bits a weight
and many sequences that is the API. Constants are measured on our own engine and API on the host of one H200
(`validation/fit_serving.py`); nothing is fitted to other engines. Each group of data-parallel attention has an engine
and an API process of its own, as vLLM has by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .inference import read_constants


@dataclass(frozen=True)
class HostLimits:
    """Microseconds on one core."""

    sequence_us: float  # of the engine's process, for each running sequence in each step
    token_us: float  # of the API's, for each token that it sends
    request_us: float  # of the API's, for each request

    @classmethod
    def measured(cls) -> HostLimits:
        return cls(**read_constants()["host"])

    def seconds(self, batch: Any, output: int) -> Any:
        """The shortest time between tokens of `batch` sequences with answers of `output` tokens."""
        api = self.token_us + self.request_us / output
        return 1e-6 * np.asarray(batch) * max(self.sequence_us, api)
