"""`lmworks runs` and `lmworks report`: what a person and a program get."""

import json
import shutil
import subprocess
import sys

import pytest

from lmworks.observe.runs import compare_runs, find_runs, list_runs
from lmworks.spec import SpecError


def lmworks(*words, cwd):
    """The commands of this room through the real `main`, exit codes included."""
    return subprocess.run(
        [sys.executable, "-m", "lmworks", *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_listing(make_run, tmp_path):
    make_run("one", end="finish")
    make_run("two", steps=2, end="interrupt")
    make_run("deep", path=tmp_path / "runs" / "sweep" / "deep")
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "one" / "checkpoints" / "not-a-run")
    rows = list_runs(find_runs([tmp_path / "runs"]))
    assert [row["name"] for row in rows] == ["deep", "two", "one"]  # the newest first
    two = rows[1]
    assert (two["steps"], two["total_steps"], two["status"], two["loss"]) == (2, 4, "interrupted", 4.0)


def test_a_run_that_cannot_be_read_hides_no_other(make_run, tmp_path):
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


def test_commands(make_run, tmp_path):
    empty = lmworks("runs", cwd=tmp_path)
    assert (empty.returncode, empty.stdout) == (0, "no runs yet; start one with `lmworks train configs/tiny.toml`\n")
    make_run("a")
    make_run("b", seed=7)

    listed = json.loads(lmworks("runs", "--json", cwd=tmp_path).stdout)
    assert [(row["name"], row["path"], row["steps"]) for row in listed] == [("b", "runs/b", 4), ("a", "runs/a", 4)]
    shown = lmworks("runs", cwd=tmp_path).stdout
    assert "runs/a" in shown
    assert "4/4" in shown

    both = lmworks("runs", "--compare", "a", "runs/b", "--json", cwd=tmp_path)
    assert json.loads(both.stdout)["differs"] == {"seed": [0, 7]}
    assert "seed" in lmworks("runs", "--compare", "a", "b", cwd=tmp_path).stdout

    written = lmworks("report", "a", cwd=tmp_path)
    assert (written.returncode, written.stdout) == (0, "runs/a/report.html\n")
    assert (tmp_path / "runs/a/report.html").exists()


def test_bad_usage(make_run, tmp_path):
    make_run("a")
    alone = lmworks("runs", "--compare", "a", cwd=tmp_path)
    assert alone.returncode == 2
    assert alone.stderr == (
        "lmworks: error: --compare needs at least two runs, e.g. `lmworks runs --compare runs/a runs/b`\n"
    )
    missing = lmworks("report", "nothing", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (
        2,
        "lmworks: error: nothing is not a run folder: it does not exist\n",
    )


def test_overlay(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    make_run("a")
    make_run("b")
    drawn = lmworks("runs", "--plot", "loss.png", cwd=tmp_path)
    assert drawn.stdout.endswith("loss curves: loss.png\n")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    refused = lmworks("runs", "--plot", "loss.docx", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("lmworks: error: cannot write loss.docx: Format 'docx' is not supported")


def test_a_pipe_gets_whole_names(make_run, tmp_path):
    name = "[bold]" + "long-name-" * 12
    make_run("odd", path=tmp_path / "runs" / name)
    assert f"runs/{name} " in lmworks("runs", cwd=tmp_path).stdout
