"""Final answers in a text: where they stand, and which number they are."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)\s*:?\s*(.+?)(?:\.?\s*$|\.\s)", re.IGNORECASE | re.MULTILINE)
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:{\s*(-?[\d.,]+)\s*}|(\d))\s*(?:{\s*(-?[\d.,]+)\s*}|(\d))")
EXPONENT = r"10\s*\^\s*(?:{\s*([+-]?\d{1,3})\s*}|([+-]?\d{1,3}))"
POWER_OF_TEN = re.compile(rf"({PLAIN})\s*(?:\\times|\\cdot|×|\*)\s*{EXPONENT}")
UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s*\^\s*(?:{\s*\d\s*}|\d)")  # cm^2
NUMBER = re.compile(rf"(?<![\w.^])([+-]?)({PLAIN})(?:\s*/\s*(-?{PLAIN}))?(\s*%)?(?![\w^])")
NO_UNIT = re.compile(r"[\\^*+/×÷√π_<>]|\b(?:pi|i)\b")  # beside a number: it is a part of a formula
Readings = tuple[Fraction, ...]  # what a number may mean: 5% is 0.05 and 5, as math-verify has it; (): there is none
LONGEST = 300  # characters of a number; text of a model may hold any
TAIL = 2000  # characters in which an answer without marks is sought: regular expressions may take quadratic time


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """A text, or what the assistant says in its last message."""
    if isinstance(completion, str):
        return completion
    turns = [one for one in completion if one.get("role") == "assistant"] or list(completion)
    content = turns[-1].get("content") if turns else ""
    if isinstance(content, list):  # parts, as in OpenAI's format
        content = "".join(part.get("text", "") for part in content)
    return content or ""


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{}, braces inside it included."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[begin:at]
    return None


def marked_answer(text: str) -> str | None:
    r"""In \boxed{}, between <answer> tags, after '####' (GSM8K) or after 'answer is'; of each the last one."""
    if (found := boxed(text)) is not None:
        return found
    start, end = text.lower().rfind("<answer>"), text.lower().rfind("</answer>")
    if 0 <= start < end:
        return text[start + len("<answer>") : end].strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    sentences = ANSWER_IS.findall(text[-TAIL:])
    return sentences[-1] if sentences else None


def normalized(text: str) -> str:
    """Without case, spaces at the ends and doubled, quotes, a final full stop, and LaTeX's \\text{} and $."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*{([^{}]*)}", r"\1", text).replace("$", "").replace("\\!", "")
    return " ".join(text.split()).strip("\"'`*“”‘’ ").removesuffix(".").strip()


def last_code(text: str) -> str | None:
    """Content of the last fenced code block; one that is not closed ends with the text."""
    found: str | None = None
    fence = ""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if not fence and mark:
            fence, lines = mark[1], []
        elif fence and mark and mark[1].startswith(fence) and not mark[2].strip():
            fence, found = "", "".join(lines)
        elif fence:
            lines.append(line)
    return "".join(lines) if fence else found


def numbers_in(text: str) -> list[tuple[Readings, str]]:
    r"""Numbers at the end of a text, exactly, and the text around each: 1,234.50, \frac{3}{4}, 5%, 1.5 \times 10^3."""
    text = unicodedata.normalize("NFKC", text[-TAIL:].replace("½", " 1/2").replace("¼", " 1/4").replace("¾", " 3/4"))
    text = text.replace("−", "-").replace("–", "-").replace("\\%", "%").replace("{,}", ",").replace("^\\circ", "°")
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*{([^{}]*)}", r"\1", text)
    text = re.sub(r"\\?[$€£]|\\[,!;: ]|\\left|\\right", "", text)
    text = FRACTION.sub(lambda found: f"{found[1] or found[2]}/{found[3] or found[4]}", text)
    text = POWER_OF_TEN.sub(lambda found: f"{found[1]}e{found[2] or found[3]}", text)
    text = re.sub(r"(?<![\w)}]\s)(?<![\w)}])([+-])\s+(?=[\d.])", r"\1", UNIT_POWER.sub("", text))
    values: list[tuple[Readings, str]] = []
    for found in NUMBER.finditer(text):
        sign, above, below, percent = found.groups()
        if len(found[0]) > LONGEST:
            continue
        value = Fraction(above.replace(",", ""))
        if below is not None:
            divisor = Fraction(below.replace(",", ""))
            if not divisor:
                continue
            value /= divisor
        value = -value if sign == "-" else value
        readings = (value / 100, value) if percent else (value,)
        values.append((readings, text[: found.start()] + text[found.end() :]))
    return values


def final_number(text: str) -> Readings:
    """The one number of the marked answer, after its last '='; without a marked answer, the last number of the text."""
    answer = marked_answer(text)
    if answer is None:
        found = numbers_in(text)
        return found[-1][0] if found else ()
    found = numbers_in(re.split(r"=|\\approx|≈", answer)[-1])
    if len(found) != 1 or NO_UNIT.search(found[0][1]):
        return ()  # a pair, a root, a formula
    return found[0][0]
