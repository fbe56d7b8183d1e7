"""The Makefile: make takes the last of two rules of one name, with only a warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_target_has_one_recipe() -> None:
    found = subprocess.run(["make", "--dry-run", "test", "READY="], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stderr == ""
    assert "not slow" in found.stdout and "-m gpu" not in found.stdout
