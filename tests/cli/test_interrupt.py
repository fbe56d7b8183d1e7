"""Ctrl-C: one line, exit code 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Forked
from lmworks.engine.engine import Engine

BENCH = ("bench", "offline", "--model", "tiny", "--requests", "2")
GENERATE = ("generate", "tiny", "--prompts", "ids.jsonl")


def ctrl_c() -> None:
    """In the engine's first step. Called in the forked process, and changes that one alone."""
    step = Engine.step

    def interrupted(self: Engine) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    Engine.step = interrupted  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("command", [GENERATE, BENCH], ids=lambda command: command[0])
def test_it_is_said(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.jsonl").write_text("[1, 2]\n")
    process = Forked(*command, first=ctrl_c)
    _, err = process.communicate()
    assert err.splitlines()[-1:] == ["lmworks: interrupted"]
    assert process.returncode == 130
    assert "Traceback" not in err


def on_another_rank() -> None:
    os.environ["RANK"] = "1"
    ctrl_c()


def test_the_first_rank_says_it() -> None:
    process = Forked(*BENCH, first=on_another_rank)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == ""


def test_nobody_is_left_to_read_it() -> None:
    """As in `… 2>&1 | tee log`, where a terminal interrupts both."""
    script = (
        "import os, signal, sys\n"
        "from lmworks.engine.engine import Engine\n"
        "reads, writes = os.pipe()\n"
        "os.close(reads)\n"
        "step = Engine.step\n"
        "def interrupted(engine):\n"
        "    os.dup2(writes, 2), os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(engine)\n"
        "Engine.step = interrupted\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from lmworks.cli.main import main\nmain()"
    )
    assert subprocess.run([sys.executable, "-c", script, *BENCH], timeout=60).returncode == 130
