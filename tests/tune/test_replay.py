"""Replays on a planted table: what is spent, what is found, and who decides alike."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from lmworks.spec.errors import DataError
from lmworks.tune.replay import Table, regret_after, regret_at, replay
from lmworks.tune.stoppers import Asha, NoStopper

DIVISORS = (64, 16, 4, 1)


def planted() -> list[dict[str, str]]:
    """Lowest at lr index 5 and the middle decay; curves keep their order from the second rung on."""
    rows = []
    for number, (lr, decay) in enumerate(itertools.product(range(9), range(3))):
        floor = 2.0 + 0.05 * (lr - 5) ** 2 + 0.02 * (decay - 1) ** 2
        losses = {f"loss_{d}": str(floor + 0.1 * d**0.5 * (1 + 0.1 * (decay == 2))) for d in DIVISORS}
        rows.append({"trial": str(number), "lr": str(2e-4 * 2**lr), "weight_decay": str(10.0**decay), **losses})
    return rows


def test_a_table_is_read_by_the_order_of_its_values(tmp_path: Path) -> None:
    rows = planted()
    path = tmp_path / "t.csv.gz"
    text = "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)])
    path.write_bytes(gzip.compress(text.encode()))
    table = Table.read(path)
    assert table.rungs == (1, 4, 16, 64)
    assert table.loss({"lr": 5, "weight_decay": 1}, 64) == table.best == pytest.approx(2.1)
    with pytest.raises(DataError, match="26 of the 27"):
        Table.of(rows[1:])


def test_whole_trainings_cost_one_each() -> None:
    table = Table.of(planted())
    moments = replay(table, "random", NoStopper(table.rungs), 8, seed=0)
    assert moments[-1].compute == pytest.approx(8.0)
    assert moments[-1].trials == 8
    assert [moment.regret for moment in moments] == sorted((m.regret for m in moments), reverse=True)


def test_asha_costs_what_its_arithmetic_says() -> None:
    table = Table.of(planted())
    stopper = Asha(table.subset(1, 4), 4, 64)
    moments = replay(table, "random", stopper, 64, seed=0)
    assert moments[-1].compute == pytest.approx(sum(b.steps for b in stopper.table()) / 64, rel=0.35)
    assert moments[-1].regret <= 0.05


def test_several_workers_spend_the_same_and_wait_less() -> None:
    table = Table.of(planted())
    one, four = (replay(table, "random", NoStopper(table.rungs), 8, 0, workers=n) for n in (1, 4))
    assert one[-1].compute == four[-1].compute
    assert one[-1].regret == four[-1].regret


def test_regret_is_read_at_a_budget() -> None:
    table = Table.of(planted())
    moments = replay(table, "tpe", NoStopper(table.rungs), 20, seed=1)
    assert regret_at(moments, 0.0) is None
    last = regret_at(moments, 20.0)
    assert last is not None
    assert last <= (regret_after(moments, 3) or 9.0)
