"""`/v1/embeddings`, `/score`, `/rerank` over HTTP: vectors of a forward pass by hand, through the official client."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from api_server import MODEL, Api, House, twin
from openai import DefaultHttpxClient, OpenAI

from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.limits import APIError
from lmworks.serve.serving import LocalModel

TEXTS = ["A cat sat.", "é", "A text that is longer than one block of the cache, and some more of it behind."]


def states(text: str) -> np.ndarray:
    """(tokens, hidden): behind the last norm."""
    seen: list[torch.Tensor] = []
    model = twin()
    assert model.norm is not None
    model.norm.register_forward_hook(lambda _module, _given, found: seen.append(found))
    with torch.no_grad():
        model(torch.tensor([[*text.encode()]]))
    return np.asarray(seen[0][0])


def unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / np.linalg.norm(vector))


def last(text: str) -> np.ndarray:
    return unit(states(text)[-1])


def client(api: Api) -> OpenAI:
    """Not a strict one, whose own types do not allow the base64 that it asks for."""
    return OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, http_client=DefaultHttpxClient(verify=False))


@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_the_clients_embeddings(api: Api, encoding: str) -> None:
    """The client asks for base64 where nothing is said, and decodes it."""
    if encoding == "float":
        found = api.client().embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    else:
        found = client(api).embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in found.data] == [0, 1, 2]
    for text, each in zip(TEXTS, found.data, strict=True):
        assert each.embedding == pytest.approx(last(text), abs=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(text.encode()) for text in TEXTS)


def test_texts_and_token_ids(api: Api) -> None:
    asked: list[Any] = [TEXTS[0], [TEXTS[0]], [*TEXTS[0].encode()], [[*TEXTS[0].encode()]]]
    for given in asked:
        [found] = api.post("/v1/embeddings", {"model": MODEL, "input": given}).json()["data"]
        assert found["embedding"] == pytest.approx(last(TEXTS[0]), abs=1e-5)


def test_fewer_dimensions_are_of_length_1_again(api: Api) -> None:
    for dimensions in (1, 7, 32):
        found = client(api).embeddings.create(model=MODEL, input=TEXTS[0], dimensions=dimensions)
        assert found.data[0].embedding == pytest.approx(unit(last(TEXTS[0])[:dimensions]), abs=1e-5)


def test_mean_pooling(house: House) -> None:
    server = house.open()
    server.serving.pooling = "mean"
    [found] = server.post("/v1/embeddings", {"model": MODEL, "input": TEXTS[2]}).json()["data"]
    assert found["embedding"] == pytest.approx(unit(states(TEXTS[2]).mean(axis=0)), abs=1e-5)


def test_base64_is_of_little_endian_float32(api: Api) -> None:
    body = {"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"}
    [found] = api.post("/v1/embeddings", body).json()["data"]
    assert np.frombuffer(base64.b64decode(found["embedding"]), "<f4") == pytest.approx(last(TEXTS[0]), abs=1e-5)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(api: Api, path: str) -> None:
    one, *others = map(last, TEXTS)
    found = api.post(path, {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    assert [each["score"] for each in found["data"]] == pytest.approx(
        [float(one @ other) for other in others], abs=1e-5
    )
    same = [each * 3 for each in map(chr, range(65, 95))]
    equal = api.post(path, {"model": MODEL, "text_1": same, "text_2": same}).json()["data"]
    assert all(0.9999 < each["score"] <= 1 for each in equal)  # also where it would be rounded to 1.0000001
    pairs = api.post(path, {"model": MODEL, "text_1": TEXTS[:2], "text_2": TEXTS[1:]}).json()["data"]
    expected = [float(one @ others[0]), float(others[0] @ others[1])]
    assert [each["score"] for each in pairs] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(api: Api, path: str) -> None:
    documents = [*TEXTS, "A cat sat!", "x"]
    scores = [float(last(TEXTS[0]) @ last(document)) for document in documents]
    order = sorted(range(5), key=lambda place: -scores[place])
    found = api.post(path, {"model": MODEL, "query": TEXTS[0], "documents": documents}).json()
    assert [each["index"] for each in found["results"]] == order
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx([scores[i] for i in order], abs=1e-5)
    assert [each["document"]["text"] for each in found["results"]] == [documents[place] for place in order]
    wishes = {"top_n": 2, "return_documents": False}
    few = api.post(path, {"model": MODEL, "query": TEXTS[0], "documents": documents, **wishes}).json()["results"]
    assert [each["index"] for each in few] == order[:2] and "document" not in few[0]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": []}, "input: "),
    ("/v1/embeddings", {"input": ""}, "prompt is empty"),
    ("/v1/embeddings", {"input": [["a"]]}, "input"),
    ("/v1/embeddings", {"input": [300]}, "tokens are 0 to 256"),
    ("/v1/embeddings", {"input": "a" * 600}, "context is 512 tokens"),
    ("/v1/embeddings", {"input": ["a"] * 300}, "at most 256"),
    ("/v1/embeddings", {"input": "a", "dimensions": 33}, "have 32"),
    ("/v1/embeddings", {"input": "a", "dimension": 3}, "did you mean 'dimensions'"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "priority": -1}, "this key's requests have 0"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "one for all, or as many"),
    ("/score", {"text_1": "a", "text_2": ["b"] * 256}, "at most 256"),
    ("/rerank", {"query": "a", "documents": []}, "at least 1"),
    ("/rerank", {"query": "a", "documents": ["b"] * 256}, "at most 256"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "use_activation": True}, "use_activation is for models with"),
    ("/classify", {"input": "a"}, "has no scalar head"),
]


@pytest.mark.parametrize(("path", "wish", "message"), BAD, ids=[f"{path} {message}" for path, _, message in BAD])
def test_one_clear_400_for_each_bad_input(api: Api, path: str, wish: dict[str, Any], message: str) -> None:
    answer = api.post(path, {"model": MODEL} | wish)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("described", "pooling"),
    [({"pooling_mode_mean_tokens": True}, "mean"), ({"pooling_mode_lasttoken": True}, "last"), (None, "last")],
)
def test_a_folder_names_its_pooling(tmp_path: Path, described: dict[str, Any] | None, pooling: str) -> None:
    """As sentence-transformers writes it."""
    if described is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": False} | described))
    backend: Any = SimpleNamespace(prompt_tokenizer=PromptTokenizer(None, folder=tmp_path))
    assert LocalModel(backend).stored_pooling == pooling


def test_a_pooling_that_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    backend: Any = SimpleNamespace(prompt_tokenizer=PromptTokenizer(None, folder=tmp_path))
    with pytest.raises(APIError, match="set --pooling"):
        _ = LocalModel(backend).stored_pooling
