"""Parameters of a test of which some are slow: variations of those that every run of the suite has."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_slow(names: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """`names`, with those in `slow` left to `make test-slow`."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]
