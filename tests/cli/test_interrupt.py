"""Ctrl-C: one line, exit code 130, and what was done by then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from lmworks.cli import generate, main
from lmworks.cli.output import uninterrupted_output, write
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Answer
from lmworks.engine.offline import OfflineEngine

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


def ctrl_c_when_the_first_is_done() -> None:
    """In the step that ends it."""
    step = Engine.step

    def interrupted(self: Engine) -> object:
        pieces = step(self)
        if any(piece.result is not None and not piece.result.error for piece in pieces):
            os.kill(os.getpid(), signal.SIGINT)
        return pieces

    Engine.step = interrupted  # type: ignore[method-assign,assignment]


def again_when_they_are_written() -> None:
    """And a second one when the answers that are done by then are written."""
    ctrl_c_when_the_first_is_done()

    def interrupted(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(text)

    generate.write = interrupted  # type: ignore[assignment]


@pytest.mark.parametrize("first", [ctrl_c_when_the_first_is_done, again_when_they_are_written])
@pytest.mark.parametrize("as_json", [False, True])
def test_answers_that_are_done_are_not_lost(
    as_json: bool, first: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wishes: list[Any] = [[1, 2], {"prompt": [3], "max_tokens": 2}, {"prompt": [4], "stop_token_ids": [-1]}, [5, 6]]
    Path("ids.jsonl").write_text("".join(f"{json.dumps(wish)}\n" for wish in wishes))
    command = (*GENERATE, "--greedy", "--max-tokens", "30")
    whole = Forked(*command, "--json")
    everything = json.loads(whole.communicate()[0])
    process = Forked(*command, *(["--json"] * as_json), first=first)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1:] == ["lmworks: interrupted"]
    if as_json:
        found = json.loads(out)
        assert found[1:3] == everything[1:3]  # the short one, and the one that was refused
        unfinished = {"text": "", "tokens": [], "finish_reason": "cancelled", "error": "interrupted"}
        unfinished |= {"logprobs": None, "prompt_tokens": None, "prompt_logprobs": None, "answers": []}
        assert [found[0], found[3]] == [{"prompt": [1, 2], **unfinished}, {"prompt": [5, 6], **unfinished}]
    else:
        answer = " ".join(map(str, everything[1]["tokens"]))
        assert out.splitlines() == ["── 2 ──", answer, "── 3 ──", f"error: {everything[2]['error']}"]


def while_they_are_put_into_words() -> None:
    told, calls = generate.answer_fields, []

    def interrupted(answer: Answer) -> dict[str, Any]:
        if not calls:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(answer)
        return told(answer)

    generate.answer_fields = interrupted


def while_the_model_is_closed() -> None:
    close = OfflineEngine.close

    def interrupted(self: OfflineEngine) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close(self)

    OfflineEngine.close = interrupted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "first", [ctrl_c_when_the_first_is_done, while_they_are_put_into_words, while_the_model_is_closed]
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["people", "programs"])
def test_nor_are_they_when_all_is_done(
    first: Callable[[], None], options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone answer in the step that ends it, and many while they are told, or the model is closed behind them."""
    monkeypatch.chdir(tmp_path)
    Path("ids.jsonl").write_text("[1, 2]\n" if first is ctrl_c_when_the_first_is_done else "[1, 2]\n[3]\n")
    command = (*GENERATE, "--greedy", "--max-tokens", "4", *options)
    whole = Forked(*command)
    everything = whole.communicate()[0]
    process = Forked(*command, first=first)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "lmworks: interrupted\n")
    assert everything and out == everything


def nobody_reads() -> None:
    """What is done is written into a pipe whose reader is gone."""
    ctrl_c_when_the_first_is_done()
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 1)


def test_a_pipe_whose_reader_is_gone_is_no_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.jsonl").write_text('[1, 2]\n{"prompt": [3], "max_tokens": 2}\n')
    for options in ((), ("--json",)):
        process = Forked(*GENERATE, *options, first=nobody_reads)
        _, err = process.communicate()
        assert (process.returncode, err.splitlines()) == (130, ["lmworks: interrupted"])


def test_last_words_are_not_cut_off() -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        with uninterrupted_output():
            os.kill(os.getpid(), signal.SIGINT)
        assert not signals
        os.kill(os.getpid(), signal.SIGINT)
        assert signals == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("command", [("models", "--json"), GENERATE, (*GENERATE, "--json")], ids=" ".join)
def test_a_full_disk_is_said_in_one_line(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    monkeypatch.chdir(tmp_path)
    Path("ids.jsonl").write_text("[1, 2]\n[3]\n")
    process = Forked(*command, first=full)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err == "lmworks: error: the result could not be written: No space left on device\n"


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
        "from lmworks.engine.core.engine import Engine\n"
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


def again_when_it_is_said() -> None:
    """Ctrl-C when the command has said how it ended, and tells those who wait for it."""
    main.write_error_file = lambda error, reported: os.kill(os.getpid(), signal.SIGINT)


def test_another_one_during_the_last_words_is_no_other_end() -> None:
    process = Forked("generate", "no-such-model", "--prompt", "a", first=again_when_it_is_said)
    _, err = process.communicate()
    assert process.returncode == 130
    assert len(err.splitlines()) == 1 and "no-such-model" in err, err


def as_it_is_no_longer_handled() -> None:
    """Ctrl-C at the very call after which the kernel would handle it again, when all is said."""
    change, calls = signal.signal, []

    def late(*arguments: Any) -> Any:
        calls.append(arguments)
        if (
            arguments == (signal.SIGINT, signal.SIG_DFL) and calls.count(arguments) == 3
        ):  # before, while the command is loaded, after
            os.kill(os.getpid(), signal.SIGINT)
        return change(*arguments)

    signal.signal = late


def test_nor_is_one_at_the_very_end() -> None:
    process = Forked("models", "--json", first=as_it_is_no_longer_handled)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    assert json.loads(out)


def as_it_is_handled_again() -> None:
    """Ctrl-C at the very call that hands it to the command, which has not begun."""
    change = signal.signal

    def early(*arguments: Any) -> Any:
        before = change(*arguments)
        if arguments == (signal.SIGINT, signal.default_int_handler):
            os.kill(os.getpid(), signal.SIGINT)
        return before

    signal.signal = early


def test_nor_at_the_very_beginning() -> None:
    process = Forked("models", "--json", first=as_it_is_handled_again)
    assert process.communicate() == ("", "")
    assert process.returncode == 130


WHILE_IT_LOADS = """
class Loading:
    def find_spec(self, name, path, target=None):
        if name == "lmworks.cli.plan_lookup":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Loading())
"""
WHEN_ALL_IS_SAID = "atexit.register(os.kill, os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("moment", [WHILE_IT_LOADS, WHEN_ALL_IS_SAID], ids=["loading", "ending"])
@pytest.mark.parametrize("background", [False, True])
def test_where_nothing_is_to_be_finished_it_ends_without_a_word(moment: str, background: bool) -> None:
    """A job in the background of a shell, where Ctrl-C is ignored, goes on."""
    script = f"import atexit, os, signal, sys\n{moment}\nfrom lmworks.__main__ import command\ncommand()"
    run = subprocess.run(
        [sys.executable, "-c", script, "models", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.SIG_DFL) and None,
    )
    assert run.stderr == ""
    assert run.returncode == (0 if background else -signal.SIGINT)
    assert bool(run.stdout) == (background or moment == WHEN_ALL_IS_SAID)
