"""What an answer computes beside what LMWorks' own function does, on the same inputs.

For exercises that are no part of a training step. The solutions of the course have the product's numbers (tests).
"""

from __future__ import annotations

from . import communication, inference, kernels, memory, parallelism, post_training, precision, profiling, studies
from .rows import Beside, Row, numbers, table_beside

BESIDE: dict[str, Beside] = {
    **memory.BESIDE,
    **communication.BESIDE,
    **parallelism.BESIDE,
    **kernels.BESIDE,
    **inference.BESIDE,
    **post_training.BESIDE,
    **precision.BESIDE,
    **studies.BESIDE,
    **profiling.BESIDE,
}

__all__ = ["BESIDE", "Beside", "Row", "numbers", "table_beside"]
