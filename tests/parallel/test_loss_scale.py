"""The loss scale of fp16: where it goes when nothing overflows, and when everything does."""

from __future__ import annotations

import math

from lmworks.parallel.precision import LossScale
from lmworks.spec import PrecisionSpec


def test_it_doubles_no_further_than_fp16_reaches() -> None:
    """Gradients that are all zero never overflow: the scale would grow until the loss times it is infinite."""
    scale = LossScale(PrecisionSpec(dtype="fp16", loss_scale=2.0**38, loss_scale_window=1))
    found = []
    for norm in (0.0, 0.0, 0.0, math.inf, 0.0):
        scale.update(norm)
        found.append(math.log2(scale.scale))
    assert found == [39, 40, 40, 39, 40]


def test_the_bounds_themselves_are_scales() -> None:
    for first in (1.0, 2.0**40):
        assert LossScale(PrecisionSpec(dtype="fp16", loss_scale=first)).scale == first
