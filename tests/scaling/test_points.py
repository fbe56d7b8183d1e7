"""Reading points: names of columns, what follows from C = 6ND, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmworks.scaling.fitting import fit_law
from lmworks.scaling.points import budgets, read_points
from lmworks.spec import DataError, SpecError

ROWS = [(n, 20 * n, 2 + 100 / n**0.3 + 0.01 * i) for i, n in enumerate((1e7, 2e7, 4e7, 8e7, 1e8, 2e8, 3e8))]


def csv_of(folder: Path, header: str, *rows: object) -> Path:
    path = folder / "runs.csv"
    lines = [row if isinstance(row, str) else ",".join(map(str, row)) for row in rows]  # type: ignore[call-overload]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_columns_by_their_usual_names(tmp_path: Path) -> None:
    points = read_points(csv_of(tmp_path, "params,tokens,val_loss,trunk", (1e7, 2e8, 3.5, "a"), (2e7, 2e8, 3.4, "b")))
    assert points.n is not None and points.flops is not None and points.trunk is not None
    assert points.flops.tolist() == [1.2e16, 2.4e16]
    assert points.trunk.tolist() == [0, 1]


def test_tokens_follow_from_flops(tmp_path: Path) -> None:
    points = read_points(csv_of(tmp_path, "flops,n,loss", (6e18, 1e9, 3.0), (6e18, 2e9, 3.1)))
    assert points.d is not None
    assert points.d.tolist() == pytest.approx([1e9, 5e8])


def test_rows_are_chosen_by_conditions_and_outliers_dropped(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "n,d,loss,set", *((*row, "ab"[i % 2]) for i, row in enumerate(ROWS)))
    assert len(read_points(path, conditions=["set=a", "n>3e7"])) == 3
    assert len(read_points(path, conditions=["n=1e7|2e7"])) == 2
    assert len(read_points(path, conditions=["set!=a"])) == 3
    left = read_points(path, drop=2)
    assert left.loss.max() == pytest.approx(sorted(row[2] for row in ROWS)[-3])


def test_runs_within_five_percent_are_of_one_budget() -> None:
    assert budgets(np.array([1e18, 3e18, 1.03e18, 2.95e18, 1e19])).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("n,d,loss", [(1e7, 2e8, 3.5), (2e7, 4e8, "nan")], r"runs.csv, line 3: loss is 'nan', not a number"),
        ("n,d,loss", [(1e7, 2e8, "inf")], r"line 2: loss is 'inf'"),
        ("n,d,loss", [(1e7, 2e8, -1)], r"line 2: loss is -1; a loss is more than 0"),
        ("n,d,loss", [(0, 2e8, 3)], r"line 2: n is 0; it must be more than 0"),
        ("n,d,loss", [], r"has no rows"),
        ("n,d", [(1, 2)], r"has no column `loss`; it has n, d"),
        ("n,loss", [(1, 2)], r"needs columns n and d, or flops"),
        ("n,d,loss", ["1e7,2e8"], r"line 2: has 2 cells, the header has 3"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, header: str, rows: list[object], message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        read_points(csv_of(tmp_path, header, *rows))


def test_the_line_is_that_of_the_file_where_rows_are_left_out(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "n,d,loss,set", (1e7, 2e8, 3.5, "b"), (2e7, 4e8, "nan", "a"))
    with pytest.raises(DataError, match="line 3"):
        read_points(path, conditions=["set=a"])


def test_the_line_is_that_of_the_file_where_lines_are_empty(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "n,d,loss", "", (1e7, 2e8, 3.5), "", (2e7, 4e8, "nan"))
    with pytest.raises(DataError, match="line 5"):
        read_points(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:1], r"1 point for the 5 parameters of --law chinchilla; it needs at least 6"),
        ([(1e7, d, 3.0 + 1e7 / d) for d in np.geomspace(1e8, 1e10, 8)], r"all 8 points have one size \(n\), 1e\+07"),
        ([(n, 1e9, 3.0 + 1e6 / n) for n in np.geomspace(1e7, 1e9, 8)], r"one token count \(d\)"),
    ],
)
def test_what_no_fit_can_answer(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fit_law(read_points(csv_of(tmp_path, "n,d,loss", *rows)), "chinchilla")
