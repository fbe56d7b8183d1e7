"""`lmworks quantize` as it is called: a run in, a folder and figures out, or an exit code and nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.engine.quantization.folder import load_quantized
from lmworks.spec import LMWorksError
from lmworks.train.load_run import load_trained
from tiny import make_spec, train


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize-cli") / "run"
    train(make_spec(dataset, "optim.steps=30"), folder)
    return folder


def call(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code (as `main` gives it), what was printed, and the error."""
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    error = result.exception
    if isinstance(error, LMWorksError):
        return error.exit_code, result.stdout, str(error)
    if error is not None and not isinstance(error, SystemExit):
        raise error
    return result.exit_code, result.stdout, result.stderr


def test_a_run_becomes_a_folder(run: Path, tmp_path: Path) -> None:
    code, printed, _ = call(run, "--scheme", "int4", "--out", tmp_path / "q", "--json", "--tokens", 3000)
    assert code == 0
    report = json.loads(printed)
    assert report["passed"]
    assert report["scheme"] == "int4"
    assert report["perplexity_after"] <= 1.05 * report["perplexity_before"]
    assert report["bytes_after"] < report["bytes_before"]
    assert {"name", "error", "rounded_error"} <= report["layers"][0].keys()
    assert load_quantized(tmp_path / "q").spec == load_trained(run).model.spec
    again, printed, _ = call(run, "--scheme", "int8", "--out", tmp_path / "q", "--tokens", 3000)  # in its place
    assert again == 0
    assert "perplexity" in printed
    assert json.loads((tmp_path / "q" / "quantization.json").read_text())["scheme"] == "int8"


def test_a_suite_is_a_gate_too(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood of texts, before and after; where it is worse beyond noise, nothing is left."""
    texts = [" ".join(["def", "return", "for"] * (n % 7 + 1)) for n in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [str(run), "--scheme", "int8", "--out", str(tmp_path / "q"), "--tokens", "3000", "--json"]
    words += ["--suite", "perplexity", "--suite-data", str(tmp_path / "texts.jsonl"), "--suite-limit", "12"]
    monkeypatch.setattr("lmworks.cli.quantize.LEVEL", 0.0)
    code, printed, _ = call(*words)
    (found,) = json.loads(printed)["suites"]
    assert code == 0 and found["problems"] == 12 and found["metric"] == "bits_per_byte"
    assert found["first"] == pytest.approx(found["second"], rel=0.05) and found["first"] != found["second"]
    monkeypatch.setattr("lmworks.evals.compare.is_worse", lambda one: True)
    monkeypatch.setattr("lmworks.cli.quantize.LEVEL", 1.1)
    code, _, error = call(*words)
    assert code == 1 and "worse beyond noise, and is not kept: perplexity bits_per_byte" in error
    assert not (tmp_path / "q").exists()


def test_a_quantized_folder_is_not_quantized_again(run: Path, tmp_path: Path) -> None:
    assert call(run, "--scheme", "int8", "--out", tmp_path / "q", "--tokens", 3000)[0] == 0
    code, _, error = call(tmp_path / "q", "--scheme", "int4", "--out", tmp_path / "again")
    assert code == 2 and "is quantized already: quantize what it was made from" in error


def test_a_model_that_lost_too_much_is_not_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.kernels.inference import quantized

    plain = quantized.int8_quantize

    def broken(weight):  # type: ignore[no-untyped-def]
        q, scale = plain(weight)
        return q, scale * 3

    monkeypatch.setattr(quantized, "int8_quantize", broken)
    code, printed, error = call(run, "--scheme", "int8", "--out", tmp_path / "q", "--json", "--tokens", 3000)
    assert code == 1
    assert json.loads(printed)["passed"] is False
    assert "worst layers: blocks.0." in error
    assert list(tmp_path.iterdir()) == []


def test_a_hugging_face_folder_needs_text(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    hf = tmp_path / "hf"
    load_trained(run).model.save_hf(hf, eos=0)
    code, _, error = call(hf, "--scheme", "fp8", "--out", tmp_path / "q")
    assert (code, "--calibration" in error) == (2, True)
    text = tmp_path / "text.txt"
    text.write_text("for x in y: return x if not y " * 40)
    code, _, error = call(hf, "--scheme", "fp8", "--out", tmp_path / "q", "--calibration", text)
    assert (code, "tokenizer" in error) == (2, True)
    (hf / "tokenizer.json").write_text(byte_tokenizer())
    arguments = ("--out", tmp_path / "q", "--calibration", text, "--tokens", 1000)
    code, _, error = call(hf, "--scheme", "fp8", *arguments)
    assert code == 0, error
    assert (tmp_path / "q" / "tokenizer.json").is_file()


def byte_tokenizer() -> str:
    from lmworks.data.tokenizer import train_bpe

    return train_bpe(["for x in y: return x if not y"] * 3, 257)


def test_a_folder_with_other_things_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, _, error = call("no-such-run", "--scheme", "int8", "--out", tmp_path)
    assert (code, "not empty" in error) == (2, True)


def test_a_place_where_nothing_can_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, error = call("no-such-run", "--scheme", "int8", "--out", tmp_path / "file" / "q")
    assert code == 2 and f"nothing can be written into {tmp_path / 'file'}" in error
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as it is for others than root
    code, _, error = call("no-such-run", "--scheme", "int8", "--out", tmp_path / "new" / "q")
    assert code == 2 and f"nothing can be written into {tmp_path};" in error


def test_the_folder_one_stands_in_and_a_link_to_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", tmp_path / "link"):
        code, _, error = call(run, "--scheme", "int8", "--out", out, "--tokens", 3000)
        assert code == 0, error
    assert (tmp_path / "link").is_symlink()
    for name in ("here", "there"):
        assert load_quantized(tmp_path / name).spec == load_trained(run).model.spec


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scheme", "int3"), "scheme 'int3' is not known"),
        (("--scheme", "int4", "--group", "48"), "--group 48 is not one of: 128"),
        (("--scheme", "int8", "--calibration", "nowhere"), "nowhere"),
        (("--scheme", "int8", "--calibration", "nowhere.txt"), "--calibration nowhere.txt: there is no such text"),
        (("--scheme", "int8", "--tokens", "3"), "too few"),
        (("--scheme", "int8", "--suite", "loss"), "--suite loss: the loss on held-out text is measured anyway"),
    ],
)
def test_bad_calls_say_why(run: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    code, _, error = call(run, "--out", tmp_path / "q", *arguments)
    assert code in (1, 2)
    assert said in error
    assert not (tmp_path / "q").exists()
