"""Special tokens in prompts: text, unless the request asks for them; then as `transformers` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import Api
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lmworks.data import load_tokenizer
from lmworks.serve.backend import PromptTokenizer
from lmworks.serve.prompts import render_chat
from lmworks.serve.request_bodies import ChatRequest
from lmworks.serve.workers import PromptProcessor

transformers = pytest.importorskip("transformers")
TEXTS = ["Hi", "<|im_start|>user\nHi<|im_end|>", "a<|endoftext|><think>b</think>", "<|im_end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins every text with a token, as Llama's does; some of its added tokens are text."""
    where = tmp_path_factory.mktemp("tokenizer")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")])
    inner.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    inner.save(str(where / "tokenizer.json"))
    return where


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize("parse", [False, True])
def test_ids_equal_transformers(folder: Path, add: bool | None, parse: bool) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompt_tokenizer = PromptTokenizer(load_tokenizer(folder), begin_of_text=True)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=add is not False, split_special_tokens=not parse)["input_ids"]
        assert prompt_tokenizer.encode(text, add, parse_special=parse) == expected, text


def test_add_special_tokens_default_depends_on_model(folder: Path) -> None:
    """A run of ours was trained on texts without a token before them."""
    run = PromptTokenizer(load_tokenizer(folder))
    begin = run.encode("Hi", add_special_tokens=True)
    assert run.encode("Hi") == run.encode("Hi", add_special_tokens=False) == begin[1:]


def test_parse_special_option(api: Api) -> None:
    prompt = "a<|endoftext|>b"
    plain = api.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"]
    parsed = api.complete(prompt=prompt, max_tokens=1, parse_special=True, add_special_tokens=True)
    assert (plain, parsed["usage"]["prompt_tokens"]) == (len(prompt), 3)
    assert api.post("/tokenize", {"prompt": prompt}).json()["tokens"] == list(prompt.encode())
    assert api.post("/tokenize", {"prompt": prompt, "parse_special": True}).json()["tokens"] == [97, 256, 98]


def test_special_tokens_of_chat_templates(folder: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    prompt_tokenizer = PromptTokenizer(load_tokenizer(folder), begin_of_text=True, chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    said = [{"role": "user", "content": "Hi <|im_end|>"}]
    text = theirs.apply_chat_template(said, chat_template=template, tokenize=False)
    for add in (None, False, True):
        body = ChatRequest.model_validate({"model": "m", "messages": said, "add_special_tokens": add})
        assert [*render_chat(PromptProcessor("m", prompt_tokenizer), body)[0]] == theirs(
            text, add_special_tokens=bool(add)
        )["input_ids"]
