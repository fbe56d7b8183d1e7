"""The pictures of lessons by name. Each is drawn from code, and its numbers are computed where the product has them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..drawing import Drawing
from . import communication, hardware, inference, memory, models, operations, parallelism, training

PICTURES: dict[str, Callable[[], Drawing]] = {
    **memory.PICTURES,
    **parallelism.PICTURES,
    **communication.PICTURES,
    **hardware.PICTURES,
    **models.PICTURES,
    **training.PICTURES,
    **inference.PICTURES,
    **operations.PICTURES,
}


@functools.cache
def picture_svg(name: str, title: str) -> str:
    return PICTURES[name]().svg(title)
