"""The page's process for checks: PyTorch is loaded once, and a verdict comes soon after it is asked for.

A line of JSON in, a line out: {"kind": "check" or "effect", "exercise": ID}. It ends with the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ...record.parent_death import die_with_parent, until_this_process_ends
from ...spec.errors import LMWorksError
from ..exercise import find_exercise
from ..workspace import Workspace

END_S = 10.0  # that it has to clean up


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    workspace = Workspace(Path(sys.argv[1]))
    importlib.import_module("torch")
    for line in sys.stdin:
        try:
            answer = answered(workspace, **json.loads(line))
        except (LMWorksError, OSError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")


def answered(workspace: Workspace, kind: str, exercise: str) -> dict[str, Any]:
    from ..effect import show_effect
    from .check import check_exercise

    asked = find_exercise(exercise)
    if kind == "effect":
        return {"lines": show_effect(workspace, asked)}
    return check_exercise(workspace, asked).as_json()


class CheckWorker:
    """From the process that shows the page. Asked one at a time, from any thread."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """By a thread that lives as long as the worker is to."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.workspace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **until_this_process_ends()},
        )  # fmt: skip

    def ask(self, kind: str, exercise: str) -> dict[str, Any]:
        with self.lock:
            stdin, stdout = self.process.stdin, self.process.stdout
            assert stdin and stdout
            try:
                stdin.write(json.dumps({"kind": kind, "exercise": exercise}) + "\n")
                stdin.flush()
                line = stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise LMWorksError("the process of checks has ended; it starts anew, so try again")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LMWorksError(answer["error"])
        return answer

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    main()
