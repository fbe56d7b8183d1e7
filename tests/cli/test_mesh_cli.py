"""`lmworks plan mesh` as it is typed."""

from __future__ import annotations

import json

import pytest

from typed import lmworks

LAYOUT = ["mesh", "tiny", "parallel.dp=2", "parallel.tp=2", "parallel.strategy=fsdp2"]


def test_who_talks_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, *LAYOUT, "--rank", "3")
    assert code == 0 and "4 ranks; rank 3 is at dp_shard 1, tp 1" in out
    code, out, _ = lmworks(capsys, *LAYOUT, "--rank", "3", "--json")
    answer = json.loads(out)
    assert {axis: found["group"] for axis, found in answer["axes"].items()} == {"dp_shard": [1, 3], "tp": [2, 3]}


def test_a_rank_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, *LAYOUT, "--rank", "4")
    assert code == 2 and "--rank 4: the layout has ranks 0 … 3" in err
