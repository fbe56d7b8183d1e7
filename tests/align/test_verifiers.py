"""Built-in rewards, by values."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from lmworks.align.answers import last_code, numbers_in
from lmworks.align.rewards import RewardError, load_rewards
from lmworks.align.unit_tests import unit_tests
from lmworks.align.verifiers import exact, format_pattern, json_schema, length, numeric


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("Paris", "paris", 1.0),
        ("  The  Eiffel\nTower. ", "the eiffel tower", 1.0),
        ("**Paris**", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("I think so. The answer is Paris.", "Paris", 1.0),
        ("<answer>London</answer> no: <answer> Paris </answer>", "Paris", 1.0),
        (r"Therefore \boxed{\text{Paris}}.", "Paris", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("work\n#### B", "b", 1.0),
        ("ﬁne", "fine", 1.0),  # NFKC
        ("UK", ["United Kingdom", "UK"], 1.0),
        ("UK", ["France"], 0.0),
        ("", "Paris", 0.0),
        ("anything", None, None),
        (assistant("Paris."), "paris", 1.0),
        ([*assistant("London"), {"role": "tool", "content": "x"}, *assistant("Paris")], "Paris", 1.0),
        ([{"role": "assistant", "content": [{"type": "text", "text": "Paris"}]}], "Paris", 1.0),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "Paris", 0.0),
    ],
)  # fmt: skip
def test_exact(completion: Any, answer: Any, value: float | None) -> None:
    assert exact([completion], [answer]) == [value]


# Gold, completion, and verify(parse(gold), parse(completion)) of math-verify 0.9.0.
MATH_VERIFY = [
    ("1234.5", r"\boxed{1,234.50}", True), ("42", "#### 42", True), ("42", "The answer is 42.", True),
    ("0.75", r"\boxed{\frac{3}{4}}", True), ("3/4", r"\boxed{0.75}", True), ("50%", r"\boxed{0.5}", True),
    ("0.5", r"\boxed{50\%}", True), ("50", r"\boxed{50\%}", True), ("50%", r"\boxed{50}", True),
    ("-7", r"\boxed{-7}", True), ("-7", r"\boxed{−7}", True), ("-7", r"\boxed{7}", False),
    ("1500", r"\boxed{1.5 \times 10^{3}}", True), ("42", r"\boxed{42.0}", True), ("42", r"\boxed{\text{42}}", True),
    ("12", r"\boxed{12 \text{ cm}}", True), ("12", r"\boxed{12\text{ cm}^2}", True), ("12", r"\boxed{x = 12}", True),
    ("12", r"so $x=12$ and $y=3$, thus \boxed{12}", True), ("4", r"\boxed{(3, 4)}", False),
    ("2", r"\boxed{\sqrt{2}}", False), ("0.3333333333", r"\boxed{\frac13}", True), ("1/3", r"\boxed{0.3333}", False),
    ("1/3", r"\boxed{0.33}", False), ("100", r"\boxed{\$100}", True), ("1000000", r"\boxed{1{,}000{,}000}", True),
    ("5", r"\boxed{\dfrac{10}{2}}", True), ("5", r"\boxed{10/2}", True), ("3.14", r"\boxed{\pi}", False),
    ("6", r"first \boxed{6}, no, \boxed{7}", False), ("90", r"\boxed{90^\circ}", True), ("0", r"\boxed{-0}", True),
    ("1.5", r"\boxed{\frac{-3}{-2}}", True), ("-1.5", r"\boxed{-\frac{3}{2}}", True),
    ("-1.5", r"\boxed{\frac{-3}{2}}", True), ("12", r"\boxed{012}", True), (".5", r"\boxed{0.5}", True),
    ("10", r"\boxed{ten}", False), ("18", "She makes 9 * 2 = 18 dollars.\n#### 18", True),
    ("18", "I think it is 18", True), ("18", "It is 18, not 17", False), ("3", r"\boxed{3 + 4i}", False),
]  # fmt: skip
OTHERWISE = [  # where we mean to differ
    ("1500", r"\boxed{1.5e3}", 1.0), ("1e-5", r"\boxed{0.00001}", 1.0),  # scientific notation is read
    ("7", r"first \boxed{6}, no, \boxed{7}", 1.0),  # the last box counts, as in most graders
    ("8", r"\boxed{2^3}", 0.0), ("2", r"\boxed{1 + 1}", 0.0),  # a formula is no final answer
]  # fmt: skip


@pytest.mark.parametrize(("answer", "completion", "value"), [*MATH_VERIFY, *OTHERWISE])
def test_numeric_as_math_verify(answer: str, completion: str, value: bool | float) -> None:
    assert numeric([completion], [answer]) == [float(value)]


def test_numeric_tolerance_and_gold_numbers() -> None:
    assert numeric(["3.1416", "3.15", "none"], [math.pi] * 3, tolerance=1e-4) == [1.0, 0.0, 0.0]
    assert numeric(["7", "7"], [7, "reasoning\n#### 7"]) == [1.0, 1.0]
    assert numeric(["0.1"], [0.1], tolerance=0.0) == [1.0]
    assert numeric(["7"], [None]) == [None]
    with pytest.raises(ValueError, match="answer 'seven' holds no single number"):
        numeric(["7"], ["seven"])


def test_numbers_of_any_length_are_read_at_once() -> None:
    """Text of a model may hold numbers that take hours or all memory to compute."""
    assert numbers_in("1e999999999") == [] and numbers_in("9" * 10_000) == [] and numbers_in("1/0") == []
    started = time.monotonic()
    long = ["1,000" * 5000 + r"\boxed{" * 5000, "answer is " * 5000, "```\n" * 20_000, "1," * 20_000, r"\frac{1" * 9000]
    assert numeric(long, [7] * len(long)) == [0.0] * len(long) and last_code("```x\n" * 20_000) is not None
    assert time.monotonic() - started < 5


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"age": 7}', 1.0),
        ('{"age": "7"}', 0.0),
        ("no JSON", 0.0),
        ('Here it is:\n```json\n{"age": 7}\n```\nGood.', 1.0),
        ('```json\n{"age": 7}\n```\nor\n```json\n{}\n```', 0.0),
        ('{"age": NaN}', 0.0),
        pytest.param("[" * 100_000, 0.0, id="nested"),
        (assistant('{"age": 7}'), 1.0),
    ],
)
def test_json_schema(completion: Any, value: float) -> None:
    assert json_schema([completion] * 3, [PERSON, json.dumps(PERSON), None]) == [value, value, None]


def test_a_bad_schema_is_an_error() -> None:
    for schema in ({"type": "objekt"}, "{", {"$ref": "http://127.0.0.1:9/schema.json"}):
        with pytest.raises(Exception, match=r"objekt|Expecting|127\.0\.0\.1"):
            json_schema(["{}"], [schema])


def test_format_and_length() -> None:
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    texts = ["<think>a\nb</think>\n<answer>c</answer>", "<answer>c</answer>", "x <think></think><answer></answer>"]
    assert format_pattern(texts, pattern) == format_pattern(texts, [pattern] * 3) == [1.0, 0.0, 0.0]
    assert format_pattern(texts[:1], [None]) == [None]
    assert length(["a b", "a b c", "a b c d", "a b c d e"], words=2) == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\ntext\n```py\nb\n```\n", "b\n"),
        ("```\na\n", "a\n"),
        ("text", None),
        ("````md\n```\ninner\n```\n````\n", "```\ninner\n```\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_last_code_block(text: str, code: str | None) -> None:
    assert last_code(text) == code


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
CASES: list[tuple[Any, Any, float | None, float | None]] = [  # completion, tests, value, with partial credit
    (ADD, "assert add(1, 2) == 3", 1.0, 1.0),
    (assistant(f"Wrong first:\n```python\nraise SystemExit\n```\nRight:\n{ADD}"), ["assert add(1, 2) == 3"], 1.0, 1.0),
    (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add('a', 'b') == 'ab'"], 0.0, 2 / 3),
    ("def add(a, b): return a + b", "import math\nassert add(1, 2) == 3\nassert add(math.inf, 1) > 9", 1.0, 1.0),
    (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)", 1.0, 1.0),
    (ADD, "def test_one():\n    assert add(1, 1) == 2\ndef test_two():\n    assert add(1, 1) == 3", 0.0, 0.5),
    ("def add(a, b): return a - b", "assert add(1, 2) == 3", 0.0, 0.0),
    ("def add(a, b)", "assert add(1, 2) == 3", 0.0, 0.0),
    ("I cannot.", "assert add(1, 2) == 3", 0.0, 0.0),
    # ends before the tests, or says that it has passed
    ("import os\nos._exit(0)", "assert add(1, 2) == 3", 0.0, 0.0),
    ("exit(0)", "assert add(1, 2) == 3", 0.0, 0.0),
    ("import sys\nprint('passed')\nprint(open(0).read())\nsys.stdin.read()", "assert add(1, 2) == 3", 0.0, 0.0),
    ("def add(a, b):\n    import os; os._exit(0)", ["assert 1", "assert add(1, 2) == 3"], 0.0, 0.5),
    # a test that hangs leaves those before it
    ("def add(a, b):\n    while b: pass\n    return a", ["assert add(1, 0) == 1", "assert add(1, 1) == 2"], 0.0, 0.5),
    ("if __name__ == '__main__':\n    input()\ndef add(a, b): return a + b", "assert add(1, 2) == 3", 1.0, 1.0),
    (ADD, None, None, None),
]  # fmt: skip


def test_unit_tests() -> None:
    completions, tests = [case[0] for case in CASES], [case[1] for case in CASES]
    assert unit_tests(completions, tests, seconds=1.0, workers=4) == [case[2] for case in CASES]
    assert unit_tests(completions, tests, partial=True, seconds=1.0, workers=4) == [case[3] for case in CASES]


def test_tests_that_are_none_are_named() -> None:
    rewards = load_rewards(["unit_tests"])
    for tests, message in (("assert (", "SyntaxError"), ("x = 1", "no assertion")):
        records = [{"tests": "assert True"}, {"tests": tests}]
        with pytest.raises(RewardError, match=rf"'unit_tests' failed on sample 1, data\.jsonl line 9: .*{message}"):
            rewards.score(["", ""], ["", ""], records, ["data.jsonl line 2", "data.jsonl line 9"])
