"""Each format: what the model is asked, that the reference answer is right and a wrong one wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ADD, ScriptedModel, write_rows

from lmworks.evals import load_suite, run_suite
from lmworks.evals.formats.stdlib import held_out, modules
from lmworks.evals.models import Prompt
from lmworks.evals.problem import Problem
from lmworks.evals.problems import load_problems
from lmworks.evals.rows import read_rows
from lmworks.spec import DataError

INFILL = {**ADD, "prompt": "def add(a, b):\n    c = ", "suffix": "\n    return c\n", "canonical_solution": "a + b"}
MBPP = {
    "task_id": 7,
    "text": "Add two.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3"],
}
CRUX = {"id": "c1", "code": "def f(x):\n    return x * 2", "input": "'ab'", "output": "'abab'"}
SAFIM = {
    "task_id": "s1",
    "prompt": "n = int(input())\n# TODO: Your code here\n",
    "eval_prompt": "n = int(input())\n{{completion}}\n",
    "ground_truth": "print(n + 1)",
    "unit_tests": json.dumps([{"input": "4", "output": ["5\n"]}, {"input": "9", "output": ["10"]}]),
    "lang": "python",
}
REPO = {
    "repo_name": "r",
    "file_path": "b.py",
    "context": [{"path": "a.py", "snippet": "def helper(): ..."}, {"path": "c.py", "snippet": "X = 1"}],
    "gold_snippet_index": 0,
    "import_statement": "from a import helper",
    "cropped_code": "def run():",
    "next_line": "    return helper()",
}
GSM = {"question": "2 + 2?", "answer": "Two and two. #### 4"}


def suite_of(name: str, rows: list[dict[str, Any]], folder: Path, **changes: Any) -> Any:
    return load_suite(name, {"data": str(write_rows(folder / "rows.jsonl", rows)), **changes})


@pytest.mark.parametrize(
    ("name", "row", "asked", "right", "wrong"),
    [
        ("humaneval-infilling", INFILL, INFILL["prompt"], "a + b", "a - b"),
        (
            "mbpp",
            MBPP,
            '"""\nAdd two.\nassert add(1, 2) == 3\n"""\n',
            f"{MBPP['code']}\nassert 0",
            "def add(a, b): ...",
        ),
        ("cruxeval-output", CRUX, f"{CRUX['code']}\n\nassert f('ab') ==", " 'abab'\nx", " f('ab')"),
        ("cruxeval-input", CRUX, f"{CRUX['code']}\n\nassert 'abab' == f(", "'ab')", "'ba')"),
        ("safim", SAFIM, "n = int(input())\n", "print(n + 1)", "print(5)"),
        ("repobench", REPO, None, "    return helper()\nmore", "    return other()"),
    ],
)
def test_code_formats(
    name: str, row: dict[str, Any], asked: str | None, right: str, wrong: str, tmp_path: Path
) -> None:
    suite = suite_of(name, [row], tmp_path)
    for text, value in ((right, 1.0), (wrong, 0.0)):
        model = ScriptedModel(lambda *_, text=text: text)  # type: ignore[misc]
        found = run_suite(model, suite, tmp_path / f"out{value}")
        assert list(found["scores"][suite.metrics[0]].values()) == [value]
        if asked is not None:
            assert model.asked[0].text == asked
    if name == "repobench":
        assert model.asked[0].text == (
            "# Path: c.py\nX = 1\n\n# Path: a.py\ndef helper(): ...\n\n"
            "# Path: b.py\nfrom a import helper\n\ndef run():\n"
        )
        assert 0.5 < found["metrics"]["edit"]["value"] < 1
    if "infilling" in name:
        assert model.asked[0].suffix == INFILL["suffix"]


def test_safim_of_another_language_is_compared_as_text(tmp_path: Path) -> None:
    rows = [SAFIM, {**SAFIM, "task_id": "s2", "lang": "java", "ground_truth": "x++;"}]
    suite = suite_of("safim", rows, tmp_path)
    found = run_suite(ScriptedModel(lambda *_: "x++;"), suite, tmp_path / "out")
    assert found["scores"]["pass"] == {"s1": 0.0} and found["scores"]["exact"] == {"s1": 0.0, "s2": 1.0}


def test_gsm8k_has_solved_examples_in_front(tmp_path: Path) -> None:
    shots = write_rows(tmp_path / "shots.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(3)])
    suite = suite_of("gsm8k", [GSM], tmp_path, shots=2, shots_data=str(shots))
    model = ScriptedModel(lambda *_: " So #### 4\nQuestion: 5")
    found = run_suite(model, suite, tmp_path / "out")
    assert found["scores"]["numeric"] == {"1": 1.0}
    assert model.asked[0].text == (
        "Question: 0?\nAnswer: #### 0\n\nQuestion: 1?\nAnswer: #### 1\n\nQuestion: 2 + 2?\nAnswer:"
    )
    with pytest.raises(DataError, match="holds 3 of 4"):
        load_problems(suite_of("gsm8k", [GSM], tmp_path, shots=4, shots_data=str(shots)))


def test_multiple_choice_formats(tmp_path: Path) -> None:
    """Prompts and choices as lm-evaluation-harness writes them."""
    mmlu = {"question": " Q ", "choices": ["a", "b"], "answer": 1, "subject": "art"}
    (found,) = load_problems(suite_of("mmlu", [mmlu], tmp_path))
    assert (found.prompt, found.choices, found.correct, found.group) == (
        "Q\nA. a\nB. b\nAnswer:", [" A", " B"], 1, "art",
    )  # fmt: skip
    swag = {"ctx_a": "A man", "ctx_b": "sits [x] down", "activity_label": "Rest", "endings": ["e [title] f", "g"],
            "label": "0"}  # fmt: skip
    (found,) = load_problems(suite_of("hellaswag", [swag], tmp_path))
    assert (found.prompt, found.choices, found.correct) == ("Rest: A man Sits down", [" e. f", " g"], 0)
    arc = {"id": "q1", "question": "Why?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
    (found,) = load_problems(suite_of("arc-challenge", [arc], tmp_path))
    assert (found.id, found.prompt, found.choices, found.correct) == ("q1", "Question: Why?\nAnswer:", [" x", " y"], 1)
    with pytest.raises(DataError, match="answerKey '9' is none of 1, 2"):
        load_problems(suite_of("arc-challenge", [{**arc, "answerKey": "9"}], tmp_path))
    with pytest.raises(DataError, match="answer 5 is none of its 2 choices"):
        load_problems(suite_of("mmlu", [{**mmlu, "answer": 5}], tmp_path))


def test_needles_lie_where_they_should(tmp_path: Path) -> None:
    suite = load_suite(
        "needle-keys", {"needles": {"lengths": [100, 400], "depths": [0.0, 1.0], "repeats": 1, "keys": 3}}
    )
    problems = load_problems(suite)
    assert [one.group for one in problems] == [
        f"{length} words, depth {depth}" for length in (100, 400) for depth in (0, 1)
    ]
    for one in problems:
        text = one.prompt.partition("\n\n")[0]
        assert one.prompt.count("The special number of") == 4  # three facts and the question
        assert (text.index(str(one.answer)) > len(text) / 2) == one.group.endswith("1")
    by_prompt = {one.prompt: str(one.answer) for one in problems}

    def answer(prompt: Prompt, _: int) -> str:
        return f" {by_prompt[prompt.text] if len(prompt.text) < 1000 else 1}."

    found = run_suite(ScriptedModel(answer), suite, tmp_path / "out")
    assert found["groups"] == {one.group: float(one.group.startswith("100")) for one in problems}


def test_rows_of_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "x"}, {"a": "2", "b": "y,z"}]
    plain = write_rows(tmp_path / "r.jsonl", rows)
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "r.json").write_text(json.dumps(rows))
    (tmp_path / "m.json").write_text(json.dumps({"one": rows[0], "two": rows[1]}))
    (tmp_path / "r.csv").write_text('a,b\n1,x\n2,"y,z"\n')
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "r.parquet")
    for name in ("r.jsonl", "r.jsonl.gz", "r.json", "m.json", "r.csv", "r.parquet"):
        assert [row for _, row in read_rows(str(tmp_path / name))] == rows, name
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match="line 2 is not a JSON object"):
        list(read_rows(str(tmp_path / "bad.jsonl")))
    (tmp_path / "bin.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        list(read_rows(str(tmp_path / "bin.jsonl")))


def test_the_hub_is_asked_for_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    from lmworks.data.sources import hf_stream

    asked = []

    def load_dataset(*words: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((words, options))
        return [ADD]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    hf_stream.cache_clear()
    (found,) = load_problems(load_suite("humaneval"))
    assert found.id == "add"
    assert asked == [(("openai/openai_humaneval", None), {"split": "test", "streaming": True})]
    hf_stream.cache_clear()


# --- the standard library --------------------------------------------------------------------------------


def reference(problems: list[Problem]) -> ScriptedModel:
    answers = {one.prompt: str(one.answer) for one in problems}
    return ScriptedModel(lambda prompt, _: answers[prompt.text])


@pytest.mark.parametrize(("name", "count"), [("stdlib-doctest", 2), ("stdlib-infill", 10), ("stdlib-imports", 10)])
def test_reference_answers_of_the_standard_library_are_right(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = load_suite(name)
    problems = load_problems(suite, count)
    assert len(problems) == count == len({one.id for one in problems})
    monkeypatch.setattr("lmworks.evals.runner.load_problems", lambda *_: problems)
    found = run_suite(reference(problems), suite, tmp_path / "out", count)
    assert all(set(found["scores"][metric].values()) == {1.0} for metric in suite.metrics)
    nothing = run_suite(ScriptedModel(lambda *_: "        return NotImplemented\n"), suite, tmp_path / "no", count)
    assert set(nothing["scores"][suite.metrics[0]].values()) == {0.0}


def test_gaps_put_back_together_are_the_file() -> None:
    texts = {module.name: module.text for module in modules() if held_out(module.name)}
    for one in load_problems(load_suite("stdlib-infill"), 40):
        module = next(name for name in sorted(texts, key=len, reverse=True) if one.id.startswith(f"{name}."))
        assert f"{one.prompt}{one.answer}{one.suffix}" in texts[module]
        assert one.lines == str(one.answer).count("\n")


def test_imports_resolve() -> None:
    import importlib

    for one in load_problems(load_suite("stdlib-imports"), 25):
        assert one.prompt.endswith(".") and one.answer in one.known
        if one.group in ("re", "os", "codecs", "threading", "warnings", "functools"):
            assert hasattr(importlib.import_module(one.group), str(one.answer))


def test_all_values_of_a_key_are_asked_for(tmp_path: Path) -> None:
    """Two of four in the answer are half of the score."""
    suite = load_suite("needle-values", {"needles": {"lengths": [100], "depths": [0.0, 1.0], "repeats": 1}})
    problems = load_problems(suite)
    for one in problems:
        assert len(set(one.answer)) == 4
        text = one.prompt.partition("\n\n")[0]
        assert all(text.count(f"is {value}.") == 1 for value in one.answer)
        assert (text.index(one.answer[0]) > len(text) / 2) == one.group.endswith("1")
    two = {one.prompt: " and ".join([*one.answer[:2], "12"]) for one in problems}
    found = run_suite(ScriptedModel(lambda prompt, _: two[prompt.text]), suite, tmp_path / "out")
    assert found["metrics"]["recall"]["value"] == 0.5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": 5}, r"line 1: prompt is '5' \(int\), and has to be a text"),
        ({"test": ["assert False"]}, "line 1: its test is no program but list"),  # as an expression it would pass
        ({"test": " "}, "line 1: its test is empty"),
    ],
)
def test_rows_that_would_score_something_else(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        load_problems(suite_of("humaneval", [{**ADD, **change}], tmp_path))


@pytest.mark.parametrize(("name", "asked"), [("needle-copy", "reads:"), ("needle-repository", "_LIMIT ==")])
def test_copies_and_constants_lie_where_they_should(name: str, asked: str) -> None:
    suite = load_suite(name, {"needles": {"lengths": [100, 400], "depths": [0.0, 1.0], "repeats": 1}})
    for one in load_problems(suite):
        assert one.prompt.endswith(asked) and one.prompt.count(asked.removesuffix(" ==")) >= 2
        place = one.prompt.index(str(one.answer)) / len(one.prompt)
        assert (place > 0.5) == one.group.endswith("depth 1")
        assert one.prompt.count(str(one.answer)) == 1  # said once, not in the question
    if name == "needle-repository":  # the files before the question are Python, and define what it imports
        names: dict[str, object] = {}
        exec(one.prompt[: one.prompt.rindex("# file:")], names)
        assert str(names[one.prompt.split()[-2]]) == one.answer


def test_groups_are_read_back() -> None:
    from lmworks.evals.formats.needle import group_name, length_and_depth

    assert [length_and_depth(group_name(*place)) for place in ((256, 0.25), (4096, 1.0))] == [(256, 0.25), (4096, 1.0)]
