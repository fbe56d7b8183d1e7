"""Parsers of reasoning and tool calls: what each family writes, whole and in any pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.serve.chat import parts_of
from lmworks.serve.parsers.answer import AnswerForm, AnswerParser
from lmworks.serve.parsers.base import Arguments, Call, Piece, Reasoning, parse_whole
from lmworks.serve.parsers.names import ParserNames

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}},
    "f": {"properties": {}},
}
ROME = ("weather", {"city": "Rome", "days": 3})
THINK, MISTRAL = ("hermes", "qwen3"), ("mistral", "mistral")
GPT = ("openai", "openai_gptoss")
Parts = tuple[str, str, list[tuple[str, Any]]]  # reasoning, text, calls
ALL, ALL_END, ONE, ONE_END = (f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end"))
SEP = "<｜tool▁sep｜>"
ROME_JSON = '{"city": "Rome", "days": 3}'

# tool and reasoning parser, what the model writes, and what it means
CASES: list[tuple[tuple[str, str], str, Parts]] = [
    (THINK, "<think>\nWell,\nRome.\n</think>\n\nIt is 3.", ("Well,\nRome.", "It is 3.", [])),
    (THINK, "It is <think>.", ("", "It is <think>.", [])),
    (THINK, "<think>\n\n</think>\n\nNo thoughts.", ("", "No thoughts.", [])),
    (THINK, "<think>broken off", ("broken off", "", [])),
    (
        THINK,
        f'<think>I call.</think>\n\nOne.\n<tool_call>\n{{"name": "weather", "arguments": {ROME_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ("I call.", "One.\n", [ROME, ("f", {})]),
    ),
    (THINK, '<tool_call>{"arguments": {"a": "}\\"</tool_call>{"}, "name": "f"}</tool_call>!',
     ("", "!", [("f", {"a": '}"</tool_call>{'})])),
    (THINK, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", {"a": 1})])),
    (THINK, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    (THINK, "a<tool_call>{</tool_call>b", ("", "a<tool_call>{</tool_call>b", [])),
    (THINK, "<tool_call>[1]</tool_call>", ("", "<tool_call>[1]</tool_call>", [])),
    (THINK, "ends in <tool_ca", ("", "ends in <tool_ca", [])),
    (THINK, '<tool_call>{"name": <tool_call>{"name": "f"}</tool_call>', ("", '<tool_call>{"name": ', [("f", {})])),
    (THINK, '<tool_call>{"name": "f", "arguments": {"a": "broken o', ("", "", [("f", '{"a": "broken o')])),
    (
        ("qwen3_coder", "none"),
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew \"York\"\n\n</parameter>\n"
        '<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        ("", "I look.\n", [("weather", {"city": 'New "York"\n', "days": 3, "where": {"a": [1]}}), ("f", {})]),
    ),
    (("qwen3_coder", "none"), "<tool_call>nothing</tool_call>", ("", "<tool_call>nothing</tool_call>", [])),
    (("qwen3_coder", "none"), "<function=weather><parameter=days>many</parameter><parameter=city>Ro",
     ("", "", [("weather", '{"days": "many", "city": "Ro')])),
    (MISTRAL, f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {ROME_JSON}}}, {{"name": "f", "arguments": {{}}}}]',
     ("", "Sure.", [ROME, ("f", {})])),
    (MISTRAL, f"[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{ROME_JSON}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{{}}",
     ("Hm.", "", [ROME, ("f", {})])),
    (MISTRAL, f"[TOOL_CALLS]weather{ROME_JSON}", ("", "", [ROME])),
    (MISTRAL, "[TOOL_CALLS] [] and more", ("", "[TOOL_CALLS] [] and more", [])),
    (("llama3_json", "none"),
     f'<|python_tag|>{{"name": "weather", "parameters": {ROME_JSON}}}; {{"name": "f", "parameters": {{}}}}',
     ("", "", [ROME, ("f", {})])),
    (("llama3_json", "none"), f'{{"name": "weather", "parameters": {ROME_JSON}}}', ("", "", [ROME])),
    (("llama3_json", "none"), '{"answer": 3}', ("", '{"answer": 3}', [])),
    (("llama3_json", "none"), 'Text, and {"name": "f"}', ("", 'Text, and {"name": "f"}', [])),
    (("llama3_json", "none"), '<|python_tag|>print("x")', ("", '<|python_tag|>print("x")', [])),
    (("pythonic", "none"), "[weather(city='Rome', days=3), f()]", ("", "", [ROME, ("f", {})])),
    (("pythonic", "none"), "<|python_start|>[weather(city=\"R'(o\\\"me\", where={'a': [True, None]})]<|python_end|>",
     ("", "", [("weather", {"city": "R'(o\"me", "where": {"a": [True, None]}})])),
    (("pythonic", "none"), "[1, 2, 3]", ("", "[1, 2, 3]", [])),
    (("pythonic", "none"), "[f(), g(open('x'))]", ("", ", g(open('x'))]", [("f", {})])),
    (("deepseek_v3", "deepseek_r1"),
     f"<think>\nHm.\n</think>\n\nSure.{ALL}{ONE}function{SEP}weather\n```json\n{ROME_JSON}\n```{ONE_END}\n"
     f"{ONE}function{SEP}f\n```json\n{{}}\n```{ONE_END}{ALL_END}",
     ("Hm.", "Sure.", [ROME, ("f", {})])),
    (("deepseek_v31", "deepseek_r1"), f"{ALL}{ONE}weather{SEP}{ROME_JSON}{ONE_END}{ONE}f{SEP}{{}}{ONE_END}{ALL_END}",
     ("", "", [ROME, ("f", {})])),
    (("deepseek_v31", "none"), f"{ALL} nothing", ("", f"{ALL} nothing", [])),
    (GPT, "<|channel|>analysis<|message|>I look.<|end|>"
     "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ROME_JSON,
     ("I look.", "One moment.", [ROME])),
    (GPT, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is < 3.<|return|>",
     ("Hm.", "It is < 3.", [])),
    (GPT, f" to=functions.weather<|channel|>commentary json<|message|>{ROME_JSON}<|call|>", ("", "", [ROME])),
    (GPT, "<|message|>Plain.<|end|>", ("", "Plain.", [])),
    (GPT, "No channels <|at all", ("", "No channels <|at all", [])),
]  # fmt: skip


def parser_of(names: tuple[str, str], prompt_end: str = "", **more: Any) -> AnswerParser:
    return AnswerForm(ParserNames(*names), SCHEMAS, **more).parser(prompt_end)


def parts(pieces: list[Piece]) -> Parts:
    reasoning, text, calls = parts_of(pieces)
    return reasoning, text, [(name, value(arguments)) for name, arguments in calls]


def value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(("names", "text", "expected"), CASES, ids=range(len(CASES)))
def test_what_each_family_writes(names: tuple[str, str], text: str, expected: Parts) -> None:
    assert parts(parse_whole(parser_of(names), text)) == expected


@pytest.mark.parametrize(("names", "text", "expected"), CASES, ids=range(len(CASES)))
def test_every_split_of_a_stream(names: tuple[str, str], text: str, expected: Parts) -> None:
    """In two, at every place, and character by character."""
    whole = parts_of(parse_whole(parser_of(names), text))
    for cut in range(1, len(text)):
        parser = parser_of(names)
        assert parts_of([*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.flush()]) == whole, cut
    parser = parser_of(names)
    assert parts_of([*(piece for letter in text for piece in parser.push(letter)), *parser.flush()]) == whole


MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": ', '"name"', "}}", "}", "{",
    "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[", "]", "<function=f>", "</function>", "<parameter=city>",
    "</parameter>", "<parameter=days>", "<|python_tag|>", ";", "f(", ")", "'", '"', "\\", "<|channel|>", "<|message|>",
    "<|start|>", "analysis", "<|end|>", "to=functions.f", ALL, ALL_END, ONE, ONE_END, SEP,
    "```json\n", "\n```", "\n", " ", "x", ":", ",", "1",
]  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(MARKERS), max_size=24), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_markers_in_any_order_and_any_pieces(words: list[str], sizes: list[int]) -> None:
    """Nonsense, too: the same result however it comes."""
    text = "".join(words)
    for names in {case[0] for case in CASES}:
        whole = parts_of(parse_whole(parser_of(names), text))
        parser, pieces, at = parser_of(names), list[Piece](), 0
        while at < len(text):
            size = sizes[at % len(sizes)]
            pieces += parser.push(text[at : at + size])
            at += size
        assert parts_of([*pieces, *parser.flush()]) == whole, names


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(MARKERS), max_size=24))
def test_nothing_is_lost_without_a_call(words: list[str]) -> None:
    """Hermes: what became no call, and no reasoning, is the text itself."""
    text = "".join(words)
    reasoning, shown, calls = parts_of(parse_whole(parser_of(("hermes", "none")), text))
    assert calls or (reasoning, shown) == ("", text)


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of(THINK)
    first, *rest = parser.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert first == Call("f") and parts_of([first, *rest])[2] == [("f", '{"a": "lo')]
    assert parser.push("ng, and more") == [Arguments("ng, and more")]


def test_reasoning_that_the_prompt_began() -> None:
    parser = parser_of(THINK, "<|im_start|>assistant\n<think>\n")
    assert parts(parse_whole(parser, "Hm.\n</think>\n\nYes.")) == ("Hm.", "Yes.", [])
    parser = parser_of(THINK, "<think>\n\n</think>\n\n")
    assert parts(parse_whole(parser, "Yes.")) == ("", "Yes.", [])
    parser = parser_of(THINK, "<think>\n")
    assert parser.push("Hm") == [Reasoning("Hm")], "shown while it comes"


def test_one_call_where_they_may_not_be_parallel() -> None:
    text = f'[TOOL_CALLS][{{"name": "weather", "arguments": {ROME_JSON}}}, {{"name": "f", "arguments": {{}}}}] End.'
    assert parts(parse_whole(parser_of(MISTRAL, most_calls=1), text)) == ("", " End.", [ROME])


def test_required_call_after_reasoning() -> None:
    text = '<think>Which?</think>\n\n{"name": "f", "arguments": {"a": 1}}'
    for names in (("mistral", "qwen3"), ("hermes", "deepseek_r1")):
        assert parts(parse_whole(parser_of(names, required=True), text)) == ("Which?", "", [("f", {"a": 1})])
    said = '<|channel|>analysis<|message|>Which?<|end|><|start|>assistant<|channel|>final<|message|>{"name": "f"}'
    assert parts(parse_whole(parser_of(GPT, required=True), said)) == ("Which?", "", [("f", {})])


def test_ids_are_what_templates_accept() -> None:
    found = parser_of(MISTRAL).call_id("a")
    assert len(found) == 9 and found.isalnum() and found != parser_of(MISTRAL).call_id("b")
    assert found == parser_of(MISTRAL).call_id("a")  # wherever the answer goes on
    assert parser_of(THINK).call_id("a").startswith("call_")


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        (THINK, "\n"),
        (THINK, "<tool_call>{"),
        (THINK, '<tool_call>{"arguments": ["'),
        (MISTRAL, "[TOOL_CALLS]["),
        (("qwen3_coder", "none"), "<function=x"),
        (("pythonic", "none"), "f("),
        (("deepseek_v3", "none"), ALL),
        (GPT, "<|channel|>"),
    ],
)
def test_work_is_linear_in_the_length(names: tuple[str, str], unit: str) -> None:
    """A model that repeats itself, 40,000 characters in pieces of four."""
    text = unit * (40_000 // len(unit))
    parser, began = parser_of(names), time.process_time()
    for at in range(0, len(text), 4):
        parser.push(text[at : at + 4])
    parser.flush()
    parse_whole(parser_of(names), text)
    assert time.process_time() - began < 3
