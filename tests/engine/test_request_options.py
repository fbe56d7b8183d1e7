"""What a request may ask for beside the shape of the distribution: tokens and words ruled out, a truncated prompt, its
log-probabilities, special tokens in the text, a prefix cache of its own. Greedy answers equal those of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hf_reference import VOCAB, answers, fresh_model, random_prompts, reference_model
from test_detokenizer import TOKENIZERS
from test_engine_sampling import ROOMY, engine_for

from lmworks.data.tokenizer import ByteTokenizer, FileTokenizer
from lmworks.engine.core.detokenizer import IncrementalDetokenizer, decode
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.token_filter import spellings
from lmworks.engine.speculative.ngram import NgramProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.spec import EngineSpec, SpecError

FAMILY, COUNT = "llama", 16


class Letters:
    """A token for each printable letter, from the blank on."""

    vocab_size, eot = VOCAB, 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(32 + token) for token in ids)

    def token_id(self, name: str) -> int | None:
        return None


def engine(**spec: Any) -> Engine:
    options = EngineSpec(**{"dtype": "fp32", "block": 4, "max_seqs": 8, **spec})
    speculator = Speculator(options, NgramProposer()) if options.speculate == "ngram" else None
    runner = ModelRunner(fresh_model(FAMILY), options, "cpu", VOCAB)
    return Engine(runner, Letters(), speculator=speculator)  # type: ignore[arg-type]


def greedy(prompt: list[int], **options: Any) -> list[int]:
    """Of transformers."""
    out = reference_model(FAMILY).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return list(out[0, len(prompt) :].tolist())


def ask(**wishes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, **wishes)


WORDS = [[(6, 3)], [(2, 2)], [(4, 1)], [(3, 1), (6, 2), (8, 3)]]  # place in the answer, and tokens


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_bad_words_equal_those_of_transformers(speculate: str) -> None:
    """Words that the answer would hold: a triple, a pair, a single token, all three; beside requests without any."""
    served = engine(speculate=speculate, guesses=3)
    prompts = random_prompts([6, 9, 3, 12])
    plain = [greedy(prompt) for prompt in prompts]
    words = [[answer[at : at + size] for at, size in wanted] for answer, wanted in zip(plain, WORDS, strict=True)]
    texts = [[Letters().decode(ids) for ids in each] for each in words]
    params = [ask(bad_words=each) for each in texts] + [ask()] * 4
    found = answers(served, prompts * 2, params)
    for prompt, each, result in zip(prompts, texts, found[:4], strict=True):
        banned = [list(ids) for ids in spellings(each, Letters())]
        assert result.token_ids == greedy(prompt, bad_words_ids=banned)
    assert [result.token_ids for result in found[4:]] == plain
    assert all(result.token_ids != answer for result, answer in zip(found[:4], plain, strict=True))


def test_bad_words_begin_a_text_or_follow_a_blank() -> None:
    """As vLLM has it: the blank counts where it becomes part of the first token."""
    tokenizer = TOKENIZERS["byte-level"]  # in which " the" is a token, and " q" is two
    assert spellings(["the", " the"], tokenizer) == [tokenizer.encode("the"), tokenizer.encode(" the")] * 2
    assert spellings(["q"], tokenizer) == [tokenizer.encode("q")]


def test_allowed_tokens_equal_those_of_transformers() -> None:
    served = engine(speculate="ngram", guesses=3)
    prompts = random_prompts([6, 9, 3, 12])
    allowed = [random.Random(seed).sample(range(VOCAB), 5) for seed in range(3)]
    params = [*(ask(allowed_token_ids=each) for each in allowed), ask()]
    for prompt, params_of_it, result in zip(prompts, params, answers(served, prompts, params), strict=True):
        ids = params_of_it.allowed_token_ids or range(VOCAB)
        assert result.token_ids == greedy(prompt, prefix_allowed_tokens_fn=lambda *_, ids=ids: list(ids))


def test_sampled_tokens_stay_within_what_is_allowed() -> None:
    [result] = answers(
        engine(),
        [[1, 2]],
        [SamplingParams(temperature=3.0, top_k=3, max_tokens=40, allowed_token_ids=[5, 50, 95], seed=1)],
    )
    assert set(result.token_ids) == {5, 50, 95}


def test_a_filter_joins_a_grammar() -> None:
    served = engine_for(ROOMY)
    wishes: list[dict[str, Any]] = [
        {}, {"bad_words": ["b"]}, {"allowed_token_ids": [ord("c")]}, {"bad_words": ["a", "b", "c"]}
    ]  # fmt: skip
    texts = answers(served, [[1, 2]] * 4, [ask(regex="[abc]{4}", **each) for each in wishes])
    assert set(texts[0].text) <= set("abc") and "b" not in texts[1].text and texts[2].text == "cccc"
    assert texts[3].finish_reason == "error" and "bad_words" in (texts[3].error or "")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids names token 96"),
        ({"allowed_token_ids": [3], "bad_words": ["#"]}, "leave no token"),
    ],
)
def test_filters_that_are_refused(wish: dict[str, Any], message: str) -> None:
    [result] = answers(engine(), [[1, 2]], [ask(**wish)])
    assert message in (result.error or "")


def test_bad_words_need_a_tokenizer() -> None:
    served = Engine(ModelRunner(fresh_model(FAMILY), EngineSpec(dtype="fp32"), "cpu", VOCAB), None)
    [result] = answers(served, [[1, 2]], [ask(bad_words=["a"])])
    assert "need a tokenizer" in (result.error or "")


def test_prompt_logprobs_equal_those_of_transformers() -> None:
    """Also where the prefix cache holds the prompt, and in a batch with others that use it."""
    served, [prompt] = engine(max_batch_tokens=7), random_prompts([30])
    log_softmax = torch.log_softmax(reference_model(FAMILY)(torch.tensor([prompt])).logits[0].double(), dim=-1)
    for _ in range(2):
        first, second = answers(served, [prompt, prompt], [ask(prompt_logprobs=3), ask()])
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        for place, found in enumerate(first.prompt_logprobs[1:]):
            assert found is not None and found.token == prompt[place + 1]
            expected, ids = log_softmax[place].topk(3)
            assert found.logprob == pytest.approx(log_softmax[place, found.token].item(), abs=1e-4)
            assert [token for token, _ in found.top] == ids.tolist()
            assert [value for _, value in found.top] == pytest.approx(expected.tolist(), abs=1e-4)
        assert first.token_ids == second.token_ids
    assert second.cached_tokens > 20 and first.cached_tokens == 0


def test_a_truncated_prompt_keeps_its_end() -> None:
    served, [prompt] = engine(context=64), random_prompts([90])
    kept = {7: prompt[-7:], 200: [], -1: prompt[-(64 - COUNT) :]}
    for most, expected in kept.items():
        [result] = answers(served, [prompt], [ask(truncate_prompt_tokens=most)])
        if expected:
            assert result.prompt_token_ids == expected and result.token_ids == greedy(expected)
        else:
            assert "90 tokens" in (result.error or "")


def cached(results: list[Result]) -> list[int]:
    return [result.cached_tokens for result in results]


def test_a_salt_separates_the_prefix_cache() -> None:
    served, [prompt] = engine(), random_prompts([24])
    asked = [None, "a", "b", "a", None, "ab"]
    found = [answers(served, [prompt], [ask(cache_salt=salt)])[0] for salt in asked]
    assert cached(found) == [0, 0, 0, 20, 20, 0]
    assert len({tuple(result.token_ids) for result in found}) == 1


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma", "metaspace", "no decoder"])
def test_special_tokens_in_the_text(name: str) -> None:
    """Token by token, the text is that of the `tokenizers` library with skip_special_tokens=False."""
    tokenizer, draw = TOKENIZERS[name], random.Random(0)
    assert isinstance(tokenizer, FileTokenizer)
    special = [number for number, each in tokenizer.inner.get_added_tokens_decoder().items() if each.special]
    for _ in range(200):
        ids = [draw.choice(special) if draw.random() < 0.3 else draw.randrange(tokenizer.vocab_size) for _ in range(20)]
        expected = tokenizer.inner.decode(ids, skip_special_tokens=False)
        if "\ufffd" in expected:
            continue  # broken characters: see test_detokenizer
        text = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(map(text.push, ids)) + text.flush() == decode(tokenizer, ids, False) == expected


def test_the_end_of_text_is_shown_where_it_does_not_end_the_answer() -> None:
    text = IncrementalDetokenizer(ByteTokenizer(), skip_special_tokens=False)
    assert [text.push(token) for token in (97, 256, 98)] == ["a", "<|endoftext|>", "b"]
    assert decode(ByteTokenizer(), [97, 256, 98], False) == "a<|endoftext|>b"
    assert decode(ByteTokenizer(), [97, 256, 98]) == "ab"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["a"]}, r"allowed_token_ids = \['a'\]: a list of token ids"),
        ({"bad_words": [" "]}, "bad_words holds an empty text"),
        ({"bad_words": "a"}, "bad_words = 'a': a list of texts"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens = 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens = -2 is out of range"),
        ({"cache_salt": ""}, "cache_salt is empty"),
        ({"cache_salt": 3}, "cache_salt = 3: a text"),
        ({"skip_special_tokens": 1}, "skip_special_tokens = 1: true or false"),
        ({"grammar": 1}, "grammar = 1: it must be text"),
        ({"grammar": "a", "regex": "a"}, "regex and grammar cannot be combined"),
    ],
)
def test_values_that_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SamplingParams(**wish)
