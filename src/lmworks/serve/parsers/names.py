"""Names of the parsers of a model's answers, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import SpecError

NONE = "none"
HARMONY, HARMONY_TOOLS = "openai_gptoss", "openai"  # one form of reasoning, text and calls
TOOL_PARSER_NAMES = (
    "hermes", "qwen3_coder", "mistral", "llama3_json", "pythonic", "deepseek_v3", "deepseek_v31", HARMONY_TOOLS,
)  # fmt: skip
REASONING_PARSER_NAMES = ("deepseek_r1", "qwen3", "mistral", HARMONY)


@dataclass(frozen=True)
class ParserNames:
    """None: as the chat template tells."""

    tool: str | None = None
    reasoning: str | None = None

    @property
    def harmony(self) -> bool:
        return self.reasoning == HARMONY or self.tool == HARMONY_TOOLS


def check_pair(names: ParserNames) -> None:
    if names.harmony and {names.tool, names.reasoning} - {None, NONE, HARMONY, HARMONY_TOOLS}:
        raise SpecError(
            f"--tool-parser {names.tool} and --reasoning-parser {names.reasoning} cannot be combined: gpt-oss writes "
            f"both in one form, --tool-parser {HARMONY_TOOLS} --reasoning-parser {HARMONY}"
        )
