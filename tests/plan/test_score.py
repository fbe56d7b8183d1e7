"""Predictions beside what readers measured themselves: tables with results, and folders of runs."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.plan.tables.columns import parse
from lmworks.plan.tables.score import GIB, Score, Scored, errors_of, score_table

HEAD = "model,gpu,n_gpus,seq_len,global_batch,framework"
ROW = "llama3-8b,h100,8,8192,16,torchtitan"
TOKENS = 16 * 8192


def forecast(**changes: Any) -> dict[str, Any]:
    found = {
        "row": 1,
        "label": "a run",
        "step_s": 2.0,
        "step_s_low": 1.5,
        "step_s_high": 2.5,
        "tokens_per_s": TOKENS / 2.0,
        "mfu": 0.4,
        "allocated_gib": 50.0,
        "reserved_gib": 60.0,
        "job": {"n_gpus": 8, "dtype": "bf16", "model": {"experts": 0}},
    }
    return {**found, **changes}


@pytest.mark.parametrize(
    ("title", "cell"),
    [
        ("step_time_ms", "2,500"),
        ("iter_time_s", "2.5"),
        ("sec_per_it", "2.5"),
        ("seconds/step", "2.5"),
        ("tokens/s", str(TOKENS / 2.5)),
        ("Throughput (tok/s)", str(TOKENS / 2.5)),
        ("tokens_per_s_per_gpu", str(TOKENS / 2.5 / 8)),
        ("tok/s/GPU", str(TOKENS / 2.5 / 8)),
        ("tps_per_gpu", str(TOKENS / 2.5 / 8)),
    ],
)
def test_a_time_by_whichever_column_has_it(title: str, cell: str) -> None:
    table = parse(f'{HEAD},{title}\n{ROW},"{cell}"')
    (one,), left = score_table(table, [forecast()])
    assert (one.figure, one.predicted, one.measured, left) == ("step time", 2.0, pytest.approx(2.5), [])
    assert one.error == pytest.approx(-0.2) and one.within
    assert one.mfu == pytest.approx(0.4 * 2 / 2.5)


def test_a_step_time_counts_before_tokens() -> None:
    table = parse(f"{HEAD},tokens_per_s,step_s\n{ROW},1,4")
    (one,), _ = score_table(table, [forecast()])
    assert one.measured == 4 and one.within is False


@pytest.mark.parametrize(
    ("title", "cell", "figure", "measured"),
    [
        ("max_allocated_gib", "40", "allocated", 40 * GIB),
        ("Reserved (GB)", "80", "reserved", 80e9),
        ("peak_alloc_mb", "40000", "allocated", 4e10),
    ],
)
def test_memory_where_a_column_says_which_and_in_what(title: str, cell: str, figure: str, measured: float) -> None:
    (one,), _ = score_table(parse(f"{HEAD},{title}\n{ROW},{cell}"), [forecast()])
    assert (one.figure, one.measured) == (figure, measured)
    assert one.predicted == {"allocated": 50, "reserved": 60}[figure] * GIB and one.within is None


@pytest.mark.parametrize("column", ["memory_gb", "tflops", "loss"])
def test_what_may_mean_several_things_is_not_compared(column: str) -> None:
    assert score_table(parse(f"{HEAD},{column}\n{ROW},5"), [forecast()]) == ([], ["row 1 a run: nothing is measured"])


def test_rows_without_a_figure_or_a_prediction_are_told() -> None:
    table = parse(f"{HEAD},step_s\n{ROW},OOM\n{ROW},2\n{ROW},3")
    answers = [forecast(), {"row": 2, "label": "", "error": "heads do not divide"}, forecast(row=3)]
    scored, left = score_table(table, answers)
    assert [one.label for one in scored] == ["row 3 a run"]
    assert left == ["row 1 a run: nothing is measured", "row 2: heads do not divide"]


def test_errors_of_all_and_of_each_part() -> None:
    """By hand; MFUs of 0.2, 0.4 and 0.4: a constant of 0.4 is off by a half once."""
    runs = [
        Scored("a", "step time", 1.5, 1.0, "bf16", (1.2, 2.0), 0.2),
        Scored("b", "step time", 0.9, 1.0, "bf16", (0.5, 1.2), 0.4),
        Scored("c", "step time", 1.0, 1.0, "fp8", (0.5, 1.2), 0.4),
        Scored("a", "allocated", 3.0, 4.0, "bf16"),
    ]
    whole, half, eighth, memory = errors_of("here", runs)
    assert (whole.group, half.group, eighth.group, memory.group) == ("", "bf16", "fp8", "")
    assert whole.score.mape == pytest.approx(0.2) and whole.score.worst == "a"
    assert whole.coverage == pytest.approx(2 / 3) and half.coverage == 0.5 and memory.coverage is None
    assert whole.same_mfu == pytest.approx(0.5 / 3)
    assert memory.score == Score.of([-0.25], ["a"]) and memory.same_mfu is None
