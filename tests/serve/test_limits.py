"""How much may be asked for: by one request, by one key, by all together."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from lmworks.engine.params import SamplingParams
from lmworks.serve.backend import ModelCard
from lmworks.serve.limits import (
    Entry,
    Gate,
    KeyLimits,
    Limits,
    Refusal,
    check_model,
    check_params,
    longest_answer,
)

CARD = ModelCard("tiny", 0, context=512, vocab=257, max_seqs=4)


class House:
    """A gate with a clock that stands still until it is moved."""

    def __init__(self, limits: Limits | None = None, **key: int) -> None:
        self.now = 1000.0
        self.gate = Gate(lambda: self.now)
        self.limits = limits or Limits(queue=10_000)
        self.key = KeyLimits(name="alice", **key)

    def enter(self, prompt: int = 1, max_tokens: int = 1, key: KeyLimits | None = None, answers: int = 1) -> Entry:
        params = SamplingParams(max_tokens=max_tokens, n=answers)
        return self.gate.enter(self.limits, key or self.key, CARD, params, [prompt])

    def comes_and_goes(self, **request: int) -> bool:
        try:
            with self.enter(**request) as entry:
                entry.use(request.get("prompt", 1) + request.get("max_tokens", 1))
        except Refusal:
            return False
        return True


# --- one request ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(n=17), "n"),
        (SamplingParams(n=1, best_of=17), "best_of"),
        (SamplingParams(max_tokens=101), "max_tokens"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(prompt_logprobs=21), "prompt_logprobs"),
        (SamplingParams(stop=["a"] * 17), "stop"),
        (SamplingParams(stop=["a"] * 9, stop_token_ids=range(9)), "stop"),
        (SamplingParams(stop="a" * 257), "stop"),
        (SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
    ],
)
def test_one_more_than_allowed_is_refused(params: SamplingParams, param: str) -> None:
    with pytest.raises(Refusal, match="at most") as refusal:
        check_params(Limits(max_tokens=100), KeyLimits(), params)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_as_much_as_allowed_is_let_in() -> None:
    params = SamplingParams(n=16, max_tokens=100, logprobs=20, prompt_logprobs=20, stop=["a" * 256] * 16)
    check_params(Limits(max_tokens=100), KeyLimits(max_tokens=200), params)


def test_a_key_may_have_less_than_others() -> None:
    key = KeyLimits(n=2, max_tokens=10)
    for params in (SamplingParams(n=3, max_tokens=1), SamplingParams(max_tokens=11)):
        check_params(Limits(), KeyLimits(), params)
        with pytest.raises(Refusal):
            check_params(Limits(), key, params)


def test_the_longest_answer_is_the_smallest_of_all_limits() -> None:
    assert longest_answer(Limits(), KeyLimits(), 512, 12) == 500
    assert longest_answer(Limits(max_tokens=100), KeyLimits(), 512, 12) == 100
    assert longest_answer(Limits(max_tokens=100), KeyLimits(max_tokens=50), 512, 12) == 50
    assert longest_answer(Limits(), KeyLimits(tokens_per_minute=40), 512, 12) == 28
    assert longest_answer(Limits(), KeyLimits(tokens_per_minute=10), 512, 12) == 1


def test_models_that_a_key_may_use() -> None:
    check_model(KeyLimits(), "tiny")
    check_model(KeyLimits(models=["tiny"]), "tiny")
    with pytest.raises(Refusal) as refusal:
        check_model(KeyLimits(models=["tiny"]), "large")
    assert refusal.value.status == 403


# --- many requests ----------------------------------------------------------------------------------------


def test_requests_in_any_minute() -> None:
    """Not only in those that begin when the clock says so: a bucket that refills would let in nearly twice as many."""
    house, draw, let_in = House(requests_per_minute=20), random.Random(0), []
    for _ in range(3000):
        house.now += draw.expovariate(5.0)
        if house.comes_and_goes():
            let_in.append(house.now)
    spans = [late - early for early, late in zip(let_in, let_in[20:], strict=False)]
    assert min(spans) >= 60.0
    assert len(let_in) >= 20 * (house.now - 1000) / 60 * 0.95  # nor does it let in fewer than it may


def test_who_waits_as_long_as_told_comes_in() -> None:
    house = House(requests_per_minute=2)
    assert house.comes_and_goes()
    house.now += 20.5
    assert house.comes_and_goes()
    house.now += 1
    with pytest.raises(Refusal, match="2 requests a minute: try again in 39 s") as refusal:
        house.enter()
    assert (refusal.value.status, refusal.value.retry_after) == (429, 39)
    house.now += 38
    assert not house.comes_and_goes()
    house.now += 1
    assert house.comes_and_goes()


def test_tokens_are_charged_at_most_and_given_back() -> None:
    house = House(tokens_per_minute=100)
    with house.enter(prompt=20, max_tokens=60) as entry:
        with pytest.raises(Refusal, match="tokens a minute"):
            house.enter(prompt=20, max_tokens=1)
        entry.use(20)
        entry.use(5)
    assert house.comes_and_goes(prompt=20, max_tokens=55)
    assert not house.comes_and_goes(prompt=1, max_tokens=1)
    house.now += 60
    assert house.comes_and_goes(prompt=20, max_tokens=80)


def test_what_is_given_back_late_is_not_given_twice() -> None:
    house = House(tokens_per_minute=100)
    with house.enter(prompt=20, max_tokens=80):
        house.now += 61
        with house.enter(prompt=50, max_tokens=50):
            pass
    assert house.gate.ledgers["alice"].tokens.total == 0
    assert house.comes_and_goes(prompt=50, max_tokens=50)
    assert not house.comes_and_goes()


def test_more_tokens_than_a_minute_holds_are_never_let_in() -> None:
    house = House(tokens_per_minute=100)
    with pytest.raises(Refusal, match="ask for fewer") as refusal:
        house.enter(prompt=41, max_tokens=20, answers=3)
    assert (refusal.value.status, refusal.value.retry_after) == (400, None)


def test_requests_at_once() -> None:
    house = House(concurrent=3)
    with ExitStack() as inside:
        for _ in range(3):
            inside.enter_context(house.enter())
        with pytest.raises(Refusal, match="3 requests under way") as refusal:
            house.enter()
        assert (refusal.value.status, refusal.value.code) == (429, "concurrent_requests")
        assert house.enter(key=KeyLimits(name="bob", concurrent=3))
    assert house.comes_and_goes()


def test_a_full_house_takes_no_more() -> None:
    """4 are computed at once, 6 may wait."""
    house = House(Limits(queue=6))
    with ExitStack() as inside:
        for number in range(5):
            inside.enter_context(house.enter(answers=2, key=KeyLimits(name=str(number))))
        with pytest.raises(Refusal, match="10 answers are under way") as refusal:
            house.enter()
        assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
    assert house.gate.open["tiny"] == 0
    assert house.comes_and_goes(answers=100)  # alone, it waits for nobody but itself


def test_a_request_that_fails_leaves_as_others_do() -> None:
    house = House(concurrent=1, tokens_per_minute=10)
    with pytest.raises(ZeroDivisionError), house.enter(prompt=5, max_tokens=5):
        raise ZeroDivisionError
    assert house.comes_and_goes(prompt=5, max_tokens=5)


def test_a_limit_that_changes_counts_what_was() -> None:
    house = House(requests_per_minute=100)
    for _ in range(10):
        assert house.comes_and_goes()
    with pytest.raises(Refusal):
        house.enter(key=KeyLimits(name="alice", requests_per_minute=10))
    assert house.enter(key=KeyLimits(name="alice", requests_per_minute=11))
