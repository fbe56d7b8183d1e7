"""`lmworks evals` over a real run: results, resume after SIGKILL, comparison, gate, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ADD, DOUBLE, read_rows, write_rows

from lmworks import LLM
from lmworks.cli.main import main
from lmworks.evals.engine_model import EngineModel
from lmworks.evals.models import Completion, Prompt
from lmworks.spec.fim import FimSpec
from tiny import make_spec, train


@pytest.fixture(scope="module")
def run_dir(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evals") / "run"
    train(make_spec(dataset, "model.context=256"), path)
    return path


def lmworks(*words: object, code: int = 0) -> None:
    before = sys.argv
    sys.argv = ["lmworks", *map(str, words)]
    try:
        main()
        found = 0
    except SystemExit as end:
        found = int(end.code or 0)
    finally:
        sys.argv = before
    assert found == code


def test_the_suite_loss_is_the_loss_of_eval(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lmworks("eval", run_dir, "--json")
    theirs = json.loads(capsys.readouterr().out)
    lmworks("evals", "run", run_dir, "--suite", "loss", "--out", tmp_path / "out", "--json")
    found = json.loads(capsys.readouterr().out)["suites"]["loss"]
    assert found["metrics"]["nll"]["value"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert found["metrics"]["perplexity"]["value"] == pytest.approx(theirs["perplexity"], rel=1e-6)
    assert found["metrics"]["nll"]["low"] < theirs["loss"] < found["metrics"]["nll"]["high"]


def test_suites_of_all_kinds_run_over_the_engine(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = write_rows(tmp_path / "code.jsonl", [ADD, DOUBLE])
    choice = write_rows(tmp_path / "choice.jsonl", [{"question": "x in", "choices": ["y", "zzzz"], "answer": 0}])
    own = tmp_path / "choices.toml"
    own.write_text(f'format = "multiple-choice"\ndata = "{choice}"\n')
    words = ["run", run_dir, "--suite", f"humaneval,{own},perplexity,stdlib-infill", "--out", tmp_path / "out"]
    words += ["--data", f"humaneval={code}", "--data", f"perplexity={code}", "--limit", 2, "--max-tokens", 8]
    (tmp_path / "code.jsonl").write_text(  # perplexity reads `text`
        "".join(json.dumps({**row, "text": row["prompt"]}) + "\n" for row in read_rows(code))
    )
    lmworks("evals", *words)
    said = capsys.readouterr().out
    assert "pass@1" in said and "accuracy_norm" in said and "bits_per_byte" in said and "edit" in said
    assert f"samples, logs and verdicts: {tmp_path / 'out'}" in said
    (sample,) = read_rows(tmp_path / "out" / "choices" / "samples.jsonl")
    assert sample["tokens"] == [2, 5]  # bytes of " y" and " zzzz"


def test_a_prompt_that_is_too_long_keeps_its_end(run_dir: Path) -> None:
    """256 tokens of context: 100 for the answer, and the rest for the end of the text; of a gap, for both sides."""
    model = EngineModel(LLM(run_dir), {}, fim=FimSpec(rate=0.5))
    ends = {"max_tokens": 100, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    text = "".join(chr(97 + n % 26) for n in range(400))
    assert bytes(model.encode(Prompt(text, **ends))).decode() == text[-155:]
    assert bytes(model.encode(Prompt("short", **ends))).decode() == "short"
    ids = model.encode(Prompt(text, suffix="x" * 300, **ends))
    assert len(ids) <= 156 and ids.count(ord("x")) >= 39 and ids[-1] == model.sentinels.middle  # type: ignore[union-attr]
    found: dict[int, Completion] = {}
    model.generate([Prompt(text, **ends)], found.__setitem__)
    assert not found[0].error and found[0].tokens


def test_a_killed_evaluation_goes_on(
    run_dir: Path, tmp_path: Path, forked_python: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**ADD, "task_id": f"add{n}", "prompt": f"# {n}\n{ADD['prompt']}"} for n in range(5)]
    data = write_rows(tmp_path / "code.jsonl", rows)
    words = ["evals", "run", str(run_dir), "engine.max_seqs=1", "--suite", "humaneval", "--data", str(data)]
    words += ["--max-tokens", "64", "--samples", "2", "--temperature", "1", "--json"]
    samples = tmp_path / "out" / "humaneval" / "samples.jsonl"
    job = subprocess.Popen(
        [sys.executable, "-m", "lmworks", *words, "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not samples.exists() or samples.read_text().count("\n") < 3:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    before = samples.read_bytes()
    assert 3 <= before.count(b"\n") < 10
    lmworks(*words, "--out", tmp_path / "out")
    resumed = json.loads(capsys.readouterr().out)
    assert samples.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    lmworks(*words, "--out", tmp_path / "whole")
    whole = json.loads(capsys.readouterr().out)
    assert resumed["suites"] == whole["suites"]

    def texts(out: str) -> dict[tuple[str, int], str]:
        found = read_rows(tmp_path / out / "humaneval" / "samples.jsonl")
        assert len(found) == 10
        return {(one["problem"], one["sample"]): one["text"] for one in found}

    assert texts("out") == texts("whole")


def result(scores: dict[str, float]) -> dict[str, Any]:
    return {"suite": "loss", "metric": "nll", "higher_is_better": False, "scores": {"nll": scores}, "metrics": {}}


def test_the_gate_refuses_a_regression(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evals", "run", run_dir, "--suite", "loss", "--out", tmp_path / "out", "--json"]
    lmworks(*words)
    now = json.loads(capsys.readouterr().out)
    (tmp_path / "same.json").write_text(json.dumps(now))
    lmworks(*words, "--gate", tmp_path / "same.json")
    scores = now["suites"]["loss"]["scores"]["nll"]
    (tmp_path / "better.json").write_text(json.dumps(result({name: value - 0.1 for name, value in scores.items()})))
    capsys.readouterr()
    lmworks(*words, "--gate", tmp_path / "better.json", code=1)
    assert "worse than" in (said := capsys.readouterr().err) and "loss nll" in said
    (tmp_path / "other.json").write_text(json.dumps({**result(scores), "suite": "humaneval"}))
    unused = [*words[:-2], tmp_path / "unused", "--gate", tmp_path / "other.json"]
    lmworks(*unused, code=2)
    assert "--gate: the baseline has no suite 'loss'" in capsys.readouterr().err
    assert not (tmp_path / "unused").exists()  # said before the work, not after it
    lmworks("evals", "compare", tmp_path / "better.json", tmp_path / "out", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["difference"] == pytest.approx(0.1) and found["p"] < 0.01 and found["worse"] == len(scores)


def test_a_heat_map_needs_lengths_and_depths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loss.json").write_text(json.dumps({**result({"0": 1.0}), "groups": {}}))
    lmworks("evals", "heatmap", tmp_path / "loss.json", "--out", tmp_path / "x.png", code=2)
    assert "no suite in it has no scores" not in (said := capsys.readouterr().err)
    assert "has no scores by several lengths or depths; evaluate e.g. --suite needle first" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["run"], "--suite NAME: which? One of arc-challenge"),
        (["run", "--suite", "humaneval"], "give a MODEL, or --server URL --model NAME"),
        (["run", "--suite", "humaneval", "--server", "http://x"], "--server needs --model NAME"),
        (["run", "tiny", "--suite", "loss"], "suite loss: tiny is not a run folder"),
        (["run", "tiny", "--suite", "humanevals"], "there is no suite 'humanevals'; did you mean 'humaneval'"),
        (["run", "tiny", "--suite", "mbpp,humaneval", "--data", "x"], "--data x: of which suite?"),
        (["run", "tiny", "--suite", "mbpp", "--k", "x"], "--k x: whole numbers are expected"),
        (["run", "tiny", "--suite", "mbpp", "--gate", "none.json"], "there is no evaluation at none.json"),
        (["compare", "none", "other"], "there is no evaluation at none"),
        (["export", "humaneval", "--out", "x.jsonl", "--data", "none.jsonl"], "'none.jsonl': there is no such file"),
    ],
)
def test_mistakes_are_named(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    lmworks("evals", *words, code=2)
    assert error in capsys.readouterr().err
