"""Everything that may be asked for, mixed in one batch and a tiny pool: each request gets, bit for bit, what it gets
alone."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest

from lmworks.data.tokenizer import ByteTokenizer
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
from lmworks.engine.speculative.ngram import NgramProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

pytest.importorskip("llguidance")

CONTEXT = 48
ROOMY = EngineSpec(dtype="fp32", context=CONTEXT, blocks=200, prefix_cache=False, batch_invariant=True)
TIGHT = ROOMY.replace(block=4, blocks=14, max_seqs=5, max_batch_tokens=13, prefix_cache=True, guesses=3)
SHAPES: list[dict[str, Any]] = [
    {"regex": "[a-f]{2,9}!"},
    {"grammar": 'root ::= "(" root ")" | [x-z]'},
    {"choice": ["yes", "no", "maybe so"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]


@cache
def model() -> GPT:
    shape = {"vocab": 320, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    return GPT(ModelSpec.from_preset("tiny", context=CONTEXT, init_std=0.3, **shape), seed=1).eval()


def engine_for(spec: EngineSpec) -> Engine:
    draft = DraftModel(copy.deepcopy(model())) if spec.speculate == "draft" else None
    runner = ModelRunner(copy.deepcopy(model()), spec, "cpu", ByteTokenizer.vocab_size, draft)
    guesser = None if spec.speculate == "none" else Speculator(spec, DraftModelProposer() if draft else NgramProposer())
    return Engine(runner, ByteTokenizer(), speculator=guesser)


def wishes(draw: random.Random) -> SamplingParams:
    """Each wish is made now and then, so that most requests make a few."""
    most = draw.randrange(1, 16)
    answers = draw.choice([1, 1, 2, 3])
    usual: dict[str, Any] = {
        "seed": draw.randrange(1000),
        "max_tokens": most,
        "temperature": draw.choice([0, 0.7, 1.3]),
    }
    others: dict[str, Any] = {
        "top_k": draw.choice([1, 5, 50]),
        "top_p": draw.choice([0.3, 0.9]),
        "min_p": draw.choice([0.05, 0.5]),
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "presence_penalty": draw.choice([-1.0, 1.0]),
        "frequency_penalty": draw.choice([-0.5, 1.0]),
        "logit_bias": {draw.randrange(257): draw.choice([-100.0, 5.0]) for _ in range(4)},
        "cache_salt": draw.choice(["a", "b"]),
        "skip_special_tokens": False,
        "truncate_prompt_tokens": draw.randrange(1, 20),
        "min_tokens": draw.randrange(most + 1),
        "stop": draw.choice(["e", "\n", ["a", "t"]]),
        "stop_token_ids": [draw.randrange(257) for _ in range(20)],
        "ignore_eos": True,
        "include_stop": True,
        "n": answers,
        "best_of": answers + draw.randrange(3),
        "logprobs": draw.choice([0, 1, 5]),
        "prompt_logprobs": draw.choice([0, 2]),
    }
    made = {name: value for name, value in others.items() if draw.random() < 0.25}
    if "best_of" in made:
        made["n"] = answers
    shape = draw.choice(SHAPES) if draw.random() < 0.2 else {}
    word = "".join(draw.choices("abcdefgh", k=draw.randrange(1, 3)))
    ruled_out = draw.choice([{"allowed_token_ids": draw.choices(range(257), k=120)}, {"bad_words": [word]}])
    return SamplingParams(**usual, **made, **shape, **(ruled_out if draw.random() < 0.2 else {}))


def requests(draw: random.Random) -> list[Request]:
    beginning = [draw.randrange(257) for _ in range(16)]
    made = []
    for _ in range(20):
        prompt = beginning[: draw.randrange(17)] + 2 * [draw.randrange(257) for _ in range(draw.randrange(1, 6))]
        made.append(Request(prompt, wishes(draw), draw.randrange(-1, 2), stream=draw.random() < 0.5))
    return made


def served(engine: Engine, asked: list[Request], draw: random.Random) -> dict[int, Result]:
    """They come while others are under way."""
    pieces = []
    for request in asked:
        engine.add(request)
        for _ in range(draw.randrange(4)):
            pieces += engine.step()
            engine.scheduler.block_manager.check(engine.scheduler.running)
    pieces += engine.run()
    return {piece.request.id: piece.result for piece in pieces if piece.result is not None}


@pytest.mark.parametrize(
    ("speculate", "cache"),
    [
        pytest.param("none", "int8", marks=pytest.mark.slow),
        pytest.param("ngram", "auto", marks=pytest.mark.slow),
        ("draft", "fp8"),
    ],
)
def test_all_sampling_params_in_any_batch_give_the_same_as_alone(speculate: str, cache: str) -> None:
    draw = random.Random(f"2: {speculate} {cache}")
    changes = {"kv_dtype": cache, "draft": "small" if speculate == "draft" else "", "speculate": speculate}
    engine, lonely = engine_for(TIGHT.replace(**changes)), engine_for(ROOMY.replace(kv_dtype=cache))
    asked = requests(draw)
    results = served(engine, asked, draw)
    for request in asked:
        lonely.add(Request(list(request.prompt), request.params))
        [piece] = lonely.run()
        mine, alone = results[request.id], piece.result
        assert alone is not None and mine.answers == alone.answers
        assert mine.prompt_logprobs == alone.prompt_logprobs
    metrics = engine.metrics
    assert metrics.num_preemptions > 0 and metrics.prefix_cache_hits > 0
    assert (metrics.proposed_guesses > 2) == (speculate != "none")
