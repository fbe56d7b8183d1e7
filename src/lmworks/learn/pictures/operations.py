"""Pictures of operations: checkpoints, faults, debugging, clusters, serving."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
