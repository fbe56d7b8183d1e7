"""Every random state a training step may draw from, as tensors, so that a resumed run draws the same numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Where a run starts, so that it does not depend on what ran before it in the process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all that NumPy takes
    torch.manual_seed(seed)  # and every CUDA device's


def rng_state() -> dict[str, Tensor]:
    """Python's, NumPy's global and torch's generators; one more entry for each CUDA device."""
    version, words, gauss = random.getstate()
    mersenne: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = mersenne
    state = {
        "python": torch.tensor([version, *words]),  # Mersenne Twister: 624 words and the position among them
        "python_gauss": as_float(gauss),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "numpy_gauss": as_float(cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state |= {f"cuda{index}": device for index, device in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Put the generators back. States of CUDA devices that this machine lacks have nowhere to go and are left out."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for index in range(torch.cuda.device_count()):
        if (device := state.get(f"cuda{index}")) is not None:
            torch.cuda.set_rng_state(device, index)


def as_float(value: float | None) -> Tensor:
    """float64, exact; NaN stands for 'no second Gaussian is waiting'."""
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def wrong_rng(state: dict[str, Any]) -> str:
    """Why generators would not take a state that was read; empty where they would. Tried on others than ours."""
    usual = {name: value for name, value in rng_state().items() if not name.startswith("cuda")}
    for name, value in usual.items():
        there = state.get(name)
        if not isinstance(there, Tensor) or there.shape != value.shape or there.dtype != value.dtype:
            return f"rng.{name} is missing or not {value.dtype} {tuple(value.shape)}"
    for name, value in state.items():
        if name not in usual and not (name.removeprefix("cuda").isdigit() and value.dtype == torch.uint8):
            return f"rng.{name} is of no generator"
    version, *words = state["python"].tolist()
    *keys, position, has_gauss = state["numpy"].tolist()
    try:
        random.Random().setstate((version, tuple(words), None))
        mersenne = np.random.RandomState()
        mersenne.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, 0.0))
        torch.Generator().set_state(state["torch"])
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""
