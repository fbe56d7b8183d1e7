"""What cannot be served is refused with an error that says why, alone: the others go on as if it had never come."""

from __future__ import annotations

import pytest
from fake_device import FakeDevice, alone

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.spec import EngineSpec, SpecError

VOCAB = 50
SPEC = EngineSpec(block=4, blocks=5, context=32, max_seqs=8, max_batch_tokens=16)

BAD = {
    "empty": (Request([], SamplingParams()), "the prompt is empty"),
    "too long": (Request([1] * 32, SamplingParams()), r"32 tokens.*engine\.context = 32"),
    "pool too small": (Request([1] * 10, SamplingParams(max_tokens=12)), r"6 blocks of 4.*has 5.*engine\.blocks"),
    "unknown adapter": (Request([1], SamplingParams(adapter="frnch")), "'frnch' is not loaded.*mean 'french'"),
    "token too large": (Request([1, VOCAB], SamplingParams()), "token 50: the model's tokens are 0 to 49"),
    "token negative": (Request([-1], SamplingParams()), "token -1"),
    "no token": (Request([1, 1.5], SamplingParams()), r"token 1\.5: the model's tokens"),  # type: ignore[list-item]
    "tenant": (Request([1], SamplingParams(), tenant=None), "tenant = None: the name"),  # type: ignore[arg-type]
    "no priority": (
        Request([1], SamplingParams(), priority=float("nan")),  # type: ignore[arg-type]
        "priority = nan: a whole number",
    ),
    "stop token": (Request([1], SamplingParams(stop_token_ids=[99])), "stop_token_ids names token 99"),
    "bias": (Request([1], SamplingParams(logit_bias={77: 1.0})), "logit_bias names token 77"),
    "priority": (Request([1], SamplingParams(), priority=10**6), "priority = 1000000"),
    "stop without text": (Request([1], SamplingParams(stop="x")), "need a tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_request_does_not_affect_others(name: str) -> None:
    bad, message = BAD[name]
    engine = Engine(FakeDevice(SPEC, VOCAB))
    engine.adapters.add("french")
    good = [Request([1, seed], SamplingParams(max_tokens=8, seed=seed)) for seed in (1, 2)]
    for request in (good[0], bad, good[1]):
        engine.add(request)
    results = {piece.request.id: piece.result for piece in engine.run()}
    refused = results.pop(bad.id)
    assert refused is not None and refused.finish_reason == "error" and refused.token_ids == []
    with pytest.raises(SpecError, match=message) as raised:
        engine.check(bad)
    assert refused.error == str(raised.value)
    for request in good:
        result = results[request.id]
        assert result is not None and result.token_ids == alone(request.prompt, request.params.seed or 0, 8, VOCAB)


def test_all_answers_of_rejected_request_have_error() -> None:
    engine = Engine(FakeDevice(SPEC, VOCAB))
    engine.add(Request([], SamplingParams(n=3)))
    [piece] = engine.run()
    assert piece.result is not None and [answer.error is not None for answer in piece.result.answers] == [True] * 3


def test_largest_fitting_request_is_served() -> None:
    """Five blocks of four hold 20 tokens; the last token of an answer is never computed."""
    engine = Engine(FakeDevice(SPEC, VOCAB))
    engine.add(Request([1] * 10, SamplingParams(max_tokens=11, seed=1)))
    [piece] = engine.run()
    assert piece.result is not None and piece.result.token_ids == alone([1] * 10, 1, 11, VOCAB)


def test_duplicate_request_id_is_rejected() -> None:
    engine = Engine(FakeDevice(SPEC, VOCAB))
    for _ in range(2):
        engine.add(Request([1], SamplingParams(max_tokens=4, seed=1), id=10**6))
    refused, served = (piece.result for piece in engine.run())
    assert refused is not None and "id = 1000000 is running" in (refused.error or "")
    assert served is not None and served.token_ids == alone([1], 1, 4, VOCAB)
