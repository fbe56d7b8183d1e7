"""LMWorks: plan, train and serve language models with one spec.

Names are loaded when they are used, so that `import lmworks` (and `lmworks --help`) loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine.core.sampling_params import SamplingParams as SamplingParams
    from .llm import LLM as LLM
    from .model import GPT as GPT
    from .spec import Cluster as Cluster
    from .spec import ModelSpec as ModelSpec
    from .spec import RunSpec as RunSpec
    from .train import Trainer as Trainer

EXPORTS = {
    "Cluster": "lmworks.spec",
    "GPT": "lmworks.model",
    "LLM": "lmworks.llm",
    "ModelSpec": "lmworks.spec",
    "RunSpec": "lmworks.spec",
    "SamplingParams": "lmworks.engine.core.sampling_params",
    "Trainer": "lmworks.train",
}


def __getattr__(name: str) -> Any:
    if name in EXPORTS:
        return getattr(importlib.import_module(EXPORTS[name]), name)
    raise AttributeError(f"module 'lmworks' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*EXPORTS, "__version__"])
