"""What a terminal shows while a command loads, builds and trains; a pseudo-terminal of the kernel, as `script` has."""

from __future__ import annotations

import json
import os
import pty
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forked import Forked
from lmworks.data import progress
from lmworks.data.progress import Activity
from tiny import make_spec, train, write_spec
from typed import lmworks


def on_terminal(*arguments: str | Path, stdout: bool = True) -> tuple[int | None, str, str]:
    """Exit code, what the terminal got, and standard output where that is none."""
    terminal, end = pty.openpty()

    def attach() -> None:
        for descriptor in (1, 2) if stdout else (2,):
            os.dup2(end, descriptor)
        os.environ.update(TERM="xterm-256color", COLUMNS="140")

    got: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # so Linux says that nobody has the other end any more
            while piece := os.read(terminal, 65536):
                got.append(piece)

    process = Forked(*arguments, first=attach)
    os.close(end)
    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(120)
    reader.join(60)
    os.close(terminal)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(got).decode()), out


def test_train_says_what_it_does_and_others_what_they_load(dataset: Path, tmp_path: Path) -> None:
    spec = write_spec(make_spec(dataset, "optim.steps=3"), tmp_path / "spec.toml")
    run = tmp_path / "run"
    code, shown, _ = on_terminal("train", spec, "--run-dir", run)
    assert code == 0, shown
    assert re.search(r"building [\d,]+ parameters on CPU", shown)
    assert re.search(r"[\d,]+ parameters on CPU \(1 rank, fp32\), 3 steps of [\d,]+ tokens", shown)
    assert f"run folder: {run}" in shown.replace("\r\n", "") and re.search(r"step 3/3.*ETA 0:00", shown)
    code, shown, out = on_terminal("generate", run, "--prompt", "def", "--max-tokens", "2", "--json", stdout=False)
    assert code == 0 and len(json.loads(out)) == 1  # nothing but the result
    assert re.search(rf"loading {run}: [\d,]+ parameters, newest checkpoint", shown)
    code, shown, out = on_terminal("eval", run, "--json", stdout=False)
    assert code == 0 and json.loads(out)["step"] == 3
    assert f"loading {run}: " in shown and "measuring the loss on held-out data" in shown


@pytest.mark.slow
def test_bench_says_what_it_does(dataset: Path, tmp_path: Path) -> None:
    spec = write_spec(make_spec(dataset, "optim.steps=3"), tmp_path / "spec.toml")
    code, shown, out = on_terminal("bench", "train", spec, "--steps", "1", "--json", stdout=False)
    assert code == 0 and json.loads(out)["steps"] == 1
    assert re.search(r"preparing .*: [\d,]+ parameters", shown) and "timing: 2 of 2" in shown


def test_quantize_asks_before_it_loads(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_spec(dataset), tmp_path / "run")
    (tmp_path / "short.txt").write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("lmworks.train.load_run.load_trained", refuse)
    for text in (tmp_path / "nowhere.txt", tmp_path / "short.txt"):
        asked = ("--scheme", "int8", "--out", str(tmp_path / "q"), "--calibration", str(text))
        code, _, err = lmworks(capsys, "quantize", str(tmp_path / "run"), *asked)
        assert code in (1, 2) and err.startswith("lmworks: error: ") and err.count("\n") == 1
    with pytest.raises(AssertionError, match="weights were loaded"):
        lmworks(capsys, "quantize", str(tmp_path / "run"), "--scheme", "int8", "--out", str(tmp_path / "q"))


class Terminal:
    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def wait_for(stream: Terminal, text: str) -> None:
    limit = time.monotonic() + 30
    while text not in stream.text and time.monotonic() < limit:
        time.sleep(0.01)
    assert text in stream.text


def test_a_terminal_sees_the_clock_of_a_silent_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "TICK_S", 0.05)
    stream = Terminal(True)
    shown = Activity(stream)  # type: ignore[arg-type]
    shown("loading x")
    assert stream.text.endswith("loading x … 0 s")
    wait_for(stream, "loading x … 1 s")
    shown("warm-up", 1, 3)
    assert "\x1b[2Kloading x: 1." in stream.text and stream.text.endswith("warm-up: 1 of 3 … 0 s")
    shown.close()
    assert stream.text.endswith(" s\n")


def test_a_log_gets_a_line_only_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(False)
    shown = Activity(stream)  # type: ignore[arg-type]
    shown("loading x")
    shown.close()
    assert stream.text == ""
    monkeypatch.setattr(progress, "FIRST_S", 0.05)
    shown = Activity(stream)  # type: ignore[arg-type]
    shown("loading y")
    wait_for(stream, "loading y … 0 s so far\n")
    shown.close()
    assert stream.text.splitlines()[1].startswith("loading y: ") and "\x1b" not in stream.text
