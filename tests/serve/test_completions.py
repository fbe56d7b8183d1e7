"""`/v1/completions` and the tokenizer's endpoints, against the model computed by hand."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from api_server import MODEL, Api, twin

from lmworks import checkpoint
from lmworks.cli.serve import load_engine_process
from lmworks.data.fim import FillInMiddle, Sentinels
from lmworks.data.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from lmworks.engine.core.request import Logprob, Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.model import GPT
from lmworks.record import RunFolder
from lmworks.serve.app import make_app
from lmworks.serve.backend import EngineRequest, Event, ModelCard, PromptTokenizer, State, Usage
from lmworks.serve.completions import logprobs_of
from lmworks.serve.keys import Settings
from lmworks.serve.prompts import encode_infilling
from lmworks.serve.response_bodies import Offsets, TokenTexts
from lmworks.serve.serving import LocalModel, Serving
from lmworks.serve.workers import PromptProcessor
from lmworks.spec.fim import FimSpec
from tiny import make_spec

PROMPT = "The quick brown fox"


def by_hand(ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the token after each place: (places, vocabulary)."""
    with torch.no_grad():
        return twin()(torch.tensor([ids]))[0, :, :257].float().log_softmax(-1)


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_prompt_logprobs(api: Api, prompt: str | list[int], max_tokens: int, stream: bool) -> None:
    """As lm-eval asks: echo, logprobs = 1, one token or none."""
    wishes = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    found = streamed(api, **wishes)[0]["choices"][0] if stream else api.complete(**wishes)["choices"][0]
    ids = list(PROMPT.encode())
    expected = by_hand(ids)
    scores, top = found["logprobs"]["token_logprobs"], found["logprobs"]["top_logprobs"]
    assert found["text"].startswith(PROMPT) and len(scores) == len(ids) + max_tokens
    assert scores[0] is None and top[0] is None
    for place in range(1, len(ids)):
        assert scores[place] == pytest.approx(float(expected[place - 1, ids[place]]), abs=1e-4)
        assert max(top[place].values()) == pytest.approx(float(expected[place - 1].max()), abs=1e-4)
    assert found["logprobs"]["tokens"][: len(ids)] == list(PROMPT)
    assert found["logprobs"]["text_offset"][: len(ids)] == list(range(len(ids)))


def streamed(api: Api, **wishes: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "Hello", "temperature": 0, "stream": True} | wishes
    with api.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_echo_without_logprobs(api: Api) -> None:
    plain = api.complete(prompt=PROMPT, max_tokens=5)["choices"][0]
    echoed = api.complete(prompt=PROMPT, max_tokens=5, echo=True)["choices"][0]
    assert echoed["text"] == PROMPT + plain["text"] and echoed["logprobs"] is None
    chunks = streamed(api, prompt=PROMPT, max_tokens=5, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["text"]
    bare = api.complete(prompt=PROMPT, max_tokens=0, echo=True)
    assert bare["choices"][0]["text"] == PROMPT and bare["usage"]["completion_tokens"] == 0


def test_stop_string(api: Api) -> None:
    """A model that can write nothing but `ab`."""
    shape = {"guided_regex": "(ab){20}", "max_tokens": 60, "prompt": "x"}
    assert api.complete(**shape)["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "ab" * 20, "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert api.complete(**shape, stop="ba")["choices"][0]["text"] == "a"
    assert api.complete(**shape, stop=["ba"], include_stop_str_in_output=True)["choices"][0]["text"] == "aba"
    chunks = streamed(api, **shape, stop="ba")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a"
    assert api.complete(prompt="x", guided_choice=["yes", "no"])["choices"][0]["text"] in ("yes", "no")


def test_best_of_returns_most_likely(api: Api) -> None:
    wishes = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    every = api.complete(**wishes, n=8)["choices"]
    best = api.complete(**wishes, n=1, best_of=8)
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    assert best["choices"][0]["text"] == every[scores.index(max(scores))]["text"]
    assert best["usage"]["completion_tokens"] == 48


def test_repeated_prompt_hits_prefix_cache(api: Api) -> None:
    prompt = list(range(200))
    assert api.complete(prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert api.complete(prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 176


def test_tokens_and_texts(api: Api) -> None:
    found = api.post("/tokenize", {"prompt": "Hé"}).json()
    assert found == {"count": 3, "max_model_len": 512, "tokens": list("Hé".encode())}
    assert api.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Hé"}
    info = api.http.get("/tokenizer_info").json()
    assert info["vocab_size"] == 257 and "messages" in info["chat_template"]
    assert api.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"] == [256]
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert "<user>Hi" in bytes(chat["tokens"]).decode()


class Recording:
    """A backend that answers at once, and remembers what it was asked."""

    name = "base"
    card = ModelCard("base", 1, 100, 257, adapters=("kind", "rude"), max_seqs=4)
    prompt_tokenizer = PromptTokenizer(ByteTokenizer())
    state = State(alive=True, ready=True)

    def __init__(self) -> None:
        self.asks: list[EngineRequest] = []

    async def stream(self, ask: EngineRequest) -> AsyncGenerator[Event, None]:
        self.asks.append(ask)
        yield Event(0, [65], "A", None, "length", final=Usage(len(ask.prompt), 1, 0))

    async def start(self) -> None: ...

    async def drain(self, seconds: float) -> int:
        return 0

    async def close(self) -> None: ...


def test_adapter_as_model() -> None:
    backend = Recording()
    transport = httpx.ASGITransport(make_app(Serving(Settings(), [LocalModel(backend)])))

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            bodies = [{"model": name, "prompt": "x"} for name in ("base", "kind", "strange")]
            return [await client.get("/v1/models"), *[await client.post("/v1/completions", json=one) for one in bodies]]

    listed, *found = asyncio.run(ask())
    assert {model["id"]: model["parent"] for model in listed.json()["data"]} == {
        "base": None, "kind": "base", "rude": "base",
    }  # fmt: skip
    assert [answer.status_code for answer in found] == [200, 200, 404]
    assert [one.params.adapter for one in backend.asks] == [None, "kind"]


def test_suffix_is_infilled() -> None:
    """Between the sentinels of the model; the special tokens that prompts begin with stay first, and its end stops."""
    backend = Recording()
    backend.prompt_tokenizer = PromptTokenizer(ByteTokenizer(), sentinels=Sentinels(260, 262, 261, 263, joined=True))
    transport = httpx.ASGITransport(make_app(Serving(Settings(), [LocalModel(backend)])))
    wishes = [
        {"prompt": "a(", "suffix": ")b"},
        {"prompt": ["a(", "c"], "suffix": "", "stop_token_ids": [7]},
        {"prompt": [97], "suffix": "é"},
        {"prompt": "a", "suffix": "x" * 20_000},
        {"prompt": "a", "suffix": "b", "echo": True},
    ]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return [await client.post("/v1/completions", json={"model": "base", **one}) for one in wishes]

    *found, long, echoed = asyncio.run(ask())
    assert [answer.status_code for answer in found] == [200, 200, 200]
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (echoed.status_code, echoed.json()["error"]["param"]) == (400, "echo")
    prompts = [
        [260, 97, 40, 262, 41, 98, 261],
        [260, 97, 40, 262, 261],
        [260, 99, 262, 261],
        [260, 97, 262, 195, 169, 261],
    ]
    assert [list(one.prompt) for one in backend.asks] == prompts
    assert [tuple(one.params.stop_token_ids) for one in backend.asks] == [(263,), (7, 263), (7, 263), (263,)]


def test_other_files_stay_before_the_sentinels() -> None:
    """As the loader has trained on a repository: the last file alone is an infilling example."""
    tokenizer = ByteTokenizer()
    spec = FimSpec(rate=1.0, spm_rate=0.0, split="line")
    made = FillInMiddle(spec, tokenizer, seed=0)
    mark = tokenizer.token_id("<file_sep>")
    assert mark is not None
    trained = made.example([mark, *b"b.py\nx\ny\nz\n", tokenizer.eot], [0.0, 1.0, 0.2, 0.6])
    assert trained.index(made.sentinels.prefix) == 1
    prompted, _ = encode_infilling(
        PromptProcessor("m", PromptTokenizer(tokenizer, sentinels=made.sentinels)),
        [[mark, *b"a.py\n1\n", mark, *b"b.py\n"]], "z\n", (None, True),
    )  # fmt: skip
    other = [mark, *b"a.py\n1\n"]
    assert list(prompted[0]) == other + trained[: trained.index(made.sentinels.middle) + 1]


def test_suffix_of_a_model_that_does_not_infill(api: Api) -> None:
    answer = api.post("/v1/completions", {"model": MODEL, "prompt": "a", "suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")
    assert "was not trained to infill" in answer.json()["error"]["message"]


def test_single_tokens_as_text() -> None:
    """Half characters are told apart; a special token has its name."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(train_bpe(["the cat and the hat"] * 50, 300))
    texts = TokenTexts(FileTokenizer(inner, 0))
    ids = inner.encode(" thé", add_special_tokens=False).ids
    assert [texts.text(token) for token in ids][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(texts.bytes(token) or b"" for token in ids) == " thé".encode()
    assert texts.text(0) == "<|endoftext|>" and texts.bytes(0) is None
    found = logprobs_of(texts, [Logprob(ids[0], -1.0, ((ids[0], -1.0), (0, -math.inf)))], Offsets(texts, 7))
    assert found["top_logprobs"] == [{texts.text(ids[0]): -1.0, "<|endoftext|>": -9999.0}]
    assert found["text_offset"] == [7]
    places = Offsets(texts)
    text = inner.decode(ids)
    assert [places.next(token) for token in [*ids, 0]][-4:] == [len(text) - 2, len(text) - 1, len(text) - 1, len(text)]


def test_top_k_minus_one(api: Api) -> None:
    """As vLLM has it."""
    wishes = {"seed": 5, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    texts = [api.complete(**wishes, **more)["choices"][0]["text"] for more in ({"top_k": -1}, {"top_k": 0}, {})]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("rate", "infills"), [(0.5, True), (0.0, False)])
def test_a_run_infills_with_the_sentinels_that_it_was_trained_with(
    dataset: Path, tmp_path: Path, rate: float, infills: bool
) -> None:
    spec = make_spec(dataset, f"data.fim.rate={rate}", "model.vocab=272")
    run = RunFolder.create(tmp_path / "mine", spec)
    state = {"model": GPT(spec.model, seed=1).state_dict()}
    checkpoint.save(run.checkpoints, 1, state, {"spec": spec.to_dict(), "cursor": 1})
    served = load_engine_process(str(run.path), {"device": "cpu"}, None, 0, {})
    expected = Sentinels.of(FimSpec(), ByteTokenizer())
    assert served.sentinels == (expected if infills else None)
    if infills:
        prompt = expected.prompt(list(b"a("), list(b")b"))
        request = Request(prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        served.engine.add(request)
        (result,) = [delta.result for delta in served.engine.run() if delta.result is not None]
        ids = list(prompt)
        model = GPT(spec.model, seed=1).eval()
        with torch.no_grad():
            for _ in range(3):
                ids.append(int(model(torch.tensor([ids]))[0, -1, :260].argmax()))
        assert result.answers[0].token_ids == ids[len(prompt) :]
