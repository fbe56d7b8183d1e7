"""The heat map of a probe, drawn from a file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from typed import lmworks

pytest.importorskip("matplotlib")


def test_scores_become_cells_of_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread

    groups = {
        "100 words, depth 0": 1.0,
        "100 words, depth 1": 0.0,
        "400 words, depth 0": 0.0,
        "400 words, depth 1": 1.0,
    }
    result = {"suite": "needle", "metric": "contains", "scores": {}, "groups": groups}
    (tmp_path / "result.json").write_text(json.dumps(result))
    code, out, _ = lmworks(capsys, "evals", "heatmap", str(tmp_path), "--out", str(tmp_path / "map.png"))
    assert code == 0 and "map.png" in out
    pixels = imread(tmp_path / "map.png")[..., :3]
    greenish = (pixels[..., 1] > pixels[..., 0] + 0.2).mean()
    reddish = (pixels[..., 0] > pixels[..., 1] + 0.2).mean()
    assert greenish > 0.05 and reddish > 0.05  # two cells of each, and the colour bar


def test_a_suite_without_depths_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"suite": "x", "metric": "m", "scores": {}, "groups": {}}))
    code, _, error = lmworks(capsys, "evals", "heatmap", str(tmp_path), "--out", str(tmp_path / "map.png"))
    assert code == 2 and "has no scores by several lengths or depths" in error
