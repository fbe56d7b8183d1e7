"""Pictures of parallelism: how a model and its batch are laid over devices."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
