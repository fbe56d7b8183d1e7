"""Suites run end to end over a model whose answers are written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ADD, DOUBLE, ScriptedModel, read_rows, write_rows

from lmworks.evals import load_suite, read_result, run_suite
from lmworks.evals.models import Completion, OnCompletion, Prompt
from lmworks.evals.suite import Suite
from lmworks.spec import DataError, SpecError
from lmworks.spec.errors import LMWorksError

RIGHT = {ADD["prompt"]: "    return a + b\n", DOUBLE["prompt"]: "    return 2 * a\n"}


def humaneval(tmp_path: Path, **changes: Any) -> Suite:
    data = write_rows(tmp_path / "problems.jsonl", [ADD, DOUBLE])
    return load_suite("humaneval", {"data": str(data), **changes})


def test_a_mistyped_evaluation_leaves_the_folder_free(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SpecError, match="no such file"):
        run_suite(ScriptedModel(lambda *_: ""), load_suite("humaneval", {"data": "none.jsonl"}), out)
    run_suite(ScriptedModel(lambda *_: ""), humaneval(tmp_path), out)
    with pytest.raises(SpecError, match=r"an evaluation with suite\.generation\.max_tokens = 512, not 9: give another"):
        run_suite(ScriptedModel(lambda *_: ""), humaneval(tmp_path, generation={"max_tokens": 9}), out)


def test_a_model_that_refuses_everything_has_no_score(tmp_path: Path) -> None:
    class Refusing(ScriptedModel):
        def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
            for place in range(len(prompts)):
                on_result(place, Completion("", error="no template"))

    with pytest.raises(LMWorksError, match="all 2 requests were refused: no template"):
        run_suite(Refusing(lambda *_: ""), humaneval(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out/result.json").exists()


def test_humaneval_scores_samples_and_verdicts(tmp_path: Path) -> None:
    """Of four samples, add is solved in one and double in all: pass@2 of add is 1 − C(3,2)/C(4,2)."""

    def answer(prompt: Prompt, number: int) -> str:
        right = number == 2 or prompt.text == DOUBLE["prompt"]
        return RIGHT[prompt.text] + "\ndef other():\n    pass" if right else "    return None\n"

    suite = humaneval(tmp_path, k=[1, 2], generation={"samples": 4, "temperature": 0.8})
    found = run_suite(ScriptedModel(answer), suite, tmp_path / "out")
    assert found["metrics"]["pass@1"]["value"] == pytest.approx((0.25 + 1) / 2)
    assert found["metrics"]["pass@2"]["value"] == pytest.approx((0.5 + 1) / 2)
    assert found["scores"]["pass"] == {"add": 0.25, "double": 1.0}
    samples, verdicts = (read_rows(tmp_path / "out" / f"{name}.jsonl") for name in ("samples", "verdicts"))
    assert len(samples) == len(verdicts) == 8
    assert {one["text"] for one in samples if one["problem"] == "double"} == {"    return 2 * a\n"}  # cut at \ndef
    assert len({one["seed"] for one in samples}) == 8
    failed = next(one for one in verdicts if not one["scores"]["pass"])
    assert "AssertionError" in failed["log"]["stderr"] and failed["log"]["passed"] == 0
    assert read_result(tmp_path / "out")["humaneval"] == found


@pytest.mark.parametrize(
    "text",
    [
        "    import os; os._exit(0)\n",
        "    raise SystemExit(0)\n",
        "    return type('X', (), {'__eq__': lambda *_: False})()\n",
        "    while True: pass\n",
        "    return a +\n",
        "",
    ],
    ids=["os._exit", "SystemExit", "unequal", "endless", "syntax", "empty"],
)
def test_wrong_answers_fail(tmp_path: Path, text: str) -> None:
    suite = humaneval(tmp_path, execution={"seconds": 0.5})
    found = run_suite(ScriptedModel(lambda *_: text), suite, tmp_path / "out")
    assert found["metrics"]["pass@1"]["value"] == 0.0


class Dies(Exception):
    pass


class Mortal(ScriptedModel):
    """Dies after so many answers."""

    def __init__(self, left: int) -> None:
        super().__init__(lambda prompt, _: RIGHT[prompt.text])
        self.left = left

    def generate(self, prompts: Any, on_result: OnCompletion) -> None:
        def counted(place: int, found: Completion) -> None:
            if not self.left:
                raise Dies
            self.left -= 1
            on_result(place, found)

        super().generate(prompts, counted)


def test_nothing_is_asked_or_judged_twice(tmp_path: Path) -> None:
    suite = humaneval(tmp_path, generation={"samples": 3})
    with pytest.raises(Dies):
        run_suite(Mortal(2), suite, tmp_path / "out")
    lines = (tmp_path / "out" / "verdicts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "verdicts.jsonl").write_text(lines[0] + '{"problem":"dou')  # killed within a line
    again = ScriptedModel(lambda prompt, _: RIGHT[prompt.text])
    found = run_suite(again, suite, tmp_path / "out")
    assert len(again.asked) == 4 and found["samples"] == 6
    for name in ("samples", "verdicts"):
        keys = [(one["problem"], one["sample"]) for one in read_rows(tmp_path / "out" / f"{name}.jsonl")]
        assert len(keys) == len(set(keys)) == 6
    whole = run_suite(ScriptedModel(lambda prompt, _: RIGHT[prompt.text]), suite, tmp_path / "whole")
    assert found == whole
    third = ScriptedModel(lambda *_: "")
    assert run_suite(third, suite, tmp_path / "out") == found and not third.asked


def test_a_folder_is_not_mixed_of_two_evaluations(tmp_path: Path) -> None:
    suite = humaneval(tmp_path)
    run_suite(ScriptedModel(lambda *_: ""), suite, tmp_path / "out")
    with pytest.raises(SpecError, match='holds an evaluation with model = "scripted", not "other"'):
        run_suite(ScriptedModel(lambda *_: "", "other"), suite, tmp_path / "out")


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({**ADD, "test": " "}, "line 1: its test is empty"),
        ({name: value for name, value in ADD.items() if name != "test"}, "line 1: no field 'test'; it has task_id"),
        ({**ADD, "prompt": None}, "line 1: no field 'prompt'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], error: str) -> None:
    suite = load_suite("humaneval", {"data": str(write_rows(tmp_path / "bad.jsonl", [row]))})
    with pytest.raises(DataError, match=error):
        run_suite(ScriptedModel(lambda *_: ""), suite, tmp_path / "out")


def test_bad_suites_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no suite 'humanevil'; did you mean 'humaneval'"):
        load_suite("humanevil")
    with pytest.raises(DataError, match="there is no such file"):
        run_suite(ScriptedModel(lambda *_: ""), load_suite("humaneval", {"data": "none.jsonl"}), tmp_path / "out")
    path = tmp_path / "own.toml"
    path.write_text('format = "humaneval"\nmetric = "pass"\n')
    with pytest.raises(SpecError, match=r"own\.toml: unknown key 'metric'; did you mean 'metrics'"):
        load_suite(str(path))
    path.write_text('data = "problems.jsonl"\n')
    with pytest.raises(SpecError, match=r"own\.toml: no format; it is one of: humaneval"):
        load_suite(str(path))
    write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="holds no problems"):
        empty = load_suite("humaneval", {"data": str(tmp_path / "empty.jsonl")})
        run_suite(ScriptedModel(lambda *_: ""), empty, tmp_path / "empty")
    with pytest.raises(SpecError, match="pass@10 needs 10 samples of a problem, and there are 1"):
        run_suite(ScriptedModel(lambda *_: ""), humaneval(tmp_path, k=[10]), tmp_path / "k")


def test_a_suite_without_tests_is_refused(tmp_path: Path) -> None:
    rows = [{"task_id": "1", "prompt": "x = # TODO: Your code here\n", "eval_prompt": "x = {{completion}}\n",
             "ground_truth": "1", "unit_tests": "[]"}]  # fmt: skip
    suite = load_suite("safim", {"data": str(write_rows(tmp_path / "safim.jsonl", rows))})
    with pytest.raises(DataError, match="its problems hold no tests"):
        run_suite(ScriptedModel(lambda *_: "1"), suite, tmp_path / "out")


def test_a_suite_of_ones_own_beside_its_data(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"name": "sum", "q": "1 + 2?", "a": "Well. #### 3"}])
    path = tmp_path / "sums.toml"
    path.write_text(
        'format = "gsm8k"\ndata = "rows.jsonl"\nprompt = "Q: {q}\\nA:"\n'
        '[fields]\nid = "name"\nquestion = "q"\nanswer = "a"\n'
    )
    model = ScriptedModel(lambda *_: " It is 3.0, so the answer is 3.")
    found = run_suite(model, load_suite(str(path)), tmp_path / "out")
    assert model.asked[0].text == "Q: 1 + 2?\nA:"
    assert found["suite"] == "sums" and found["scores"] == {"numeric": {"sum": 1.0}}
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["suite"]["data"] == str(tmp_path / "rows.jsonl")
