"""A model with a scalar head behind `/score`, `/rerank` and `/classify`: its values are those of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from api_server import MODEL, Api, House
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from chat_files import write_tokenizer
from forked_python import fork_programs
from lmworks.model import GPT
from lmworks.spec import ModelSpec

SPEC = ModelSpec(layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=512, context=512, scalar_head=True)
TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUERY = "What is the answer?"
DOCUMENTS = ["The answer is a number.", "Hello Paris", "What weather do you think there is? " * 4, "One, two, three."]
CONVERSATION = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": "Paris"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("reward"), TEMPLATE)
    model = GPT(SPEC, seed=1)
    with torch.no_grad():
        model.score.weight.mul_(20)  # type: ignore[union-attr]
    model.save_hf(folder)
    return folder


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Api]:
    tokenizer_config = (folder / "tokenizer_config.json").read_text()
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        house = House(folder, TEMPLATE, tiny_engine.of_folder)
    (folder / "tokenizer_config.json").write_text(tokenizer_config)
    yield house.open()
    house.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """What `transformers` gives for a prompt: text, pair of texts or conversation."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def value(text: Any, pair: str | None = None) -> float:
        if isinstance(text, list):
            ids = torch.tensor([tokenizer.apply_chat_template(text, return_dict=False)])
        else:
            ids = tokenizer(text, text_pair=pair, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(model(input_ids=ids).logits[0, 0])

    return value


def test_scores_of_pairs(api: Api, reference: Any) -> None:
    expected = [reference(QUERY, document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 0.5  # else anything would be near enough
    for _ in range(2):  # the second time from the prefix cache
        found = api.post("/v1/score", {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS}).json()
        assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-4)
    turned = api.post("/score", {"model": MODEL, "text_1": DOCUMENTS[::-1], "text_2": DOCUMENTS}).json()["data"]
    pairs = zip(DOCUMENTS[::-1], DOCUMENTS, strict=True)
    assert [each["score"] for each in turned] == pytest.approx([reference(*pair) for pair in pairs], abs=1e-4)
    body = {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS[0], "use_activation": True}
    [as_probability] = api.post("/score", body).json()["data"]
    assert as_probability["score"] == pytest.approx(1 / (1 + math.exp(-expected[0])), abs=1e-5)


def test_documents_are_ranked_by_the_head(api: Api, reference: Any) -> None:
    expected = [reference(QUERY, document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda place: -expected[place])
    found = api.post("/v1/rerank", {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [each["index"] for each in found] == order
    assert [each["relevance_score"] for each in found] == pytest.approx([expected[at] for at in order], abs=1e-4)


def test_texts_and_conversations_are_classified(api: Api, reference: Any) -> None:
    found = api.post("/classify", {"model": MODEL, "input": DOCUMENTS}).json()["data"]
    assert [each["probs"] for each in found] == [[pytest.approx(reference(text), abs=1e-4)] for text in DOCUMENTS]
    assert {each["label"] for each in found} == {"LABEL_0"} and found[0]["num_classes"] == 1
    [said] = api.post("/v1/classify", {"model": MODEL, "messages": CONVERSATION}).json()["data"]
    assert said["probs"] == [pytest.approx(reference(CONVERSATION), abs=1e-4)]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a"}, "has a scalar head: it scores texts"),
    ("/v1/chat/completions", {"messages": CONVERSATION}, "has a scalar head: it scores texts"),
    ("/v1/embeddings", {"input": "a"}, "has a scalar head: it scores texts"),
    ("/classify", {}, "give either input or messages"),
    ("/classify", {"input": [400, 512]}, "tokens are 0 to"),
    ("/classify", {"input": ["a"] * 257}, "at most 256"),
]


@pytest.mark.parametrize(("path", "wish", "message"), BAD, ids=[f"{path} {message}" for path, _, message in BAD])
def test_what_such_a_model_refuses(api: Api, path: str, wish: dict[str, Any], message: str) -> None:
    answer = api.post(path, {"model": MODEL} | wish)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
