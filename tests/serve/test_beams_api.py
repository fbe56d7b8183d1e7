"""Beams over HTTP are those of the engine, which are those of transformers (tests/engine/test_beam_search.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api_server import MODEL, Api, twin

from lmworks.engine.beam_search import search_steps

PROMPT = [72, 105, 44, 32]
EOS = 256


def by_hand(prompt: list[int], width: int, most: int, penalty: float, ends: tuple[int, ...]) -> list[list[int]]:
    """The same search over the model itself, without an engine."""
    model, steps = twin(), search_steps(prompt, ends, width, most, penalty)
    asked = next(steps)
    while True:
        tops = []
        for sequence in asked:
            with torch.no_grad():
                logprobs = model(torch.tensor([sequence]))[0, -1, :257].float().log_softmax(-1)
            values, tokens = logprobs.topk(2 * width)
            tops.append(list(zip(tokens.tolist(), values.tolist(), strict=True)))
        try:
            asked = steps.send(tops)
        except StopIteration as end:
            return [list(beam.token_ids) for beam in end.value]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0)])
def test_beams_are_those_of_the_model(api: Api, width: int, penalty: float) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "n": width, "use_beam_search": True}
    more = {"length_penalty": penalty, "return_token_ids": True}
    answer = api.post("/v1/completions", body | more).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert found == by_hand(PROMPT, width, 6, penalty, (EOS,))
    assert [choice["index"] for choice in answer["choices"]] == list(range(width))
    assert answer["usage"]["completion_tokens"] == sum(map(len, found))
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "stop" if tokens[-1] == EOS else "length" for tokens in found
    ]
    assert api.serving.rate_limiter.open[MODEL] == 0


def test_beams_of_a_chat_and_of_several_prompts(api: Api) -> None:
    body = {"model": MODEL, "max_tokens": 3, "n": 2, "use_beam_search": True}
    chat = api.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert len(chat["choices"]) == 2 and chat["choices"][0]["message"]["role"] == "assistant"
    prompts = [PROMPT, [80, 81]]
    answer = api.post("/v1/completions", body | {"prompt": prompts, "return_token_ids": True}).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert found == [tokens for prompt in prompts for tokens in by_hand(prompt, 2, 3, 1.0, (EOS,))]


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop": ["x"]}, "stop"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"n": 17}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_beams_do_not_know_is_refused(api: Api, wishes: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "use_beam_search": True}
    error = api.post("/v1/completions", body | wishes)
    assert error.status_code == 400 and error.json()["error"]["param"] == param
