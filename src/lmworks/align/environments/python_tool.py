"""A Python interpreter as a tool: the policy writes code, reads what it prints, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...data.examples import Text
from ...sandbox import Limits, Program
from ...spec.errors import SpecError
from ..answers import last_code
from ..verifiers import VERIFIERS
from .environment import Environment, Step, Turn
from .sandboxed import shared_sandbox, shown
from .tool_calls import function_tool

BAD_CALL = 'Error: a call is <tool_call>{"name": "python", "arguments": {"code": "…"}}</tool_call>'


class PythonTool(Environment):
    """Code is in a call of `python` or in the last fenced block of a turn; every run starts afresh. A turn without code
    is the answer: 1 where `verifier` finds it equal to the column `answer`, else 0, no reward where that is null."""

    tools = (
        function_tool(
            "python",
            "Runs a Python program (standard library, no network) and returns what it prints.",
            code="The program; print what you want to see.",
        ),
    )
    columns = ("answer",)

    def __init__(
        self,
        verifier: str = "exact",
        seconds: float = 5.0,
        memory_mb: int = 512,
        max_chars: int = 1000,
        isolation: str = "auto",
    ) -> None:
        if verifier not in ("exact", "numeric"):
            raise SpecError(f"align.environment = 'python': verifier = {verifier!r}: exact or numeric")
        self.verify, self.max_chars = VERIFIERS[verifier], max_chars
        self.limits = Limits(cpu_seconds=seconds, wall_seconds=2 * seconds, memory_bytes=memory_mb << 20)
        self.sandbox = shared_sandbox(isolation)
        self.answer: Any = None

    def reset(self, example: Mapping[str, Any]) -> Text:
        self.answer = example.get("answer")
        prompt: Text = example["prompt"]
        return prompt

    def step(self, turn: Turn) -> Step:
        code = None if turn.cut else self.code_of(turn)
        if code is not None:
            return Step(shown(self.sandbox.run(Program(code), self.limits), self.max_chars))
        if (turn.malformed or turn.tool_calls) and not turn.cut:
            return Step(BAD_CALL)
        (reward,) = self.verify([turn.text], answer=[self.answer])
        return Step(reward=reward, done=True)

    def code_of(self, turn: Turn) -> str | None:
        for call in turn.tool_calls:
            if call.name == "python" and isinstance(code := call.arguments.get("code"), str):
                return code
        return None if turn.tool_calls or turn.malformed else last_code(turn.text)

    def finish(self) -> float | None:
        """There was no answer."""
        return None if self.answer is None else 0.0
