"""Pictures of communication: collectives, their cost, overlap."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
