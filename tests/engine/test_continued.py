"""Answers that one engine began and another goes on with: the same tokens and the same text, wherever they were cut."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import OutputDelta, Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

MODEL = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=257, context=512)
SPEC = EngineSpec(device="cpu", block=16, blocks=64, context=512, max_seqs=8, max_batch_tokens=256)
PROMPT = list(b"The quick brown fox")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


@cache
def engine(seed: int) -> Engine:
    """Equal weights, another seed for requests without one."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    model.init_weights(0)
    return Engine(ModelRunner(model.eval(), SPEC, torch.device("cpu"), 257), ByteTokenizer(), seed=seed)


def stream(params: SamplingParams, generated: tuple[list[int], ...] = (), seed: int = 0) -> list[OutputDelta]:
    one, deltas = engine(seed), []
    one.add(Request(PROMPT, params, stream=True, generated=generated))
    while one.busy:
        deltas += one.step()
    return deltas


def joined(deltas: list[OutputDelta], index: int = 0) -> tuple[list[int], str, str | None]:
    own = [delta for delta in deltas if delta.index == index]
    tokens = [token for delta in own for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in own), own[-1].finish_reason


CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "seeded": SamplingParams(temperature=1.5, seed=7, max_tokens=24),
    "penalties": SamplingParams(
        temperature=1, seed=3, max_tokens=24, frequency_penalty=1.5, repetition_penalty=1.5, min_tokens=20
    ),
    "grammar": SamplingParams(temperature=1, seed=11, max_tokens=60, json_schema=SCHEMA),
    "two answers": SamplingParams(temperature=1.2, seed=5, max_tokens=16, n=2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_continued_answer_is_the_undisturbed_one(name: str) -> None:
    """The engine that goes on has another seed of its own."""
    params = CASES[name]
    whole = stream(params)
    for cut in (1, 2, len(whole) // 2, len(whole) - 1, len(whole)):
        before = whole[:cut]
        generated = tuple(joined([*before, *filler(params)], index)[0] for index in range(params.n))
        after = stream(params, generated, seed=99)
        for index, tokens in enumerate(generated):
            replayed = next((delta for delta in after if delta.index == index and tokens), None)
            rest = [delta for delta in after if delta.index == index and delta is not replayed]
            if replayed is not None:
                assert replayed.token_ids == tokens
                assert replayed.text == joined([*before, *filler(params)], index)[1]
            found = joined([*before, *rest, *([replayed] if not rest and replayed else [])], index)
            expected = joined(whole, index)
            assert found[2] == expected[2]
            if rest:
                assert found == expected
        result = next(delta.result for delta in after if delta.result is not None)
        assert [answer.token_ids for answer in result.answers] == [joined(whole, i)[0] for i in range(params.n)]
        assert [answer.text for answer in result.answers] == [joined(whole, i)[1] for i in range(params.n)]


def filler(params: SamplingParams) -> list[OutputDelta]:
    """One empty delta an answer: none of it may have come before the cut."""
    return [OutputDelta(None, index, []) for index in range(params.n)]  # type: ignore[arg-type]


def test_a_stop_string_over_the_cut_is_found() -> None:
    free = joined(stream(SamplingParams(temperature=0, max_tokens=24)))
    stop = free[1][9:13]
    params = SamplingParams(temperature=0, max_tokens=24, stop=(stop,))
    whole = stream(params)
    for cut in range(1, len(whole)):
        sent = joined(whole[:cut])
        replayed, *rest = stream(params, (sent[0],))
        assert replayed.text == sent[1]
        assert sent[1] + "".join(delta.text for delta in rest) == joined(whole)[1]
        assert rest[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("generated", "params", "message"),
    [
        (([1], [2]), SamplingParams(max_tokens=8), "all n = 1 together"),
        (([300],), SamplingParams(max_tokens=8), "not below 257"),
        (([1] * 9,), SamplingParams(max_tokens=8), "9 tokens, more than max_tokens"),
        (([1],), SamplingParams(max_tokens=8, best_of=2), "without best_of"),
    ],
)
def test_what_cannot_be_continued(generated: tuple[list[int], ...], params: SamplingParams, message: str) -> None:
    (delta,) = stream(params, generated)
    assert delta.result is not None and message in (delta.result.error or "")
