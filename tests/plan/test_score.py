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
        "oom_probability": 0.25,
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
        ("tokens per GPU per second", str(TOKENS / 2.5 / 8)),
        ("tokens/device/s (median)", str(TOKENS / 2.5 / 8)),
        ("tokens/s/H100", str(TOKENS / 2.5 / 8)),
        ("ktok/s", str(TOKENS / 2.5 / 1000)),
        ("WPS per GPU", str(TOKENS / 2.5 / 8)),
        ("ms/step", "2500"),
        ("s_per_step", "2.5"),
        ("step time", "2.5 s"),
        ("step_time", "2500 ms"),
        ("iteration time (s)", "2.5±0.1"),
        ("step_time_std,step_time", '0.01","2.5'),
        ("predicted_step_s,step_s", '9","2.5'),
        ("train_iters,tokens/s", f'1000","{TOKENS / 2.5}'),
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


NOTHING = "row 1 a run: nothing is measured; predicted to run out of memory with a probability of 25%"


@pytest.mark.parametrize(
    "column",
    [
        *("memory_gb", "tflops", "loss", "Throughput (TFLOP/s/GPU)", "Throughput (samples/s)", "tokens/day"),
        *("tokens/s/node", "iterations", "iters/s", "steps_per_sec", "it/s", "reserved_gib_total", "alloc_retries_gb"),
        "step_time_max",
    ],
)
def test_what_may_mean_several_things_is_not_compared(column: str) -> None:
    assert score_table(parse(f"{HEAD},{column}\n{ROW},5"), [forecast()]) == ([], [NOTHING])


@pytest.mark.parametrize("cell", ["OOM", "-3", "0", "1e400", "nan", "x"])
def test_what_is_no_figure_is_not_compared(cell: str) -> None:
    assert score_table(parse(f"{HEAD},step_s\n{ROW},{cell}"), [forecast()]) == ([], [NOTHING])


def test_decimal_commas_where_commas_part_no_cells() -> None:
    """2,512 is a number of three decimals in a column with 2,5 and of thousands in one without."""
    head, row = HEAD.replace(",", ";"), ROW.replace(",", ";")
    answers = [forecast(), forecast(row=2)]
    decimals, _ = score_table(parse(f"{head};step_s\n{row};2,5\n{row};2,512"), answers)
    assert [one.measured for one in decimals] == [2.5, 2.512]
    thousands, _ = score_table(parse(f"{head};step_ms\n{row};2,512\n{row};3,000"), answers)
    assert [one.measured for one in thousands] == [2.512, 3.0]


def test_rows_without_a_figure_or_a_prediction_are_told() -> None:
    table = parse(f"{HEAD},step_s\n{ROW},OOM\n{ROW},2\n{ROW},3")
    answers = [forecast(), {"row": 2, "label": "", "error": "heads do not divide"}, forecast(row=3)]
    scored, left = score_table(table, answers)
    assert [one.label for one in scored] == ["row 3 a run"]
    assert left == [NOTHING, "row 2: heads do not divide"]


def test_errors_of_all_and_of_each_part() -> None:
    """By hand; of three runs no constant is told."""
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
    assert whole.same_mfu is None
    five = [Scored("a", "step time", 1.0, 1.0, mfu=mfu) for mfu in (0.2, 0.4, 0.4, 0.4, 0.4)]
    assert errors_of("here", five)[0].same_mfu == pytest.approx(0.5 / 5), "0.4 is off by a half once"
    assert memory.score == Score.of([-0.25], ["a"]) and memory.same_mfu is None
