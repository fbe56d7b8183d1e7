"""`lmworks runs` and `lmworks report`: what a person and a program get."""

import json
import shutil
import sys

import pytest

from lmworks.cli.main import main
from lmworks.record.run_summary import compare_runs, find_runs, list_runs
from lmworks.spec import SpecError


@pytest.fixture
def lmworks(tmp_path, monkeypatch, capsys):
    """Commands through the real `main`, in a folder of their own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["lmworks", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return (end.value.code, *capsys.readouterr())

    return call


def test_listing(make_run, tmp_path):
    make_run("one", end="finish")
    make_run("two", steps=2, end="interrupt")
    make_run("deep", path=tmp_path / "runs" / "sweep" / "deep")
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "one" / "checkpoints" / "not-a-run")
    rows = list_runs(find_runs([tmp_path / "runs"]))
    assert [row["name"] for row in rows] == ["deep", "two", "one"]  # the newest first
    two = rows[1]
    assert (two["steps"], two["total_steps"], two["status"], two["loss"]) == (2, 4, "interrupted", 4.0)


def test_unreadable_run_does_not_hide_others(make_run, tmp_path):
    make_run("good")
    bad = make_run("bad")
    bad.spec_path.write_text("optim = 3")
    rows = {row["name"]: row for row in list_runs(find_runs([tmp_path]))}
    assert rows["good"]["status"] == "finished"
    assert rows["bad"]["status"] == "unreadable"
    assert "optim" in rows["bad"]["error"]


def test_places(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_runs([]) == []
    with pytest.raises(SpecError, match="no runs at nowhere: it does not exist"):
        find_runs([tmp_path.relative_to(tmp_path) / "nowhere"])
    folder = make_run("one")
    assert [run.path.name for run in find_runs([])] == ["one"]
    assert find_runs([folder.path]) == [folder]


def test_comparison(make_run):
    first = make_run("a", data={"seq": 64})
    second = make_run("b", steps=2, seed=7, data={"seq": 128})
    compared = compare_runs([first, second])
    assert compared["differs"] == {"seed": [0, 7], "data.seq": [64, 128]}
    assert [row["loss"] for row in compared["runs"]] == [2.0, 4.0]


def test_commands(make_run, tmp_path, lmworks):
    assert lmworks("runs") == (0, "no runs yet; start one with `lmworks train configs/tiny.toml`\n", "")
    make_run("a")
    make_run("b", seed=7)

    _, listed, _ = lmworks("runs", "--json")
    assert [(row["name"], row["path"], row["steps"]) for row in json.loads(listed)] == [
        ("b", "runs/b", 4),
        ("a", "runs/a", 4),
    ]
    _, shown, _ = lmworks("runs")
    assert "runs/a" in shown
    assert "4/4" in shown

    _, compared, _ = lmworks("runs", "--compare", "a", "runs/b", "--json")
    assert json.loads(compared)["differs"] == {"seed": [0, 7]}
    _, shown, _ = lmworks("runs", "--compare", "a", "b")
    assert "seed" in shown
    assert "optim.steps" not in shown

    assert lmworks("report", "a") == (0, "runs/a/report.html\n", "")
    assert (tmp_path / "runs/a/report.html").exists()


def test_bad_usage(make_run, lmworks):
    make_run("a")
    alone = "lmworks: error: --compare needs at least two runs, e.g. `lmworks runs --compare runs/a runs/b`\n"
    assert lmworks("runs", "--compare", "a") == (2, "", alone)
    missing = "lmworks: error: nothing is not a run folder: it does not exist\n"
    assert lmworks("report", "nothing") == (2, "", missing)


def test_overlay(make_run, tmp_path, lmworks):
    pytest.importorskip("matplotlib")
    make_run("a")
    make_run("b")
    _, said, _ = lmworks("runs", "--plot", "loss.png")
    assert said.endswith("loss curves: loss.png\n")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    code, _, error = lmworks("runs", "--plot", "loss.docx")
    assert code == 2
    assert error == "lmworks: error: --plot loss.docx: name a file that ends in .png, .svg, .pdf\n"


def test_names_are_not_truncated_in_pipes(make_run, tmp_path, lmworks):
    name = "[bold]" + "long-name-" * 12
    make_run("odd", path=tmp_path / "runs" / name)
    _, shown, _ = lmworks("runs")
    assert f"runs/{name} " in shown
