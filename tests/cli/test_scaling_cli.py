"""`lmworks scaling fit`: stable keys, every method, files it writes, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.spec import SpecError

DATA = Path(__file__).parents[2] / "validation" / "scaling"
CHINCHILLA = str(DATA / "chinchilla_points.csv")
GADRE = (str(DATA / "gadre_runs.csv"), "--target", "eval_data_c4_val", "--where", "train_set=rpj")


def fit(*words: str) -> str:
    result = CliRunner().invoke(app, ["scaling", "fit", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def found(*words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(fit(*words, "--json"))
    return answer


@pytest.mark.parametrize("law", ["chinchilla", "tied", "kaplan", "compute", "isoflop"])
def test_keys_that_programs_read(law: str) -> None:
    answer = found(CHINCHILLA, "--law", law, "--replicates", "20")
    assert {"method", "params", "interval", "optimum", "holdout_error", "warnings"} <= answer.keys()
    assert answer["method"] == law
    assert answer["interval"].keys() == answer["params"].keys()
    assert all(low <= high for low, high in answer["interval"].values())


def test_the_page_of_a_fit(tmp_path: Path) -> None:
    plot, law = tmp_path / "fit.svg", tmp_path / "law.json"
    words = ("--drop", "5", "--flops", "5.76e23", "--replicates", "40", "--predict", "n=7e10,d=1.4e12")
    text = fit(CHINCHILLA, *words, "--plot", str(plot), "--out", str(law))
    assert "tokens a parameter       17.9" in text
    assert "predicted loss at n = 7e+10, d = 1.4e+12" in text
    assert "warning: the optimum lies far outside the data: 5.76e+23 FLOPs" in text
    assert plot.read_text().startswith("<?xml")
    assert json.loads(law.read_text())["params"]["E"] == pytest.approx(1.817, abs=1e-3)


def test_a_metric_of_the_loss_and_a_prediction() -> None:
    words = ("--law", "tied", "--replicates", "20", "--score", "val_tok_mult_paloma_c4_en")
    answer = found(*GADRE, *words, "--predict", "n=6.9e9,flops=5.7e21")
    assert answer["downstream"]["params"].keys() == {"epsilon", "k", "gamma"}
    [one] = answer["predictions"]
    assert one["d"] == pytest.approx(5.7e21 / 6 / 6.9e9)
    # C4 by another tokenisation of the same text: the metric lies near the loss
    assert one["val_tok_mult_paloma_c4_en"]["value"] == pytest.approx(one["loss"], rel=0.02)
    assert one["run_interval"][0] < one["interval"][0] < one["loss"] < one["interval"][1]


@pytest.mark.parametrize("law", ["isoflop", "compute"])
def test_other_plots(law: str, tmp_path: Path) -> None:
    fit(CHINCHILLA, "--law", law, "--replicates", "10", "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_and_its_spec(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    words = ["scaling", "recommend", "chinchilla", "--flops", "3e18", "--cluster", "1xh100"]
    ended = CliRunner().invoke(app, [*words, "--out", str(spec), "--json"], catch_exceptions=False)
    answer = json.loads(ended.stdout)
    keys = {"n", "d", "shape", "seq", "global_batch", "lr", "layout", "loss", "interval", "days", "dollars"}
    assert keys | {"memory_bytes", "warnings", "flops"} <= answer.keys()
    planned = CliRunner().invoke(app, ["plan", "run", str(spec), "--json"], catch_exceptions=False)
    plan = json.loads(planned.stdout)
    assert plan["fits"] and plan["params"] == answer["n"]
    text = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "predicted loss" in text and "Step Law" in text


def test_runs_are_fitted_before_a_recommendation(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    rows = [(n, m * n, 1.8 + 480 / n**0.35 + 2100 / (m * n) ** 0.37) for n in (1e7, 3e7, 1e8) for m in (5, 20, 80)]
    lines = [f"{n},{d},{loss},{0.9 - 0.1 * loss}" for n, d, loss in rows]
    runs.write_text("\n".join(["n,d,loss,accuracy", *lines]))
    words = ["scaling", "recommend", str(runs), "--flops", "1e18", "--cluster", "1xh100"]
    scored = [*words, "--score", "accuracy", "--json"]
    answer = json.loads(CliRunner().invoke(app, scored, catch_exceptions=False).stdout)
    assert answer["law"]["params"]["E"] == pytest.approx(1.8, rel=1e-2)
    assert answer["scores"]["accuracy"]["value"] == pytest.approx(0.9 - 0.1 * answer["loss"], abs=5e-3)
    with pytest.raises(SpecError, match="is a law already"):
        CliRunner().invoke(app, [*words[:2], "chinchilla", "--law", "tied"], catch_exceptions=False)


def test_a_ladder_of_the_examples_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the spec beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lmworks.cli.scaling_run.train_tokens", lambda spec: 10**9)
    words = ["scaling", "run", "configs/scaling/cpu-ladder.toml", "--dry-run", "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0 and len(json.loads(result.stdout)["runs"]) > 3
    with pytest.raises(SpecError, match=r"no ladder at cpu-ladder\.toml: .* did you mean 'configs/scaling/cpu-ladder"):
        CliRunner().invoke(app, ["scaling", "run", "cpu-ladder.toml", "--dry-run"], catch_exceptions=False)


def test_same_seed_same_intervals() -> None:
    words = (CHINCHILLA, "--replicates", "10")
    assert found(*words)["interval"] == found(*words)["interval"] != found(*words, "--seed", "1")["interval"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.csv"], "nowhere.csv: there is no such file"),
        ([CHINCHILLA, "--law", "chinchila"], "--law chinchila is not known; did you mean 'chinchilla'"),
        ([CHINCHILLA, "--law", "isoflops"], "--law isoflops is not known; did you mean 'isoflop'"),
        ([CHINCHILLA, "--law", "context"], "--law context needs a column `seq`"),
        ([CHINCHILLA, "--law", "lr"], "--law lr needs a column `lr`"),
        ([CHINCHILLA, "--target", "los"], "no column 'los'; did you mean 'loss'"),
        ([CHINCHILLA, "--where", "n"], "--where n: write COLUMN=VALUE"),
        ([CHINCHILLA, "--where", "n<0"], "no row has n<0"),
        ([CHINCHILLA, "--predict", "m=3"], "--predict m=3: write n="),
        ([CHINCHILLA, "--predict", "n=1e9"], "--law chinchilla also needs d="),
        ([CHINCHILLA, "--params", "no-embed"], "needs a column `n_no_embed`"),
        ([CHINCHILLA, "--law", "isoflop", "--score", "x"], "--score needs a law of the loss"),
        ([CHINCHILLA, "--delta", "0"], "--delta 0 must be more than 0"),
        ([CHINCHILLA, "--plot", "x.txt"], "name a file that ends in"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as error:
        CliRunner().invoke(app, ["scaling", "fit", *words], catch_exceptions=False)
    assert "\n" not in str(error.value)
