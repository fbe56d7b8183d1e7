"""A task of editing files: the policy views and changes them, and tests judge what they have become."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ...data.examples import Text
from ...sandbox import Limits, SandboxResult, passed_tests, program_of_tests
from ...sandbox.python_program import MAIN
from ...spec.errors import DataError
from .environment import Environment, Step, ToolCall, Turn
from .sandboxed import FOLDER, LIMITS, shared_sandbox, shortened
from .tool_calls import function_tool

BAD_CALL = "Error: a call is JSON with the name and the arguments of a function"


class FileEdit(Environment):
    """Columns: `files`, an object of path → text, and `tests`, Python source or a list of it, which import the files.

    Calls of a turn are answered in their order. The episode is done when `run_tests` passes, or with a turn that calls
    nothing: 1 where all tests pass in the sandbox, else 0; `partial`: the share of them. The files exist in the
    sandbox's temporary folder alone.
    """

    tools = (
        function_tool("view", "Shows a file.", path="One of the files."),
        function_tool(
            "replace",
            "Replaces a text, which must occur exactly once in the file, by another.",
            path="One of the files.",
            old="The text to replace.",
            new="The text to put there.",
        ),
        function_tool("run_tests", "Runs the tests and shows what fails."),
    )
    columns = ("files", "tests")

    def __init__(
        self,
        partial: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 512,
        max_chars: int = 2000,
        isolation: str = "auto",
    ) -> None:
        self.partial, self.max_chars = partial, max_chars
        self.limits = Limits(cpu_seconds=seconds, wall_seconds=2 * seconds, memory_bytes=memory_mb << 20)
        self.sandbox = shared_sandbox(isolation)
        self.files: dict[str, str] = {}
        self.tests: Any = None

    def reset(self, example: Mapping[str, Any]) -> Text:
        """The prompt, with the names of the files."""
        files, self.tests = example.get("files"), example.get("tests")
        if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()) or MAIN in files:
            raise DataError(f"file_edit: 'files' must be an object of path → text, none of which is {MAIN}")
        try:
            program_of_tests("", self.tests, files=files)
        except (SyntaxError, ValueError, TypeError) as error:
            raise DataError(f"file_edit: 'tests' must be Python source, or a list of it: {error}") from None
        self.files = dict(files)
        prompt: Text = example["prompt"]
        listed = "Files: " + ", ".join(sorted(self.files))
        if isinstance(prompt, str):
            return f"{prompt}\n{listed}\n"
        return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{listed}"}]

    def step(self, turn: Turn) -> Step:
        if turn.cut or not (turn.tool_calls or turn.malformed):
            return Step(reward=self.finish(), done=True)
        shown = [BAD_CALL] if turn.malformed else []
        for call in turn.tool_calls:
            observation, reward = self.answer(call)
            shown.append(observation)
            if reward == 1.0:
                return Step("\n\n".join(shown), reward, done=True)
        return Step(shortened("\n\n".join(shown), self.max_chars))

    def answer(self, call: ToolCall) -> tuple[str, float | None]:
        """What it shows, and the reward where it ran the tests."""
        if call.name == "run_tests":
            result, passed, total = self.run_tests()
            return described(result, passed, total), self.reward(passed, total)
        wanted = {"view": ("path",), "replace": ("path", "old", "new")}.get(call.name)
        if wanted is None:
            return f"Error: there is no function {call.name!r}: view, replace or run_tests", None
        given = [call.arguments.get(name) for name in wanted]
        if not all(isinstance(one, str) for one in given):
            return f"Error: {call.name} needs the texts {', '.join(wanted)}", None
        path, *texts = map(str, given)
        if path not in self.files:
            return f"Error: there is no file {path!r}: {', '.join(sorted(self.files))}", None
        if not texts:
            return self.files[path], None
        old, new = texts
        count = self.files[path].count(old) if old else 0
        if count != 1:
            return f"Error: the text occurs {count} times in {path}; it must be there once", None
        self.files[path] = self.files[path].replace(old, new)
        return f"{path} was changed", None

    def run_tests(self) -> tuple[SandboxResult, int, int]:
        word = secrets.token_hex(16)
        result = self.sandbox.run(program_of_tests(word, self.tests, files=self.files), self.limits)
        return result, *passed_tests(word, result)

    def reward(self, passed: int, total: int) -> float:
        return (passed / total if total else 0.0) if self.partial else float(0 < passed == total)

    def finish(self) -> float | None:
        _, passed, total = self.run_tests()
        return self.reward(passed, total)


def described(result: SandboxResult, passed: int, total: int) -> str:
    """Without the program's output, in which the secret word stands."""
    errors = FOLDER.sub("", result.stderr.decode(errors="replace")).strip()
    killed = f"Killed: {LIMITS[result.limit]}" if result.limit else ""
    return "\n".join(filter(None, [f"{passed} of {total} tests passed", errors, killed]))
