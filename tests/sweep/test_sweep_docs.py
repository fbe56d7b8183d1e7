"""The Python of docs/sweeps.md drives a sweep as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.sweep.folder import Sweep

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_driver_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (space,) = re.findall(r"^cat > space.toml <<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "space.toml").write_text(space)
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    trials = Sweep.open(tmp_path / "sweeps/mine").trials()
    assert sorted((trial.state, trial.step) for trial in trials[:2]) == [("finished", 40), ("stopped", 20)]
    assert (trials[2].state, trials[2].step) == ("finished", 40)
    assert trials[2].parent == {"trial": [trial.state for trial in trials].index("finished"), "step": 20}
