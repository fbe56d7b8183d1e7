"""Which parsers a model's answers need: by name (vLLM's), or as its chat template tells.

A template writes earlier calls and reasoning in the form that the model was trained on, so its markers are there.
"""

from __future__ import annotations

from collections.abc import Callable

from . import deepseek, hermes, llama3, mistral, pythonic, qwen3_coder, think
from .base import Parser
from .names import HARMONY, HARMONY_TOOLS, NONE, ParserNames

ToolParser = Callable[[qwen3_coder.Schemas], Parser]
TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": lambda _: hermes.HermesParser(),
    "qwen3_coder": qwen3_coder.Qwen3CoderParser,
    "mistral": lambda _: mistral.MistralParser(),
    "llama3_json": lambda _: llama3.Llama3Parser(),
    "pythonic": lambda _: pythonic.PythonicParser(),
    "deepseek_v3": lambda _: deepseek.DeepSeekV3Parser(),
    "deepseek_v31": lambda _: deepseek.DeepSeekV31Parser(),
}
THINK_PARSERS: dict[str, type[think.ThinkParser]] = {
    "deepseek_r1": think.ThinkParser,
    "qwen3": think.ThinkParser,
    "mistral": mistral.MistralThinkParser,
}

# What a template has and (after "!") has not → the parser. The first that fits.
TOOL_MARKERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY_TOOLS),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "!<arg_key>"), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(params_name1=",), "pythonic"),
    (('"parameters"', "<|start_header_id|>"), "llama3_json"),
)
REASONING_MARKERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[THINK]",), "mistral"),
    (("</think>", "enable_thinking"), "qwen3"),
    (("</think>",), "deepseek_r1"),
)


def choose(template: str | None, wanted: ParserNames) -> ParserNames:
    """Those that were named, or those that the template tells. Without any sign of another, calls are Hermes's."""
    source = template or ""
    return ParserNames(
        wanted.tool or detect(source, TOOL_MARKERS) or ("hermes" if "<arg_key>" not in source else NONE),
        wanted.reasoning or detect(source, REASONING_MARKERS) or NONE,
    )


def detect(template: str, rules: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    def fits(sign: str) -> bool:
        return sign[1:] not in template if sign.startswith("!") else sign in template

    return next((name for signs, name in rules if all(map(fits, signs))), None)
