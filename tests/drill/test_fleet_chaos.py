"""Random faults: what a trial draws and what it finds wrong; and, slowly, twenty trials in a real fleet."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lmworks.drill.chaos import (
    FAULTS,
    SERVERS,
    STREAMS,
    TRIALS,
    Result,
    Trial,
    asked_of_trials,
    problems_of,
    read_results,
    run_chaos,
)  # fmt: skip
from lmworks.drill.chaos_report import as_markdown
from lmworks.drill.load import Outcome

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


def test_trials_that_are_done_stay_done(tmp_path: Path) -> None:
    done = [result_of([good(0)], 0) for _ in range(2)]
    done[1].trial, done[1].problems = 1, ["lost: 200"]
    lines = [json.dumps(asdict(one)) for one in done]
    (tmp_path / TRIALS).write_text("\n".join([*lines, lines[0][:40]]))  # the last one was cut short by a kill
    assert read_results(tmp_path) == done
    assert run_chaos(2, 5, tmp_path, lambda result, total: pytest.fail("it is done")) == done
    assert "2 trials, 1 with a problem" in as_markdown(done)


@pytest.mark.slow
def test_twenty_trials_lose_nothing(tmp_path: Path) -> None:
    results = run_chaos(20, 7, tmp_path, lambda result, total: None)
    assert [one.problems for one in results] == [[]] * 20
    assert sum(one.migrations for one in results) > 0
