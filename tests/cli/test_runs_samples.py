"""`lmworks runs samples`: what a model wrote, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import typed
from lmworks.record import RunFolder
from lmworks.record.jsonl import LineWriter
from lmworks.spec import RunSpec

Lmworks = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lmworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lmworks:
    monkeypatch.chdir(tmp_path)
    table = {"name": "grpo", "model": {"preset": "tiny"}, "optim": {"steps": 30}}
    folder = RunFolder.create(tmp_path / "runs" / "grpo", RunSpec.from_dict(table))
    RunFolder.create(tmp_path / "runs" / "plain", RunSpec.from_dict(table))
    with LineWriter(folder.samples_path) as lines:
        for number in range(0, 30, 2):
            answer = {"prompt": "1+1=", "answer": f"\x1b[31m{number}\r\n日本", "reward": 0.5, "rewards": {"exact": 0.5}}
            lines.append({"round": number, "step": number + 1, "answers": [{**answer, "tokens": 1, "ended": True}]})
    return lambda *words: typed.lmworks(capsys, *words)


def test_rounds_from_the_first_to_the_last(lmworks: Lmworks) -> None:
    code, out, _ = lmworks("runs", "samples", "runs/grpo", "--rounds", "3")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("───")] == [
        "─── round 0, step 1 ───", "─── round 14, step 15 ───", "─── round 28, step 29 ───",
    ]  # fmt: skip
    assert "reward 0.5 (exact 0.5), 1 token, ended" in out and "3 of 15 rounds" in out
    assert "\x1b" not in out and "\r" not in out and "\\x1b[31m14\\r\n          日本" in out


def test_one_round_for_programs(lmworks: Lmworks) -> None:
    code, out, _ = lmworks("runs", "samples", "runs/grpo", "--round", "4", "--json")
    (line,) = json.loads(out)["rounds"]
    assert code == 0 and line["step"] == 5 and line["answers"][0]["answer"] == "\x1b[31m4\r\n日本"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs/grpo", "--round", "5"], "--round 5 has no samples; the nearest round that has is 4"),
        (["runs/plain"], "runs/plain has no samples.jsonl: online methods"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], said: str, lmworks: Lmworks) -> None:
    code, _, err = lmworks("runs", "samples", *words)
    assert code != 0 and said in err
