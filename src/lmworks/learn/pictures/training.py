"""Pictures of training: loss, scaling laws, optimizers, tuning."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
