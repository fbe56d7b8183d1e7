"""The progress line: live in a terminal, plain elsewhere, silent when asked, and cheap."""

import io
import time
from types import SimpleNamespace

import pytest

from lmworks.train import progress as progress_module
from lmworks.train.progress import WINDOW, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    return Terminal()


def line(step, **more):
    return {"step": step, "loss": 4.25, "lr": 3e-4, "tokens_per_s": 12_345.0, **more}


def test_plain_lines_every_so_many_steps(capsys):
    with Progress(total=10, every=4) as progress:
        for step in range(1, 11):
            progress.step(line(step, val_loss=5.5) if step == 5 else line(step))
    printed = capsys.readouterr().out
    rows = printed.splitlines()
    assert [row[:10] for row in rows] == ["step  4/10", "step  5/10", "step  8/10", "step 10/10"]
    assert rows[0] == "step  4/10  loss 4.2500  lr 3.00e-04  12.3k tokens/s  ETA 0:00"
    assert "val" not in rows[0]
    assert all("val 5.5000" in row for row in rows[1:])
    assert all(character.isprintable() or character == "\n" for character in printed)


def test_the_evaluation_of_an_online_method_is_a_reward(capsys):
    with Progress(total=1) as progress:
        progress.step({**line(1, val_loss=-0.75), "val_reward/mean": 0.75})
    assert "loss 4.2500  val reward 0.7500  lr" in capsys.readouterr().out


def test_dumb_terminal_prints_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Progress(total=1, stream=terminal) as progress:
        progress.step(line(1))
    assert terminal.getvalue().startswith("step 1/1  loss 4.2500")
    assert "\x1b" not in terminal.getvalue()


def test_terminal_has_one_live_line(terminal):
    with Progress(total=3, start=1, stream=terminal) as progress:
        progress.step(line(2))
        progress.note("saved [bold]step-000002")
        progress.step(line(3, val_loss=5.5))
    shown = terminal.getvalue()
    assert "\x1b[2K" in shown
    assert "saved [bold]step-000002\n" in shown
    assert "step 3/3" in shown
    assert "val 5.5000" in shown.rsplit("step 3/3", 1)[1]
    assert shown.endswith("\x1b[?25h")  # the cursor is back


def test_quiet_prints_nothing(terminal, capsys):
    with Progress(total=1, quiet=True, stream=terminal) as progress:
        progress.step(line(1))
        progress.note("saved")
    assert terminal.getvalue() == capsys.readouterr().out == ""


def test_missing_loss(capsys):
    with Progress(total=1) as progress:
        progress.step({"step": 1, "loss": None})
    assert capsys.readouterr().out.startswith("step 1/1  loss -  ETA")


def test_eta_uses_recent_pace(monkeypatch):
    clock_now = [100.0]
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=lambda: clock_now[0]))
    progress = Progress(total=1000, quiet=True)
    clock_now[0] += 60  # a slow first step: compilation
    progress.step(line(1))
    for step in range(2, 2 + WINDOW):
        clock_now[0] += 0.5
        progress.step(line(step))
    assert progress.pace() == pytest.approx(0.5)


def test_a_step_costs_less_than_a_millisecond(terminal):
    with Progress(total=10_000, stream=terminal) as progress:
        began = time.process_time()  # of this process: others may take the processor meanwhile
        for step in range(1, 1001):
            progress.step(line(step))
        assert time.process_time() - began < 1.0
