"""Pictures of a GPU: its memories, its execution model, kernels, profiles."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
