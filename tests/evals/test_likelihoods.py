"""Log-likelihoods of the engine against transformers, and what suites make of them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from scripted_model import write_rows

from lmworks import LLM
from lmworks.data import load_tokenizer
from lmworks.data.fim import find_sentinels
from lmworks.data.tokenizer import read_tokenizer, train_bpe
from lmworks.evals import load_suite, run_suite
from lmworks.evals.engine_model import EngineModel
from lmworks.evals.models import Likelihood, Pair, Prompt
from lmworks.evals.problem import Problem
from lmworks.evals.scoring import score_choices
from lmworks.spec.fim import FimSpec

transformers = pytest.importorskip("transformers")

WORDS = ["alpha beta", "gamma", "delta epsilon zeta", "eta theta iota kappa lambda"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of transformers, with a tokenizer trained on a few words."""
    path = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    (path / "tokenizer.json").write_text(train_bpe(WORDS * 4, 300))
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> EngineModel:
    return EngineModel(LLM(folder, dtype="fp32"), {"model": "random"})


def theirs(folder: Path, before: list[int], after: list[int]) -> Likelihood:
    """By transformers' logits."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([before + after])
    with torch.no_grad():
        logps = network(ids).logits[0, :-1].double().log_softmax(-1)
    rows = logps[len(before) - 1 :]
    each = rows[torch.arange(len(after)), torch.tensor(after)]
    return Likelihood(float(each.sum()), len(after), bool((rows.argmax(-1) == torch.tensor(after)).all()))


def asked(model: EngineModel, pairs: list[Pair]) -> list[Likelihood]:
    found: dict[int, Likelihood] = {}
    model.likelihoods(pairs, found.__setitem__)
    return [found[place] for place in range(len(pairs))]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("alpha beta", " gamma"), ("alpha ", "beta gamma"), ("", "delta"), ("alpha", "x" * 12), ("alpha b", "eta")],
)
def test_log_likelihoods_are_transformers(folder: Path, model: EngineModel, context: str, continuation: str) -> None:
    """Spaces at the end of a context belong to the continuation; without a context, end-of-text stands for it."""
    tokenizer = load_tokenizer(folder)
    kept = context.rstrip()
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(kept)
    same = next((at for at, pair in enumerate(zip(whole, alone, strict=False)) if pair[0] != pair[1]), len(alone))
    before, after = whole[:same] or [0], whole[same:]
    assert after and (same < len(alone)) == (context == "alpha b")
    (found,) = asked(model, [(context, continuation)])
    expected = theirs(folder, before, after)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert (found.tokens, found.greedy) == (expected.tokens, expected.greedy)


def test_a_continuation_that_the_model_would_write_is_greedy(folder: Path, model: EngineModel) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("alpha beta")
    with torch.no_grad():
        best = int(network(torch.tensor([ids])).logits[0, -1].argmax())
    found: dict[int, Likelihood] = {}
    model.score([([*ids, best], len(ids)), ([*ids, (best + 1) % 300], len(ids))], found.__setitem__)
    assert found[0].greedy and not found[1].greedy


def test_long_documents_are_read_in_windows(folder: Path, model: EngineModel) -> None:
    """Of the context's length, each begun with the last token of the one before: every token counts once."""
    text = " ".join(WORDS * 9)
    ids = [0, *load_tokenizer(folder).encode(text)]
    room = model.llm.context - 1
    expected = 0.0
    for start in range(0, len(ids) - 1, room - 1):
        window = ids[start : start + room]
        expected += theirs(folder, window[:1], window[1:]).logprob
    assert len(ids) > 2 * room
    found: dict[int, Likelihood] = {}
    model.text_likelihoods([text, "", "alpha"], found.__setitem__)
    assert found[0].tokens == len(ids) - 1 and found[0].logprob == pytest.approx(expected, abs=1e-3)
    assert (found[1].tokens, found[1].logprob) == (0, 0.0)


def test_perplexity_weighs_documents_by_their_length(folder: Path, model: EngineModel, tmp_path: Path) -> None:
    texts = ["alpha beta gamma delta", "eta"]
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    found = run_suite(model, load_suite("perplexity", {"data": str(data)}), tmp_path / "out")
    each = [theirs(folder, [0], load_tokenizer(folder).encode(text)) for text in texts]
    nll, tokens, size = -sum(one.logprob for one in each), sum(one.tokens for one in each), len("".join(texts))
    assert found["metrics"]["nll"]["value"] == pytest.approx(nll / tokens, abs=1e-5)
    assert found["metrics"]["bits_per_byte"]["value"] == pytest.approx(nll / math.log(2) / size, abs=1e-5)
    assert found["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_choices_by_likelihood_and_by_length() -> None:
    problem = Problem("1", "q", choices=[" a", " bbbbbbbb"], correct=1)
    assert score_choices(problem, [-2.0, -4.0]) == {"accuracy": 0.0, "accuracy_norm": 1.0}  # −2 and −0.5 a character
    assert score_choices(problem, [-1.0, -9.0]) == {"accuracy": 0.0, "accuracy_norm": 0.0}


def test_sentinels_are_those_of_training_or_of_the_tokenizer(tmp_path: Path) -> None:
    table = json.loads(train_bpe(WORDS, 300))
    names = ["<a>", "<b>", "<c>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    table["added_tokens"] += [
        {"id": 300 + at, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for at, name in enumerate(names)
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    a, b, c, prefix, suffix, middle = map(tokenizer.token_id, names)
    found = find_sentinels(tokenizer)
    assert found is not None and found.prompt([1], [2]) == [prefix, 1, suffix, 2, middle]
    own = find_sentinels(tokenizer, FimSpec(rate=0.5, sentinels="own", prefix="<a>", suffix="<b>", middle="<c>"))
    assert own is not None and own.prompt([1], [2]) == [a, 1, b, 2, c]
    suffix_first = find_sentinels(tokenizer, FimSpec(rate=0.5, spm_rate=1.0))  # the only order it was trained with
    assert suffix_first is not None and suffix_first.prompt([1], [2]) == [prefix, suffix, 2, middle, 1]
    assert suffix_first.example([1], [3], [2], True)[:-1] == suffix_first.prompt([1], [2])
    assert find_sentinels(tokenizer, FimSpec()) is None  # trained without infilling
    assert find_sentinels(load_tokenizer("bytes")) is None


def test_infilling_prompts_begin_as_other_prompts_do(folder: Path, tmp_path: Path) -> None:
    """Code Llama's have begin-of-text, from the post-processor of its tokenizer."""
    shutil.copytree(folder, tmp_path / "model")
    table = json.loads(train_bpe(WORDS * 4, 296))
    names = ["<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    table["added_tokens"] += [
        {"id": 296 + at, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for at, name in enumerate(names)
    ]  # fmt: skip
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [296], "tokens": ["<s>"]}},
    }
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(table))
    with LLM(tmp_path / "model", dtype="fp32") as llm:
        ids = EngineModel(llm, {}).encode(Prompt("alpha", 0, 4, 0.0, 1.0, (), " beta"))
        assert next(iter(llm.encode("alpha"))) == 296 == ids[0]
        assert ids[1] == 297 and ids.count(296) == 1 and ids[-1] == 299
