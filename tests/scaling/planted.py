"""Points of a known law with noise, as a ladder would yield them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmworks.scaling.laws import LAWS
from lmworks.scaling.points import Points

Array = NDArray[np.float64]
TRUTH = {"E": 1.8172, "A": 477.84, "B": 2143.86, "alpha": 0.347313, "beta": 0.367183}
BUDGETS = (1e18, 3e18, 1e19, 3e19, 1e20)


def ladder(noise: float, seed: int, sizes: int = 7, budgets: tuple[float, ...] = BUDGETS, wide: float = 4.0) -> Points:
    """Iso-FLOP: of every budget `sizes` models, a factor `wide` around the optimum; noise of log-loss."""
    flops = np.repeat(budgets, sizes)
    n = 0.1 * np.sqrt(flops) * np.tile(np.geomspace(1 / wide, wide, sizes), len(budgets))
    return planted(n, flops / (6 * n), noise, seed)


def branches(noise: float, seed: int, shared: float, trunks: int = 8) -> Points:
    """WSD: of every size one trunk with five cool-downs; `shared`: the part of the variance that a trunk shares."""
    n = np.repeat(np.geomspace(1e7, 3e8, trunks), 5)
    d = n * np.tile([5.0, 10.0, 20.0, 40.0, 80.0], trunks)
    trunk = np.repeat(np.arange(trunks), 5)
    rng = np.random.default_rng(seed)
    own, common = rng.standard_normal(len(n)), rng.standard_normal(trunks)[trunk]
    off = noise * (np.sqrt(1 - shared) * own + np.sqrt(shared) * common)
    clean = planted(n, d, 0.0, 0)
    return Points("planted", clean.loss * np.exp(off), n, d, 6 * n * d, trunk=trunk)


def planted(n: Array, d: Array, noise: float, seed: int) -> Points:
    law = LAWS["chinchilla"]
    clean = law.log_loss(law.theta(TRUTH), {"n": n, "d": d})
    off = noise * np.random.default_rng(seed).standard_normal(len(n))
    return Points("planted", np.exp(clean + off), n, d, 6 * n * d)
