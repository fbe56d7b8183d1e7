"""How much may be asked for: by one request, by one key, by all together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.serve.backend import ModelCard
from lmworks.serve.limits import (
    Admission,
    APIError,
    KeyLimits,
    Limits,
    RateLimiter,
    RequestMeter,
    check_model,
    check_params,
    max_answer_tokens,
    size_of,
)

CARD = ModelCard("tiny", 0, context=512, vocab=257, max_seqs=4)


class House:
    """A gate with a clock that stands still until it is moved."""

    def __init__(self, limits: Limits | None = None, **key: int) -> None:
        self.now = 1000.0
        self.rate_limiter = RateLimiter(lambda: self.now)
        self.limits = limits or Limits(queue=10_000)
        self.key = KeyLimits(name="alice", **key)

    @contextmanager
    def inside(self, key: KeyLimits | None = None) -> Iterator[RequestMeter]:
        meter = RequestMeter(self.rate_limiter, key or self.key)
        try:
            meter.begin()
            yield meter
        finally:
            meter.release()

    @contextmanager
    def entered(
        self, prompt: int = 1, max_tokens: int = 1, key: KeyLimits | None = None, answers: int = 1
    ) -> Iterator[Admission]:
        params = SamplingParams(max_tokens=max_tokens, n=answers)
        size = size_of(params, [prompt], 0, True)
        with self.inside(key) as meter, self.rate_limiter.admit(meter, self.limits, CARD, params, size) as admission:
            yield admission

    def enter(self, **request: Any) -> None:
        with self.entered(**request):
            pass

    def comes_and_goes(self, **request: int) -> bool:
        try:
            with self.entered(**request) as admission:
                admission.use(request.get("prompt", 1) + request.get("max_tokens", 1))
        except APIError:
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
def test_limit_exceeded(params: SamplingParams, param: str) -> None:
    with pytest.raises(APIError, match="at most") as refusal:
        check_params(Limits(max_tokens=100), KeyLimits(), params)
    assert (refusal.value.status, refusal.value.param) == (400, param)


def test_limit_is_inclusive() -> None:
    params = SamplingParams(n=16, max_tokens=100, logprobs=20, prompt_logprobs=20, stop=["a" * 256] * 16)
    check_params(Limits(max_tokens=100), KeyLimits(max_tokens=200), params)


def test_limits_per_key() -> None:
    key = KeyLimits(n=2, max_tokens=10)
    for params in (SamplingParams(n=3, max_tokens=1), SamplingParams(max_tokens=11)):
        check_params(Limits(), KeyLimits(), params)
        with pytest.raises(APIError):
            check_params(Limits(), key, params)


def test_max_tokens_is_smallest_limit() -> None:
    assert max_answer_tokens(Limits(), KeyLimits(), 512, 12) == 500
    assert max_answer_tokens(Limits(max_tokens=100), KeyLimits(), 512, 12) == 100
    assert max_answer_tokens(Limits(max_tokens=100), KeyLimits(max_tokens=50), 512, 12) == 50
    assert max_answer_tokens(Limits(), KeyLimits(tokens_per_minute=40), 512, 12) == 28
    assert max_answer_tokens(Limits(), KeyLimits(tokens_per_minute=10), 512, 12) == 1


def test_models_of_key() -> None:
    check_model(KeyLimits(), "tiny")
    check_model(KeyLimits(models=["tiny"]), "tiny")
    with pytest.raises(APIError) as refusal:
        check_model(KeyLimits(models=["tiny"]), "large")
    assert refusal.value.status == 403


# --- many requests ----------------------------------------------------------------------------------------


def test_requests_per_minute_sliding_window() -> None:
    """Not only in those that begin when the clock says so: a bucket that refills would let in nearly twice as many."""
    house, draw, let_in = House(requests_per_minute=20), random.Random(0), []
    for _ in range(3000):
        house.now += draw.expovariate(5.0)
        if house.comes_and_goes():
            let_in.append(house.now)
    spans = [late - early for early, late in zip(let_in, let_in[20:], strict=False)]
    assert min(spans) >= 60.0
    assert len(let_in) >= 20 * (house.now - 1000) / 60 * 0.95  # nor does it let in fewer than it may


def test_retry_after_is_exact() -> None:
    house = House(requests_per_minute=2)
    assert house.comes_and_goes()
    house.now += 20.5
    assert house.comes_and_goes()
    house.now += 1
    with pytest.raises(APIError, match="2 requests a minute: try again in 39 s") as refusal:
        house.enter()
    assert (refusal.value.status, refusal.value.retry_after) == (429, 39)
    house.now += 38
    assert not house.comes_and_goes()
    house.now += 1
    assert house.comes_and_goes()


def test_tokens_are_reserved_and_refunded() -> None:
    house = House(tokens_per_minute=100)
    with house.entered(prompt=20, max_tokens=60) as admission:
        with pytest.raises(APIError, match="tokens a minute"):
            house.enter(prompt=20, max_tokens=1)
        admission.use(20)
        admission.use(5)
    assert house.comes_and_goes(prompt=20, max_tokens=55)
    assert not house.comes_and_goes(prompt=1, max_tokens=1)
    house.now += 60
    assert house.comes_and_goes(prompt=20, max_tokens=80)


def test_late_refund_is_not_counted_twice() -> None:
    house = House(tokens_per_minute=100)
    with house.entered(prompt=20, max_tokens=80):
        house.now += 61
        with house.entered(prompt=50, max_tokens=50):
            pass
    assert house.rate_limiter.usage_by_key["alice"].tokens.total == 0
    assert house.comes_and_goes(prompt=50, max_tokens=50)
    assert not house.comes_and_goes()


def test_request_above_tokens_per_minute_is_rejected() -> None:
    house = House(tokens_per_minute=100)
    with pytest.raises(APIError, match="request fewer") as refusal:
        house.enter(prompt=41, max_tokens=20, answers=3)
    assert (refusal.value.status, refusal.value.retry_after) == (400, None)


def test_concurrent_requests() -> None:
    house = House(concurrent=3)
    with ExitStack() as inside:
        for _ in range(3):
            inside.enter_context(house.entered())
        with pytest.raises(APIError, match="3 requests under way") as refusal:
            house.enter()
        assert (refusal.value.status, refusal.value.code) == (429, "concurrent_requests")
        house.enter(key=KeyLimits(name="bob", concurrent=3))
    assert house.comes_and_goes()


def test_full_queue_rejects() -> None:
    """4 are computed at once, 6 may wait."""
    house = House(Limits(queue=6))
    with ExitStack() as inside:
        for number in range(5):
            inside.enter_context(house.entered(answers=2, key=KeyLimits(name=str(number))))
        with pytest.raises(APIError, match="10 answers are under way") as refusal:
            house.enter()
        assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
    assert house.rate_limiter.open["tiny"] == 0
    assert house.comes_and_goes(answers=10)
    with pytest.raises(APIError, match="at most 10 answers") as refusal:
        house.enter(answers=11)  # alone as well: the engine and its queue hold no more
    assert refusal.value.status == 400


def test_failed_request_releases_its_slot() -> None:
    house = House(concurrent=1, tokens_per_minute=10)
    with pytest.raises(ZeroDivisionError), house.entered(prompt=5, max_tokens=5):
        raise ZeroDivisionError
    assert house.comes_and_goes(prompt=5, max_tokens=5)


def test_changed_limit_keeps_counts() -> None:
    house = House(requests_per_minute=100)
    for _ in range(10):
        assert house.comes_and_goes()
    with pytest.raises(APIError):
        house.enter(key=KeyLimits(name="alice", requests_per_minute=10))
    house.enter(key=KeyLimits(name="alice", requests_per_minute=11))


# --- what is charged and what is too much together --------------------------------------------------------


def test_rejected_request_is_charged() -> None:
    """As a request; and its body, by its length, where nothing else was charged for it."""
    house = House(requests_per_minute=2, tokens_per_minute=1000)
    for _ in range(2):
        with house.inside() as meter:
            meter.bytes = 600  # and then it is found to be wrong
    assert house.rate_limiter.usage_by_key["alice"].tokens.total == 2 * 200
    with pytest.raises(APIError, match="2 requests a minute"):
        house.enter()


def test_encoded_text_is_charged_once() -> None:
    house = House(tokens_per_minute=100)
    with house.inside() as meter:
        meter.bytes = 300
        meter.charge_prompt(40)  # as /tokenize does
    usage = house.rate_limiter.usage_by_key["alice"]
    assert usage.tokens.total == 40
    params = SamplingParams(max_tokens=20)
    with house.inside() as meter:
        meter.charge_prompt(40)
        with house.rate_limiter.admit(meter, house.limits, CARD, params, size_of(params, [40], 0, True)) as admission:
            assert usage.tokens.total == 100
            admission.use(45)
    assert usage.tokens.total == 85
    with house.inside() as meter:
        meter.charge_prompt(40)
        with pytest.raises(APIError, match="try again in 60 s"):  # when it has room again, encoding included
            house.rate_limiter.admit(meter, house.limits, CARD, params, size_of(params, [40], 0, True))
    with pytest.raises(APIError, match="tokens a minute"):
        house.enter()  # now before anything is read
    house.now += 60
    assert house.comes_and_goes(prompt=40, max_tokens=20)


def test_concurrent_answers_of_key() -> None:
    house = House(concurrent=4)
    with pytest.raises(APIError, match="at most 4 answers") as refusal:
        house.enter(answers=5)
    assert refusal.value.status == 400
    with house.entered(answers=3):
        with pytest.raises(APIError, match="3 answers under way and may have 4") as refusal:
            house.enter(answers=2)
        assert refusal.value.status == 429
        house.enter(answers=1)
    assert house.rate_limiter.usage_by_key["alice"].open == 0


def test_combined_limits() -> None:
    params = SamplingParams(max_tokens=10, n=2, logprobs=4, prompt_logprobs=4)
    size = size_of(params, [100, 200], echoed=1000, kept=True)
    assert size.reported == 2 * (300 + 2 * 10) * 5
    assert size.bytes == 2 * (1000 + 2 * 10 * 8 + 320 * 5 * 96) and size.extra == size.bytes - 2 * 2 * 10 * 8
    assert size_of(params, [100, 200], 1000, kept=False).bytes == 0, "a stream is not kept"
    for limits, what in (
        (Limits(reported_logprobs=size.reported - 1), "would report 3200 log-probabilities"),
        (Limits(answer_bytes=size.bytes - 1), f"may come to {size.bytes} bytes"),
    ):
        house = House(limits)
        with house.inside() as meter, pytest.raises(APIError, match=what) as refusal:
            house.rate_limiter.admit(meter, limits, CARD, params, size)
        assert (refusal.value.status, refusal.value.code) == (400, "limit_exceeded")


def test_answers_count_until_sent() -> None:
    limits = Limits(kept_bytes=150_000)
    house, params = House(limits), SamplingParams(max_tokens=40, logprobs=20)
    size = size_of(params, [1], 0, True)
    assert size.extra == 40 * 21 * 96
    with house.inside() as meter:
        with house.rate_limiter.admit(meter, limits, CARD, params, size):
            pass
        with house.inside() as other, pytest.raises(APIError, match="80640 bytes") as refusal:
            house.rate_limiter.admit(
                other, limits, CARD, params, size
            )  # the first has its answer, and does not read it
        assert refusal.value.status == 429
    with house.inside() as other:
        house.rate_limiter.admit(other, limits, CARD, params, size)


def test_lines_of_batches_take_no_live_requests_place() -> None:
    """Neither in the queue nor of the key: a batch that fills its own room leaves all of the other."""
    house = House(Limits(queue=2), concurrent=3)  # and 4 that run
    params = SamplingParams(max_tokens=1, n=1)
    size = size_of(params, [1], 0, True)
    with ExitStack() as stack:

        def batch_line() -> None:
            meter = RequestMeter(house.rate_limiter, house.key, batch=True)
            meter.begin()
            stack.callback(meter.release)
            stack.enter_context(house.rate_limiter.admit(meter, house.limits, CARD, params, size))

        for _ in range(6):
            batch_line()
        with pytest.raises(APIError, match="as many as may be"):
            batch_line()
        for _ in range(3):
            stack.enter_context(house.entered())
        with pytest.raises(APIError, match="under way"):
            house.enter()
    assert not any(house.rate_limiter.open.values()) and not any(house.rate_limiter.batched.values())
    house.enter()
