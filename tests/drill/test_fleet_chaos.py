"""Random faults: what a trial draws and what it finds wrong; and, slowly, twenty trials in a real fleet."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lmworks.drill import chaos
from lmworks.drill.chaos import (
    FAULTS,
    SERVERS,
    STREAMS,
    TRIALS,
    Bill,
    Harness,
    Result,
    Trial,
    asked_of_trials,
    problems_of,
    read_bills,
    read_results,
    run_chaos,
    wrongly_billed,
)  # fmt: skip
from lmworks.drill.chaos_report import as_markdown
from lmworks.drill.load import Outcome
from lmworks.gateway.tenants.database import open_database
from lmworks.gateway.tenants.store import Store
from lmworks.gateway.tenants.usage import UsageRecord

ASKED = asked_of_trials()


def test_trials_follow_from_seed_and_number_and_leave_a_server_alone() -> None:
    drawn = [Trial.draw(5, number, len(ASKED)) for number in range(200)]
    assert drawn == [Trial.draw(5, number, len(ASKED)) for number in range(200)]
    assert drawn[3] != Trial.draw(6, 3, len(ASKED))
    assert {one.fault for trial in drawn for one in trial.planted} == {fault.name for fault in FAULTS}
    for trial in drawn:
        servers = [one.server for one in trial.planted]
        assert len(set(servers)) == len(servers) < SERVERS


def result_of(outcomes: list[Outcome], counted: int) -> Result:
    expected = sum(ASKED[one.question].max_tokens for one in outcomes)
    return Result(0, 5, [], {}, 0, 0, expected, sum(one.tokens for one in outcomes), counted, 0.0, 1.0)


def good(question: int) -> Outcome:
    return Outcome("chaos", 0.0, question, "ok", 200, first=0.1, tokens=ASKED[question].max_tokens)


def test_what_is_wrong_with_a_trial() -> None:
    outcomes = [good(number) for number in range(STREAMS)]
    total = sum(ASKED[number].max_tokens for number in range(STREAMS))
    assert problems_of(result_of(outcomes, total), outcomes, ASKED) == []
    assert "the gateway counted" in problems_of(result_of(outcomes, total - 1), outcomes, ASKED)[0]
    outcomes[3].end, outcomes[3].text = "wrong", "abc"
    assert problems_of(result_of(outcomes, total), outcomes, ASKED) == ["wrong: 200  after 3 characters of question 3"]
    outcomes[3] = good(3)
    outcomes[3].tokens -= 1
    assert "the usage says" in problems_of(result_of(outcomes, total), outcomes, ASKED)[0]
    assert "11 of 12" in problems_of(result_of(outcomes[:-1], total), outcomes[:-1], ASKED)[0]
    again = [good(number) for number in range(STREAMS)]
    assert problems_of(result_of(again, 7), again, ASKED, gateway_killed=True) == []  # it counts from 0 again


def test_what_is_wrong_with_bills() -> None:
    most = ASKED[0].max_tokens
    whole = Outcome("chaos", 0.0, 0, "ok", tokens=most, id="t-0-1")
    cut = Outcome("chaos", 0.0, 0, "lost", text="abcde", id="t-0-0")
    refused = Outcome("chaos", 0.0, 0, "refused", 503, id="t-1-0")
    right = [Bill("t-0-0.aa", 6, "interrupted"), Bill("t-0-1.bb", most, "finished")]
    every = [cut, whole, refused]
    assert wrongly_billed(every, right, ASKED) == []
    for bills, problem in (
        ([right[0]], "t-0-1 has"),  # nothing
        ([*right, Bill("t-0-1.cc", most, "finished")], "t-0-1 is billed 2 times"),
        ([right[0], Bill("t-0-1.bb", most - 1, "finished")], f"t-0-1 has {most} tokens"),
        ([Bill("t-0-0.aa", 4, "interrupted"), right[1]], "at least 5 tokens were read"),
        ([Bill("t-0-0.aa", most + 1, "interrupted"), right[1]], "t-0-0: at least 5"),
        ([right[1]], "t-0-0: at least 5"),
        ([*right, Bill("t-1-0.dd", 3, "failed")], "t-1-0 was refused"),
        ([*right, Bill("t-9-0.dd", 3, "finished")], "nobody asked"),
    ):
        (found,) = wrongly_billed(every, bills, ASKED)
        assert problem in found


def test_bills_are_read_from_the_gateways_store(tmp_path: Path) -> None:
    store = Store(open_database(f"sqlite:///{tmp_path}/gateway.db"))
    store.prepare()
    records = [
        UsageRecord(f"chaos-5-{trial}-0-0.aa", 1.0, 2.0, "chaos", "k", "m", "p", "/v1/completions",
                    3, 10 + trial, 0, 0, "finished", False) for trial in (1, 11, 1)
    ]  # fmt: skip
    store.add_usage(records)
    assert read_bills(tmp_path / "gateway.db", "chaos-5-1-") == ([Bill("chaos-5-1-0-0.aa", 11, "finished")], True)
    with store.database.transaction() as cursor:
        cursor.execute("UPDATE spent SET tokens = tokens + 1")
    assert not read_bills(tmp_path / "gateway.db", "chaos-5-1-")[1]
    store.database.close()


def test_trials_that_are_done_stay_done(tmp_path: Path) -> None:
    done = [result_of([good(0)], 0) for _ in range(2)]
    done[1].trial, done[1].problems = 1, ["lost: 200"]
    lines = [json.dumps(asdict(one)) for one in done]
    (tmp_path / TRIALS).write_text("\n".join([*lines, lines[0][:40]]))  # the last one was cut short by a kill
    assert read_results(tmp_path) == done
    assert run_chaos(2, 5, tmp_path, lambda result, total: pytest.fail("it is done")) == done
    assert "2 trials, 1 with a problem" in as_markdown(done)


def test_a_run_that_was_killed_goes_on_with_a_new_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tenants are in the store already, and its journal has requests that would be billed again."""
    monkeypatch.setattr(chaos, "train_model", lambda folder: folder)
    (tmp_path / "fleet").mkdir()
    for name in ("fleet/gateway.db", TRIALS):
        (tmp_path / name).touch()
    Harness(tmp_path)
    assert not (tmp_path / "fleet").exists() and (tmp_path / TRIALS).exists()


@pytest.mark.slow
def test_twenty_trials_lose_nothing(tmp_path: Path) -> None:
    results = run_chaos(20, 7, tmp_path, lambda result, total: None)
    assert [one.problems for one in results] == [[]] * 20
    assert sum(one.migrations for one in results) > 0
