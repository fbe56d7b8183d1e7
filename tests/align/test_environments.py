"""The environments that ship: what they answer to turns, what they reward, and that hostile code harms nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmworks.align.environments import Environment, Turn, load_environment
from lmworks.align.environments.sandboxed import shown
from lmworks.align.environments.tool_calls import assistant_message, read_turn
from lmworks.align.parallel_calls import call_all
from lmworks.sandbox import SandboxResult
from lmworks.spec import DataError, SpecError


def begin(name: str, **columns: Any) -> Environment:
    environment = load_environment(name)[1]()
    environment.reset({"prompt": "Go.", **columns})
    return environment


def call(name: str, **arguments: str) -> Turn:
    return read_turn(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


# --- reading turns ------------------------------------------------------------------------------------------


def test_tool_calls_are_read() -> None:
    turn = read_turn('Well.\n<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call> and '
                     '<tool_call>{"name": "g", "arguments": "{\\"y\\": 2}"}')  # fmt: skip
    assert [(one.name, one.arguments) for one in turn.tool_calls] == [("f", {"x": "1"}), ("g", {"y": 2})]
    assert turn.text == "Well.\n and " and not turn.malformed
    message = assistant_message(turn)
    assert message["tool_calls"][0] == {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    assert assistant_message(read_turn("Hi")) == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    "inner", ["{", "[]", '{"arguments": {}}', '{"name": 3}', '{"name": "f", "arguments": 7}', "[" * 9999]
)
def test_what_is_no_call_is_malformed(inner: str) -> None:
    turn = read_turn(f"<tool_call>{inner}</tool_call>")
    assert turn.malformed and not turn.tool_calls


# --- python -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["```python\nprint(6 * 7)\n```", "So:\n```\nprint(6 * 7)\n```\n"])
def test_code_in_a_block_is_run(text: str) -> None:
    step = begin("python", answer="42").step(read_turn(text))
    assert step.observation == "42" and step.reward is None and not step.done


def test_code_in_a_call_is_run_and_the_answer_is_checked() -> None:
    environment = begin("python", answer="42")
    step = environment.step(call("python", code="print(6 * 7)"))
    assert (step.observation, step.reward, step.done) == ("42", None, False)
    for text, reward in (("The answer is 42.", 1.0), ("The answer is 43.", 0.0)):
        step = environment.step(read_turn(text))
        assert (step.reward, step.done) == (reward, True)
    assert environment.finish() == 0.0  # cut before an answer
    assert begin("python(verifier='numeric')", answer=0.5).step(read_turn("It is 1/2")).reward == 1.0
    nothing = begin("python", answer=None)
    assert nothing.step(read_turn("42")).reward is None and nothing.finish() is None


def test_errors_of_code_are_observations() -> None:
    environment = begin("python", answer="1")
    seen = environment.step(call("python", code="print('so far')\n1 / 0")).observation
    assert seen.startswith("so far\nTraceback") and seen.endswith("ZeroDivisionError: division by zero")
    assert 'File "main.py", line 2' in seen  # not the temporary folder, whose name is new each time
    assert environment.step(call("python", code="pass")).observation == "(no output)"
    assert environment.step(call("python", text="pass")).observation.startswith("Error: a call is")
    assert environment.step(read_turn("<tool_call>{</tool_call>")).observation.startswith("Error: a call is")
    cut = environment.step(read_turn("```python\nprint(1)", cut=True))  # half a program is not run
    assert cut.done and cut.reward == 0.0


def test_long_output_is_shortened() -> None:
    seen = begin("python(max_chars=100)", answer="1").step(call("python", code="print('a' * 500 + 'b' * 500)"))
    assert seen.observation == "a" * 50 + "\n… 900 characters left out …\n" + "b" * 50


HOSTILE = {
    "while True: pass": "Killed: too much time",
    "import time; time.sleep(60)": "Killed: too much time",
    "x = 'a' * (1 << 33)": "MemoryError",
    "while True: print('x' * 999)": "Killed: too much output",
    "import os; os.kill(os.getppid(), 9)": "",
    "open('/etc/passwd', 'a')": "Error",
    "import socket; socket.create_connection(('1.1.1.1', 80), 1)": "Error",
}


def test_hostile_code_harms_nothing() -> None:
    environment = begin("python(seconds=0.5)", answer="1")
    found = call_all([lambda code=code: environment.step(call("python", code=code)) for code in HOSTILE])
    for step, expected in zip(found, HOSTILE.values(), strict=True):
        assert not isinstance(step, BaseException) and expected in step.observation and not step.done
    assert environment.step(call("python", code="print('alive')")).observation == "alive"


def test_paths_of_temporary_folders_are_left_out() -> None:
    error = b'File "/tmp/lmworks-sandbox-abc123/main.py", line 1\nopen("/sandbox/x")'
    result = SandboxResult(1, None, None, b"", error, False, 0.0, 0.0, "landlock")
    assert shown(result, 500) == 'File "main.py", line 1\nopen("x")'


# --- file_edit ----------------------------------------------------------------------------------------------

FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "lib/notes.txt": "nothing"}
TESTS = ["from calc import add\nassert add(1, 2) == 3", "from calc import add\nassert add(0, 0) == 0"]


def test_a_file_is_viewed_changed_and_tested() -> None:
    environment = begin("file_edit", files=FILES, tests=TESTS)
    assert environment.step(call("view", path="calc.py")).observation == FILES["calc.py"]
    step = environment.step(call("run_tests"))
    assert step.observation == "1 of 2 tests passed\nAssertionError:" and not step.done
    step = environment.step(call("replace", path="calc.py", old="a - b", new="a + b"))
    assert step.observation == "calc.py was changed" and step.reward is None
    step = environment.step(call("run_tests"))
    assert (step.observation, step.reward, step.done) == ("2 of 2 tests passed", 1.0, True)
    assert FILES["calc.py"].count("a - b") == 1  # another episode begins with the same files


def test_a_turn_without_a_call_ends_the_task() -> None:
    for name, reward in (("file_edit", 0.0), ("file_edit(partial=True)", 0.5)):
        environment = begin(name, files=FILES, tests=TESTS)
        step = environment.step(read_turn("I am done."))
        assert step.done and step.reward == environment.finish() == reward


@pytest.mark.parametrize(
    ("turn", "observation"),
    [
        (call("view", path="other.py"), "Error: there is no file 'other.py': calc.py, lib/notes.txt"),
        (call("view", path="../../etc/passwd"), "Error: there is no file '../../etc/passwd'"),
        (call("view"), "Error: view needs the texts path"),
        (call("replace", path="calc.py", old="zzz", new=""), "Error: the text occurs 0 times in calc.py"),
        (call("replace", path="calc.py", old="a", new=""), "Error: the text occurs 3 times in calc.py"),
        (call("replace", path="calc.py", old="", new="x"), "Error: the text occurs 0 times in calc.py"),
        (call("delete", path="calc.py"), "Error: there is no function 'delete'"),
        (read_turn("<tool_call>{</tool_call>"), "Error: a call is JSON"),
    ],
)
def test_wrong_calls_are_told(turn: Turn, observation: str) -> None:
    step = begin("file_edit", files=FILES, tests=TESTS).step(turn)
    assert step.observation.startswith(observation) and not step.done


def test_code_that_ends_early_or_says_that_it_passed_has_not() -> None:
    for code in ("print('tests 2'); print('passed'); print('passed')", "import os; os._exit(0)", "while True: pass"):
        environment = begin("file_edit(seconds=0.5)", files={"calc.py": code}, tests=TESTS)
        assert environment.finish() == 0.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"files": ["calc.py"], "tests": TESTS}, "'files' must be an object"),
        ({"files": {"main.py": ""}, "tests": TESTS}, "none of which is main.py"),
        ({"files": FILES, "tests": "def f(:"}, "'tests' must be Python source"),
        ({"files": FILES, "tests": None}, "'tests' must be Python source"),
    ],
)
def test_wrong_tasks_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        begin("file_edit", **columns)


# --- loading, calls side by side ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pyton", "did you mean 'python'"),
        ("python(second=3)", "no argument 'second'; did you mean 'seconds'"),
        ("python(verifier='magic')", "exact or numeric"),
        ("missing.py:Mine", "there is no file missing.py"),
        ("json:JSONDecoder", "has no subclass of lmworks.align.Environment 'JSONDecoder'"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_environment(name)


def test_own_environments_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lmworks.align import Environment, Step\n"
        "class Echo(Environment):\n"
        "    def __init__(self, times=1): self.times = times\n"
        "    def reset(self, example): return example['prompt']\n"
        "    def step(self, turn): return Step(turn.text * self.times)\n"
    )
    kind, factory = load_environment(f"{tmp_path / 'mine.py'}:Echo(times=3)")
    assert factory().step(Turn("a")).observation == "aaa" and kind.columns == ()
    assert factory() is not factory()


def test_calls_run_side_by_side_and_a_hanging_one_is_given_up() -> None:
    barrier, never = threading.Barrier(4), threading.Event()

    def fail() -> int:
        raise ValueError("no")

    meet = [lambda: barrier.wait(timeout=10)] * 4  # each waits for the others
    *met, failed, hung = call_all([*meet, fail, never.wait], patience_s=0.5)
    assert sorted(met) == [0, 1, 2, 3]  # type: ignore[type-var]
    assert isinstance(failed, ValueError) and isinstance(hung, TimeoutError)
    began = time.monotonic()
    many = call_all([*[never.wait] * 100, lambda: True], patience_s=0.1)  # more than there are threads
    assert many[-1] is True and isinstance(many[0], TimeoutError) and time.monotonic() - began < 20
    never.set()
