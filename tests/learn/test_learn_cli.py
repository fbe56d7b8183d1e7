"""The loop of `lmworks learn` as a learner types it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.learn import effect, progress
from lmworks.learn.exercise import FOLDER, Exercises, exercises
from lmworks.learn.progress import Progress
from lmworks.learn.status import next_exercise
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import LMWorksError, SpecError

SOLVED = "half = x.shape[-1] // 2\n    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)"


def learn(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["learn", *words])
    if isinstance(result.exception, LMWorksError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    learn("init", str(tmp_path / "course"))
    monkeypatch.chdir(tmp_path / "course")
    monkeypatch.setattr(effect, "show_effect", lambda *_: ["in the real trainer"])
    return tmp_path / "course"


def answer(workspace: Path, exercise: str, body: str) -> None:
    """In the learner's editor."""
    file = workspace / "src" / "models" / "gpt.py"
    lines = file.read_text().splitlines()
    (at,) = [number for number, line in enumerate(lines) if f'unfinished("{exercise}"' in line]
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + body
    file.write_text("\n".join(lines) + "\n")


def test_from_the_first_look_to_a_pass(workspace: Path) -> None:
    said = learn()
    assert (
        f"0 of 15 exercises pass, 0 of {len(exercises()) - 15} further ones." in said
        and "Next: 1. RMSNorm.forward" in said
        and "src/models/gpt.py:" in said
    )
    assert "not written yet" in learn("check", code=1)
    assert "hint 1 of 3" in learn("hint", "2") and "hint 2 of 3" in learn("hint", "rotate_half")
    answer(workspace, "rotate_half", "return x")
    said = learn("check", "2", code=1)
    assert "case      [1, 2, 3, 4]" in said and "expected  float32 (4,): [-3, -4, 1, 2]" in said
    file = workspace / "src" / "models" / "gpt.py"
    file.write_text(file.read_text().replace("    return x\n", f"    {SOLVED}\n"))
    said = learn("check", "rotate_half")
    assert said.startswith("✓ 2. rotate_half passes") and "in the real trainer" in said and "Next: 1." in said
    rows = {row["id"]: row for row in json.loads(learn("progress", "--json"))}
    assert rows["rotate_half"]["state"] == "passed" and rows["rotate_half"]["tries"] == 2
    assert rows["rotate_half"]["hints"] == 2 and rows["rmsnorm"] == {
        "id": "rmsnorm", "state": "to do", "tries": 0, "hints": 0, "passed": "", "gave_up": False,
    }  # fmt: skip
    further = {"passed": [], "of": len(exercises()) - 15}
    assert json.loads(learn("--json")) == {"passed": ["rotate_half"], "of": 15, "further": further, "next": "rmsnorm"}
    rows = {row["id"]: row for row in json.loads(learn("list", "--json"))}
    assert (rows["rotate_half"]["topic"], rows["zero2"]["topic"]) == ("Model fundamentals", "Communication")
    assert [line for line in learn("list").splitlines() if "xercises" in line] == ["Exercises", "Further exercises"]


@pytest.mark.parametrize(
    ("passed", "following"),
    [((), 1), ((2,), 1), ((1, 2), 3), ((17,), 18), ((18, 17), 19), ((59,), 1), ((17, 3), 1)],
)
def test_what_is_next(workspace: Path, passed: tuple[int, ...], following: int) -> None:
    """In the guide's order; among the further ones after the one that passed last."""
    progress = Progress.load(workspace)
    for second, number in enumerate(passed):
        progress.of(list(exercises())[number - 1]).passed = f"2026-01-01T00:00:0{second}+00:00"
    upcoming = next_exercise(progress)
    assert upcoming is not None and upcoming.number == following


def test_the_first_look_loads_little(workspace: Path) -> None:
    """Neither PyTorch, nor tables, nor Pydantic, which Typer imports to convert an option's None."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lmworks", "learn"], cwd=workspace, capture_output=True, text=True
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "typer" in loaded
    assert not loaded & {"torch", "numpy", "rich", "pydantic"}


def test_the_file_of_one_exercise_is_read() -> None:
    found = Exercises(list(FOLDER.glob("*.toml")))
    assert found["rotate_half"].number == 2 and list(found.read) == ["rotate_half"]
    assert list(found)[:3] == ["rmsnorm", "rotate_half", "rotary"] and [one.number for one in found.values()] == sorted(
        one.number for one in found.values()
    )


def test_solution_and_reset_keep_what_was_there(workspace: Path) -> None:
    file = workspace / "src" / "models" / "gpt.py"
    first = file.read_text()
    assert "+    x1, x2 = x[..., :half], x[..., half:]" in learn("solution", "rotate_half")
    assert file.read_text() == first
    kept = Path(learn("solution", "rotate_half", "--apply").rstrip().rpartition(" ")[2])
    assert kept.read_text() == first and "x1, x2" in file.read_text()
    assert "gave up, then passed" not in learn("progress") and "gave up" in learn("progress")
    learn("reset", "rotate_half")
    assert file.read_text() == first
    file.unlink()
    with pytest.raises(SpecError, match=r"gpt\.py is gone; `lmworks learn reset src/models/gpt\.py` writes"):
        learn("check", "rmsnorm")
    learn("reset", "src/models/gpt.py")
    assert file.read_text() == first


def test_errors_say_what_would_work(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"no exercise 'rotatehalf'; did you mean 'rotate_half'\?"):
        learn("check", "rotatehalf")
    with pytest.raises(SpecError, match="is a workspace already"):
        learn("init", ".")
    with pytest.raises(SpecError, match="--answer 9: the choices are 1 to 3"):
        learn("quiz", "rmsnorm", "--answer", "1", "--answer", "9")
    with pytest.raises(SpecError, match="--answer: 2 questions, 1 answers"):
        learn("quiz", "rmsnorm", "--answer", "1")
    file = workspace / "src" / "models" / "gpt.py"
    file.write_text(file.read_text().replace("# exercise rmsnorm", "# rmsnorm"))
    with pytest.raises(
        SpecError, match=r"the marks of exercise rmsnorm are gone; `lmworks learn reset src/models/gpt\.py`"
    ):
        learn("check", "rmsnorm")
    for text, reason in {
        '{"exercises": 7}': "it needs tables `exercises` and `answers`",
        '{"exercises": {"rmsnorm": 5}, "answers": {}}': "it needs tables `exercises` and `answers`",
        "[": "Expecting value",
    }.items():
        (workspace / ".learn" / "progress.json").write_text(text)
        with pytest.raises(SpecError, match=rf"progress\.json is not a progress file \({reason}"):
            learn()
    monkeypatch.chdir(workspace.parent)
    with pytest.raises(SpecError, match="is in no workspace; `lmworks learn init DIR`"):
        learn()


def test_files_that_cannot_be_used_are_one_line(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = workspace / "src" / "models" / "gpt.py"
    file.rename(workspace / "mine.py")
    file.mkdir()
    with pytest.raises(
        LMWorksError, match=r"gpt\.py: Is a directory; a folder stands where a file belongs; move it away"
    ):
        learn("check", "rmsnorm")
    file.rmdir()
    (workspace / "mine.py").rename(file)
    answer(workspace, "rmsnorm", "return x")
    (workspace / ".learn" / "kept").write_text("")
    with pytest.raises(
        LMWorksError, match=r"kept.*: a file stands where a folder belongs|Not a directory; a file stands"
    ):
        learn("reset", "rmsnorm")
    assert "return x" in file.read_text()

    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(progress, "write_whole", full)
    with pytest.raises(
        LMWorksError, match=r"progress\.json: progress is not written: No space left on device; free some space"
    ):
        learn("hint", "rmsnorm")
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_, **__: full(Path("/tmp/x"), ""))
    with pytest.raises(LMWorksError, match=r"/tmp/x: No space left on device; free some space on that disk"):
        learn("check", "rmsnorm")


def test_quiz(workspace: Path) -> None:
    question = exercises()["rmsnorm"].quiz[0]
    assert question.question in learn("quiz", "rmsnorm")
    said = learn("quiz", "rmsnorm", "--answer", "2", "--answer", "3")
    assert "   right. " in said and "   no: 1. " in said
    table = json.loads((workspace / ".learn" / "progress.json").read_text())
    assert table["answers"] == {"rmsnorm/0": True, "rmsnorm/1": False}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_nothing(workspace: Path, tmp_path: Path, number: int) -> None:
    answer(workspace, "rotate_half", "return endless()")
    file = workspace / "src" / "models" / "gpt.py"
    endless = "\ndef endless():\n    import os, time\n    print(os.getpid(), flush=True)\n    while True: pass\n"
    file.write_text(file.read_text() + endless)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmworks", "learn", "check", "rotate_half"], cwd=workspace,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("lmworks-learn-*/workspace/output.txt"))) or not found[0].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    runner = int(found[0].read_text())
    process.send_signal(number)
    process.wait(20)
    while os.path.exists(f"/proc/{runner}") or list(tmp_path.glob("lmworks-learn-*/workspace")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_processes_write_one_progress(workspace: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lmworks.learn.progress import change_progress\n"
        "for _ in range(50):\n    with change_progress(Path()) as progress:\n"
        "        progress.of(sys.argv[1]).tries += 1\n        progress.of('both').tries += 1\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, name], cwd=workspace) for name in ("one", "two")]
    assert [process.wait(60) for process in processes] == [0, 0]
    table = json.loads((workspace / ".learn" / "progress.json").read_text())
    assert {name: one["tries"] for name, one in table["exercises"].items()} == {"one": 50, "two": 50, "both": 100}


@pytest.mark.slow
def test_watch_says_it_within_two_seconds_of_a_save(workspace: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lmworks", "learn", "watch"], stdout=subprocess.PIPE, text=True, cwd=workspace,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("Watching"):
                break
        answer(workspace, "rotate_half", "return x")
        first = next(line for line in process.stdout if line[0] in "✗✓")  # warms the checks up, too
        assert first.startswith("✗ 2. rotate_half"), first
        file = workspace / "src" / "models" / "gpt.py"
        file.write_text(file.read_text().replace("    return x\n", f"    {SOLVED}\n"))
        began = time.monotonic()
        line = next(line for line in process.stdout if line.startswith("✓"))
        assert "rotate_half passes" in line and time.monotonic() - began < 2
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()


COMMANDS = {
    "model": [sys.executable, "src/models/gpt.py"],
    "ddp": [sys.executable, "src/training/ddp_trainer.py", "--model_size", "small", "--max_steps", "50"],
    "fsdp": [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "src/training/fsdp_trainer.py",
        "--model_size", "medium", "--max_steps", "50",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", COMMANDS)
def test_the_programs_of_a_workspace_run(workspace: Path, which: str) -> None:
    """As the guide has them, with nothing written yet."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(COMMANDS[which], cwd=workspace, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    if which == "model":
        assert "logits: (1, 64, 50257)" in done.stdout and "loss: 10." in done.stdout
        return
    run = workspace / "runs" / {"ddp": "ddp-small-1", "fsdp": "fsdp-medium-2"}[which]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 51))
    first, last = (statistics.mean(line["loss"] for line in part) for part in (lines[:10], lines[-10:]))
    assert last < first - 0.3 and (run / "checkpoint.pt").exists()  # of one sequence a step: single losses are noisy
    assert "no GPU: " in done.stdout


def test_a_workspace_of_an_older_version_gets_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reset` of one file also writes those that the course did not have then."""
    workspace = Workspace.create(tmp_path / "course")
    monkeypatch.chdir(workspace.folder)
    kernels = workspace.folder / "src" / "kernels"
    files = {path.name: path.read_text() for path in kernels.glob("*.py")}
    assert {"add.py", "device.py"} <= {*files}
    shutil.rmtree(kernels)
    learn("reset", "src/kernels/add.py")
    assert {path.name: path.read_text() for path in kernels.glob("*.py")} == files
    (kernels / "device.py").write_text("mine\n")
    learn("reset", "src/kernels/device.py")
    assert (kernels / "device.py").read_text() == files["device.py"]
