"""`lmworks plan pipeline` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from typed import lmworks


def test_stages_timeline_and_idle_share(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = lmworks(capsys, "pipeline", "tiny", "parallel.pp=2", "model.layers=4", "data.global_batch=32")
    assert code == 0
    assert "embedding" in out and "head" in out and "share of cost" in out
    assert "rank 0  F0─" in out and "B3" in out
    assert "(p−1)/(m+p−1) = 20.0%" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("tiny", "parallel.pp=2", "parallel.schedule=zbv", "model.layers=8", "data.global_batch=32", "--json")
    facts = json.loads(lmworks(capsys, "pipeline", *args)[1])
    assert [stage["rank"] for stage in facts["stages"]] == [0, 1, 1, 0]
    assert sum(stage["cost_share"] for stage in facts["stages"]) == pytest.approx(1)
    assert facts["idle"]["equal_stages"] == pytest.approx([facts["idle"]["ideal"]] * 2)
    assert facts["idle"]["measured"] is None


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = lmworks(capsys, "pipeline", "tiny", "parallel.pp=2", "--png", str(tmp_path / "x.png"))
    assert code == 0 and "x.png" in out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_one_rank_is_no_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, "pipeline", "tiny")
    assert code == 2 and "parallel.pp = 1" in err and err.count("\n") == 1
