"""Suites while a run trains: scores in its metrics and report, the run itself unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_model import write_rows

from lmworks import LLM
from lmworks.evals import load_suite, run_suite
from lmworks.evals.during_training import attach_suites, check_suites
from lmworks.evals.engine_model import EngineModel
from lmworks.record import read_metrics
from lmworks.report.run_report import write_report
from lmworks.spec import SpecError
from lmworks.train import Trainer
from tiny import make_spec, train

ROWS = [
    {"question": "x in", "choices": ["y", "zz"], "answer": 0},
    {"question": "if", "choices": ["not", "0"], "answer": 0},
]


def write_suite(folder: Path) -> Path:
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "words.toml").write_text('format = "multiple-choice"\ndata = "rows.jsonl"\n')
    return folder / "words.toml"


def test_scores_are_those_of_the_checkpoint_and_the_run_is_unchanged(dataset: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path)
    keys = (
        f'log.suites=["{suite}", "stdlib-imports"]',
        "log.suites_every=6",
        "log.suites_limit=2",
        "model.context=128",
    )
    trainer = Trainer(make_spec(dataset, *keys, "checkpoint.every=6"), tmp_path / "run", quiet=True)
    attach_suites(trainer)
    trainer.run()
    plain = train(make_spec(dataset, "checkpoint.every=6", "model.context=128"), tmp_path / "plain")
    rows, others = (read_metrics(one.folder.metrics_path) for one in (trainer, plain))
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    scored = [row for row in rows if "eval/words/accuracy_norm" in row]
    assert [row["step"] for row in scored] == [6, 12] and all("eval/stdlib-imports/exact" in row for row in scored)
    for row in scored:
        with LLM(tmp_path / "run", step=row["step"]) as llm:
            found = run_suite(EngineModel(llm, {"model": "run"}), load_suite(str(suite)), tmp_path / str(row["step"]))
        assert row["eval/words/accuracy"] == found["metrics"]["accuracy"]["value"]
        kept = tmp_path / "run" / "evals" / f"step-{row['step']:06d}" / "words" / "samples.jsonl"
        inside = [json.loads(line)["logprobs"] for line in kept.read_text().splitlines()]
        after = [json.loads(line)["logprobs"] for line in (tmp_path / str(row["step"]) / "samples.jsonl").open()]
        assert all(one == pytest.approx(other, abs=1e-4) for one, other in zip(inside, after, strict=True))
    write_report(trainer.folder)
    page = trainer.folder.report_path.read_text()
    assert "Evaluation suites" in page and "words/accuracy_norm" in page


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (['log.suites=["none"]'], "there is no suite 'none'"),
        (['log.suites=["loss"]'], "measured anyway"),
        (['log.suites=["needle"]', "parallel.dp=2"], "runs of one rank"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_start(dataset: Path, keys: list[str], error: str) -> None:
    with pytest.raises(SpecError, match=error):
        check_suites(make_spec(dataset, *keys))
