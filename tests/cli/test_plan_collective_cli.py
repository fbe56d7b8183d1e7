"""`lmworks plan collective` as it is typed; bad input is in test_exit_codes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from typed import lmworks


def test_table_and_crossovers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = lmworks(
        capsys, "plan", "collective", "all_reduce", "--bytes", "256M", "--ranks", "1024", "--cluster", "1024xh100"
    )
    assert code == 0 and "256 MiB among 1,024 H100-SXM-80GB: 128 machines, 8 in each" in out
    for name in ("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "hierarchical", "in_network"):
        assert f"\n {name} " in out
    assert "1792 + 254" in out  # of the ring: 2 × 1,023 rounds, 2 × 127 of them between machines
    assert "the faster of ring and double_tree" in out and "of those in NCCL: in_network from 256 B" in out


def test_links_far_below_their_datasheet_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight L40S reach 1.2 GB/s of 32, as NCCL measured it; eight H100 reach most of theirs."""
    said = [lmworks(capsys, "plan", "collective", "all_reduce", "--cluster", each)[1] for each in ("8xl40s", "8xh100")]
    assert "8 L40S in a machine send 1.2 GB/s each" in said[0] and "without peer-to-peer" in said[0]
    assert "peer-to-peer" not in said[1]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all_gather", "--bytes", "1MB", "--cluster", "64xa100", "cluster.network=roce", "--json")
    facts = json.loads(lmworks(capsys, "plan", "collective", *words)[1])
    assert facts["bytes"] == 10**6 and (facts["machines"], facts["ranks_per_machine"]) == (8, 8)
    by_name = {row["algorithm"]: row for row in facts["algorithms"]}
    assert by_name["ring"]["seconds"] == pytest.approx(facts["planned_s"])
    assert by_name["ring"]["busbw"] == pytest.approx(10**6 * 63 / 64 / by_name["ring"]["seconds"])
    assert facts["winner"] == min(facts["algorithms"], key=lambda row: row["seconds"])["algorithm"]
    assert facts["crossovers"][0]["from"] == 256 and facts["nccl_crossovers"][0]["algorithm"] == "ring"


def test_groups_with_one_rank_in_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all_reduce", "--cluster", "64xh100", "--stride", "8", "--json")
    facts = json.loads(lmworks(capsys, "plan", "collective", *words)[1])
    assert (facts["ranks"], facts["machines"], facts["ranks_per_machine"]) == (8, 8, 1)


def test_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "collective", "all_reduce", "--cluster", "4xh100", "--bytes", "4M", "--schedule", "ring")
    code, out, _ = lmworks(capsys, *words)
    assert code == 0 and "4 ranks: 6 rounds, the buffer in 4 chunks, at most 6 MiB sent by a rank" in out
    facts = json.loads(lmworks(capsys, *words, "--json")[1])
    assert facts["bytes_sent"] == [6 * 2**20] * 4 and len(facts["rounds"]) == 6
    assert facts["rounds"][0][0] == {"src": 0, "dst": 1, "chunks": [3], "reduce": True}


def test_schedule_over_two_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all_reduce", "--cluster", "2x2xh100", "cluster.domain=2", "--schedule", "hierarchical", "--json")
    facts = json.loads(lmworks(capsys, "plan", "collective", *words)[1])
    far = [[move["src"] // 2 != move["dst"] // 2 for move in turn] for turn in facts["rounds"]]
    assert far == [[False] * 4, [True] * 4, [True] * 4, [False] * 4]


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = lmworks(
        capsys, "plan", "collective", "broadcast", "--cluster", "16xh100", "--plot", str(tmp_path / "x.png")
    )
    assert code == 0 and "x.png" in out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
