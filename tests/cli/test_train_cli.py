"""`lmworks train`, `resume`, `eval` and `generate` as a user types them: results, one-line errors, exit codes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.cli.main import main
from lmworks.data import prepare
from lmworks.model import generate
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import LMWorksError, load_run
from lmworks.train import Trainer
from lmworks.train.evaluate import evaluate, held_out
from lmworks.train.load_run import load_trained
from tiny import (
    Crash,
    before_step,
    crash,
    curve,
    differences,
    events,
    flip_a_bit,
    make_spec,
    saved,
    shard,
    start,
    train,
    write_documents,
    write_spec,
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lmworks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Types a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["lmworks", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        captured = capsys.readouterr()
        return int(code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    train(make_spec(dataset, "optim.steps=30", "checkpoint.every=10", "checkpoint.keep=2"), run_dir)
    return run_dir


def one_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("lmworks: error: ")
    return line


# --- train and resume ----------------------------------------------------------------------------------


def test_train_leaves_a_whole_run_folder_and_says_where(
    lmworks: Run, dataset: Path, tmp_path: Path, plots: None
) -> None:
    spec = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    code, out, err = lmworks("train", spec, "optim.lr=5e-3", "seed=4", "--run-dir", tmp_path / "run")
    assert (code, err) == (0, "")
    folder = RunFolder(tmp_path / "run")
    (result,) = events(folder.path, "eval")
    assert f"done: 12 steps, loss {result['val_loss']:.4f} nats/token over {result['tokens']:,} held-out tokens" in out
    assert str(folder.report_path) in out and folder.report_path.exists()
    assert sorted(path.name for path in folder.plots.iterdir()) == ["loss.png", "lr.png", "throughput.png"]
    assert json.loads(folder.prediction_path.read_text())
    written = folder.spec()
    assert (written.optim.lr, written.seed) == (5e-3, 4)
    assert {line["attempt"] for line in read_metrics(folder.metrics_path)} == {0}


def test_the_spec_in_the_folder_repeats_the_run(lmworks: Run, finished: Path, tmp_path: Path) -> None:
    code, _, _ = lmworks("train", finished, "--run-dir", tmp_path / "again")
    assert code == 0
    assert load_run(tmp_path / "again") == load_run(finished)
    assert curve(tmp_path / "again") == curve(finished)
    assert differences(saved(tmp_path / "again"), saved(finished)) == []


def test_a_relative_data_path_is_found_from_anywhere(
    lmworks: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(make_spec(Path(dataset.name)), tmp_path / "spec.toml")
    monkeypatch.chdir(dataset.parent)
    assert lmworks("train", spec, "--run-dir", tmp_path / "run")[0] == 0
    monkeypatch.chdir("/")
    assert lmworks("eval", tmp_path / "run")[0] == 0


def test_without_run_dir_every_run_gets_a_folder_of_its_own(
    lmworks: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(make_spec(dataset, "optim.steps=2"), tmp_path / "spec.toml")
    monkeypatch.chdir(tmp_path)
    assert lmworks("train", spec)[0] == 0
    assert lmworks("train", spec)[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


def test_train_json_is_json_and_nothing_else(lmworks: Run, dataset: Path, tmp_path: Path) -> None:
    spec = write_spec(make_spec(dataset, "log.eval_batches=0"), tmp_path / "spec.toml")
    code, out, err = lmworks("train", spec, "--run-dir", tmp_path / "run", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary["step"] == 12 and summary["run"] == str(tmp_path / "run")
    trained = load_trained(tmp_path / "run")
    measured = evaluate(trained.model, held_out(trained.spec), trained.spec)
    assert (summary["val_loss"], summary["val_tokens"]) == (measured.loss, measured.tokens)


def test_a_folder_that_holds_a_run_is_bad_usage_with_the_way_to_go_on(
    lmworks: Run, finished: Path, dataset: Path, tmp_path: Path
) -> None:
    spec = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    code, _, err = lmworks("train", spec, "--run-dir", finished)
    assert code == 2 and f"lmworks resume {finished}" in one_line(err)


def test_resuming_a_finished_run_says_done_and_changes_nothing(lmworks: Run, finished: Path) -> None:
    before, metrics = saved(finished), (finished / "metrics.jsonl").read_text()
    code, out, err = lmworks("resume", finished)
    assert (code, err) == (0, "") and "done: 30 steps" in out
    assert (finished / "metrics.jsonl").read_text() == metrics
    assert differences(saved(finished), before) == []


def test_a_run_in_use_is_refused_before_anything_is_written(lmworks: Run, finished: Path) -> None:
    with RunFolder(finished).locked():
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
        code, out, err = lmworks("resume", finished)
        assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert (code, out) == (2, "") and "is in use: another process is training this run" in one_line(err)


@pytest.mark.slow
def test_memory_is_at_least_what_weights_gradients_and_moments_take(dataset: Path, tmp_path: Path) -> None:
    """In a process of its own: here, memory that an earlier test gave back would be used again."""
    spec = make_spec(dataset, "model.vocab=65536", "optim.steps=3")
    process = start("train", write_spec(spec, tmp_path / "spec.toml"), "--run-dir", tmp_path / "run")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    state = 16 * spec.model.params  # fp32 weights, gradients and two moments
    logits = 4 * 64 * 65536  # of one micro-batch
    measured = [line["memory_bytes"] for line in read_metrics(RunFolder(tmp_path / "run").metrics_path)]
    assert measured == sorted(measured)
    assert state < measured[-1] < 2 * (state + logits) + 300e6


# --- faults --------------------------------------------------------------------------------------------


def interrupted(dataset: Path, run_dir: Path, at_step: int, *overrides: str) -> Trainer:
    trainer = Trainer(make_spec(dataset, "checkpoint.every=4", *overrides), run_dir, quiet=True)
    before_step(trainer, at_step, crash)
    with pytest.raises(Crash):
        trainer.run()
    return trainer


def test_weights_that_are_not_finite_end_the_job_with_one_line_and_code_1(
    lmworks: Run, dataset: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    trainer = interrupted(dataset, run_dir, 7)
    with torch.no_grad():
        trainer.model.blocks["0"].mlp.down.weight[0, 0] = float("nan")  # type: ignore[index, union-attr]
    trainer.save()  # at step 6
    shutil.rmtree(run_dir / "checkpoints" / "step-000004")  # which would be used instead
    code, _, err = lmworks("resume", run_dir)
    assert code == 1
    refused, failed = err.splitlines()
    assert refused.startswith("refused a damaged checkpoint: ")
    assert failed.startswith("lmworks: error: no usable checkpoint in ")
    for line in (refused, failed):
        assert line.endswith("step-000006: model.blocks.0.mlp.down.weight has 1 values that are NaN or Inf")
    assert [line[0] for line in curve(run_dir)] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_named_on_stderr_and_the_result_stays_json(
    lmworks: Run, dataset: Path, tmp_path: Path
) -> None:
    train(make_spec(dataset, "checkpoint.every=4"), tmp_path / "straight")
    run_dir = tmp_path / "run"
    interrupted(dataset, run_dir, 10)
    flip_a_bit(shard(run_dir, 8))
    (run_dir / "checkpoints" / "step-000009").mkdir()  # what a kill before the commit leaves is no damage
    code, out, err = lmworks("resume", run_dir, "--json")
    assert code == 0 and json.loads(out)["step"] == 12
    unfinished, damaged = err.splitlines()
    assert unfinished.startswith("skipped an unfinished checkpoint: ") and "step-000009" in unfinished
    assert damaged.startswith("refused a damaged checkpoint: ") and str(shard(run_dir, 8)) in damaged
    assert differences(saved(run_dir), saved(tmp_path / "straight")) == []


def test_with_every_checkpoint_damaged_one_line_names_them_and_nothing_is_deleted(
    lmworks: Run, dataset: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    interrupted(dataset, run_dir, 10)
    for step in (4, 8):
        flip_a_bit(shard(run_dir, step))
    code, _, err = lmworks("resume", run_dir)
    assert code == 1
    *named, last = err.splitlines()
    assert len(named) == 2 and last.startswith("lmworks: error: no usable checkpoint")
    assert all(str(shard(run_dir, step)) in last and shard(run_dir, step).exists() for step in (4, 8))


def test_other_data_under_a_run_end_it_with_one_line(lmworks: Run, tmp_path: Path) -> None:
    prepare([str(write_documents(tmp_path / "a.jsonl"))], tmp_path / "data", workers=1)
    interrupted(tmp_path / "data", tmp_path / "run", 6)
    prepare([str(write_documents(tmp_path / "b.jsonl", seed=1))], tmp_path / "data", workers=1)
    code, _, err = lmworks("resume", tmp_path / "run")
    assert code == 1 and str(tmp_path / "data") in one_line(err)


def test_a_report_that_cannot_be_written_does_not_hide_why_the_run_failed(
    lmworks: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise LMWorksError("cannot write report.html: No space left on device")

    monkeypatch.setattr("lmworks.report.run_report.write_report", full)
    monkeypatch.setattr("lmworks.train.step.squared_norm", lambda *_: torch.tensor(float("nan")))
    spec = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    code, _, err = lmworks("train", spec, "--run-dir", tmp_path / "run")
    assert code == 1 and "step 1: gradient norm nan" in one_line(err)


def test_a_failed_run_leaves_the_signals_of_its_caller_as_they_were(
    lmworks: Run, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.train.step.squared_norm", lambda *_: torch.tensor(float("nan")))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    spec = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    assert lmworks("train", spec, "--run-dir", tmp_path / "run")[0] == 1
    assert {number: signal.getsignal(number) for number in before} == before


# --- eval ----------------------------------------------------------------------------------------------


def test_eval_measures_all_held_out_tokens_and_prints_what_it_measured(lmworks: Run, finished: Path) -> None:
    code, out, err = lmworks("eval", finished, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    trained = load_trained(finished)
    batches = held_out(trained.spec)
    measured = evaluate(trained.model, batches, trained.spec)
    assert (result["step"], result["loss"], result["tokens"]) == (30, measured.loss, batches.windows * 32)
    assert result["perplexity"] == pytest.approx(2.718281828459045**measured.loss)
    assert result["bits_per_byte"] == pytest.approx(measured.loss / 0.6931471805599453 / batches.bytes_per_token)
    text = lmworks("eval", finished)[1]
    assert f"loss {measured.loss:.4f} nats/token" in text and f"{measured.tokens:,} held-out tokens" in text


def test_eval_by_position_is_the_loss_of_every_target_where_it_stands(lmworks: Run, finished: Path) -> None:
    result = json.loads(lmworks("eval", finished, "--by-position", "--json")[1])
    bands = result["by_position"]
    assert [(band["first"], band["last"]) for band in bands] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    assert sum(band["tokens"] for band in bands) == result["tokens"]
    mean = sum(band["loss"] * band["tokens"] for band in bands) / result["tokens"]
    assert mean == pytest.approx(result["loss"], rel=1e-6)
    trained = load_trained(finished)
    batches = held_out(trained.spec)
    third = []
    for index in range(-(-batches.windows // trained.spec.data.micro_batch)):
        batch = batches.held_out_batch(index)
        with torch.no_grad():
            logits = trained.model(batch.tokens)[:, 2:4].float()
        third.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets[:, 2:4].flatten(), reduction="none", ignore_index=-100
            )
        )
    losses = torch.cat(third)
    assert bands[2]["loss"] == pytest.approx(float(losses.sum()) / bands[2]["tokens"], rel=1e-5)
    assert "2–3" in lmworks("eval", finished, "--by-position")[1]


def test_eval_of_an_earlier_step_and_of_some_batches(lmworks: Run, finished: Path) -> None:
    early = json.loads(lmworks("eval", finished, "--step", "20", "--json")[1])
    late = json.loads(lmworks("eval", finished, "--json")[1])
    assert early["step"] == 20 and early["loss"] > late["loss"]
    assert json.loads(lmworks("eval", finished, "--batches", "3", "--json")[1])["tokens"] == 3 * 2 * 32


def test_reading_a_run_with_a_damaged_checkpoint_says_so_and_writes_nothing(
    lmworks: Run, dataset: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(make_spec(dataset, "checkpoint.every=4"), run_dir)
    flip_a_bit(shard(run_dir, 12))
    recorded = (run_dir / "events.jsonl").read_text()
    code, out, err = lmworks("eval", run_dir, "--json")
    assert code == 0 and json.loads(out)["step"] == 8
    refused, instead = err.splitlines()
    assert f"{shard(run_dir, 12)} (rank 0) is damaged" in refused and instead == "using step 8 instead"
    assert (run_dir / "events.jsonl").read_text() == recorded


# --- generate ------------------------------------------------------------------------------------------


def test_greedy_text_is_what_the_model_itself_generates(lmworks: Run, finished: Path) -> None:
    arguments = ("generate", finished, "--prompt", "def x", "--max-tokens", "20", "--greedy")
    code, out, err = lmworks(*arguments, "--json")
    assert (code, err) == (0, "")
    (result,) = json.loads(out)
    trained = load_trained(finished)
    ids = trained.tokenizer.encode("def x")
    expected = generate(trained.model, torch.tensor([ids]), 20, stop=trained.tokenizer.eot)[0, len(ids) :].tolist()
    expected = [token for token in expected if token != trained.tokenizer.eot]
    assert result["tokens"] == expected and result["prompt_tokens"] == len(ids)
    assert result["text"] == trained.tokenizer.decode(expected)
    assert lmworks(*arguments)[1] == lmworks(*arguments)[1] == "def x" + result["text"] + "\n"


def test_sampling_repeats_with_its_seed_and_differs_with_another(lmworks: Run, finished: Path) -> None:
    def text(seed: int) -> str:
        return lmworks("generate", finished, "--prompt", "x", "--temperature", "1.5", "--seed", str(seed))[1]

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "RUN", "--prompt", "x" * 200], 2, "the prompt has 200 tokens: with an answer"),
        (["generate", "RUN", "--prompt", "x", "--seed", "99999999999999999999"], 2, "seed = 99999999999999999999"),
        (["generate", "RUN", "--prompt", "x" * 100, "--max-tokens", "29"], 2, "at most 28 new tokens fit"),
        (["generate", "RUN", "--prompt", "x", "--temperature", "-1"], 2, "temperature = -1 is out of range"),
        (["generate", "RUN", "--prompt", "x", "--step", "5"], 2, "no checkpoint of step 5; steps there: 30, 20"),
        (["eval", "RUN", "--step", "5"], 2, "no checkpoint of step 5; steps there: 30, 20"),
        (["generate", "RUN/nowhere", "--prompt", "x"], 2, "nowhere is not a run folder: it does not exist"),
        (["eval", "RUN/nowhere"], 2, "nowhere is not a run folder: it does not exist"),
        (["eval", "RUN/metrics.jsonl"], 2, "is not a run folder: it is a file"),
        (["resume", "RUN/checkpoints"], 2, "is not a run folder: it has no spec.toml"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    lmworks: Run, finished: Path, arguments: list[str], code: int, said: str
) -> None:
    typed = [argument.replace("RUN", str(finished)) for argument in arguments]
    found, out, err = lmworks(*typed)
    assert (found, out) == (code, "") and said in one_line(err)


def test_a_run_without_a_checkpoint_says_how_to_get_one(lmworks: Run, dataset: Path, tmp_path: Path) -> None:
    interrupted(dataset, tmp_path / "run", 2)
    for command in (["eval"], ["generate", "--prompt", "x"]):
        code, _, err = lmworks(command[0], tmp_path / "run", *command[1:])
        assert code == 1 and "has no checkpoint yet" in one_line(err)
