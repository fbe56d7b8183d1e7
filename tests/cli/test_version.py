"""`lmworks --version`."""

from __future__ import annotations

import pytest

import lmworks as package
from typed import lmworks


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert lmworks(capsys, "--version") == (0, f"lmworks {package.__version__}\n", "")
