"""The highest moment of a step, in bytes of one rank's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import RunSpec
from .memory import memory


@dataclass(frozen=True)
class Peak:
    moment: str
    bytes: int


def peak(spec: RunSpec, rank: int, device: str = "cpu") -> Peak:
    sheet = memory(spec, device, rank)
    return Peak(sheet.moment, sheet.tensors)
