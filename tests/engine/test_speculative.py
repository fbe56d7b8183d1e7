"""Guesses change when tokens come, never which: against transformers, against the same seed, and in distribution."""

from __future__ import annotations

import copy
import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import test_engine_property as lives
import torch
from fake_device import FakeDevice, StepOutput, alone
from hf_reference import FAMILIES, VOCAB, answers, compare, fresh_model, random_prompts
from test_engine_tp import Behind
from torch import Tensor

from chance import chi_square
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Result, Sequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Step
from lmworks.engine.speculative import draft_model as draft_module
from lmworks.engine.speculative import ngram, verification
from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
from lmworks.engine.speculative.ngram import NgramIndex, NgramProposer
from lmworks.engine.speculative.verification import Speculator, pick, rejection_sample, sample_draft_token
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec, SpecError

LENGTHS = [5, 1, 18, 12, 2, 20, 9, 14]
COUNTS = [20, 30, 12, 25, 8, 20, 1, 16]


def engine_for(model: GPT, vocab: int, source: str, draft: GPT | None = None, **spec: Any) -> Engine:
    """`behind`: the engine runs a step ahead of what it knows, as on a GPU."""
    device, behind = spec.pop("device", "cpu"), spec.pop("behind", False)
    wanted = {"speculate": source or "none", "draft": "in memory" if source == "draft" else ""}
    given = EngineSpec(**{"dtype": "fp32", "block": 4, "max_seqs": 8, "guesses": 3, **wanted, **spec})
    runner = ModelRunner(model, given, device, vocab, None if draft is None else DraftModel(draft))
    sources = {"ngram": NgramProposer(), "draft": DraftModelProposer()}
    speculator = Speculator(runner.spec, sources[source]) if source else None
    return Engine(Behind(runner) if behind else runner, None, seed=0, speculator=speculator)


def near(model: GPT, amount: float) -> GPT:
    """A model that often says the same: its weights, and some noise."""
    other = copy.deepcopy(model)
    luck = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=luck))
    return other


def hf_engine(family: str, source: str, **spec: Any) -> Engine:
    draft = near(fresh_model(family), 0.02) if source == "draft" else None
    return engine_for(fresh_model(family), VOCAB, source, draft, **spec)


# --- looking back -----------------------------------------------------------------------------------------


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The same by trying every place."""
    best, length = 0, 1
    for end in range(2, len(tokens)):
        match = next((i for i in range(end) if tokens[end - 1 - i] != tokens[-1 - i]), end)
        if match >= max(length, 2):
            best, length = end, match
    if not best:
        return []
    text = list(tokens)
    for index in range(best, best + count):
        text.append(text[index])
    return text[len(tokens) :]


def test_the_longest_match_is_found() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(100):
        lookup, text = NgramIndex(), [draw.randrange(8) for _ in range(draw.randrange(10))]
        for _ in range(30):
            text.append(draw.choice([draw.randrange(8), text[len(text) // 2] if text else 0]))
            if draw.random() < 0.5:  # several tokens may have come since the last guess
                continue
            drafted = lookup.propose([*text, *[PLACEHOLDER_TOKEN] * draw.randrange(2)], len(text), 4)
            assert drafted == looked_up(text, 4)
            found += bool(drafted)
    assert found > 500


def test_proposal_cost_does_not_grow_with_the_text() -> None:
    """The worst text: every pair is the same, and every match is as long as the text."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    lookup, text = NgramIndex(), Counted([7] * 20_000)
    lookup.propose(text, len(text), 4)
    Counted.reads = 0
    for _ in range(10):
        text.append(7)
        assert lookup.propose(text, len(text), 4) == [7] * 4
    assert Counted.reads < 10 * (2 * ngram.CHAIN * ngram.LONGEST + 20)


# --- exact tokens -----------------------------------------------------------------------------------------

each = pytest.mark.parametrize(("family", "source"), list(itertools.product(FAMILIES, ("ngram", "draft"))))
# Each family with either source and either way, not all three at once.
QUICK_PAIRS = [
    ("deepseek_v3", "ngram", True), ("gpt2", "draft", False), ("llama", "draft", True), ("qwen3", "ngram", False)
]  # fmt: skip
each_pair = pytest.mark.parametrize(
    ("family", "source", "behind"),
    [
        pytest.param(family, source, behind, marks=() if (family, source, behind) in QUICK_PAIRS else pytest.mark.slow)
        for family in FAMILIES
        for source in ("ngram", "draft")
        for behind in (False, True)
    ],
)
either_way = pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])


@each_pair
def test_equal_to_transformers(family: str, source: str, behind: bool) -> None:
    """Batching, prompts in chunks, prefix hits and preemption at once: the pool holds half of what is asked."""
    engine = hf_engine(family, source, blocks=22, max_batch_tokens=11, behind=behind)
    prompts = [2 * prompt for prompt in random_prompts(LENGTHS, seed=3, prefix=5)]
    assert compare(engine, family, prompts, COUNTS) == 0
    assert compare(engine, family, prompts[:3], COUNTS[:3]) == 0
    metrics = engine.metrics
    assert metrics.num_preemptions > 0
    assert metrics.prefix_cache_hits > 0
    least = 0 if (family, source) == ("mellum", "ngram") else 20  # its random weights seldom repeat themselves
    assert metrics.proposed_guesses >= metrics.accepted_guesses > least
    assert metrics.generation_tokens == sum(COUNTS) + sum(COUNTS[:3])


def test_accepted_draft_tokens_save_steps() -> None:
    """A model that is its own draft is always right: k + 1 tokens a step, as the metrics say."""
    engine = engine_for(fresh_model("llama"), VOCAB, "draft", fresh_model("llama"), guesses=3)
    assert compare(engine, "llama", random_prompts([9]), [41]) == 0
    assert engine.metrics.acceptance_rate == 1
    assert engine.metrics.steps == 1 + 40 // 4


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_the_end_of_the_context(family: str) -> None:
    """One sequence has no room for guesses any more; its neighbour has, and the draft goes ahead with that one."""
    engine = hf_engine(family, "draft", guesses=6)
    prompts = random_prompts([80, 20])
    assert compare(engine, family, prompts, [engine.spec.context - 80, 60]) == 0
    assert engine.metrics.accepted_guesses > 0


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 0.2, "top_k": 7, "logprobs": 3},
    {"temperature": 0.3, "top_p": 0.9, "min_p": 0.05, "n": 3},
    {"temperature": 0.2, "best_of": 3},
    {"temperature": 0, "logprobs": 0, "logit_bias": {3: 2.0, 7: -100.0}},
    {"temperature": 0.2, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"temperature": 0.2, "min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB, 3))},
]


def wished(source: str, tokens: int = 40, **spec: Any) -> tuple[Engine, list[Result]]:
    prompts = [3 * prompt for prompt in random_prompts([7] * len(WISHES), seed=5)]
    engine = hf_engine("qwen3", source, guesses=5, **spec)
    params = [SamplingParams(seed=i, max_tokens=tokens, **each) for i, each in enumerate(WISHES)]
    return engine, answers(engine, prompts, params)


@cache
def plain_answers() -> list[Result]:
    return wished("")[1]


@either_way
def test_ngram_output_equals_seeded_output(behind: bool) -> None:
    """Token for token, log-probabilities too, for all that a request may ask; some in the batch never speculate."""
    plain = plain_answers()
    engine, guessed = wished("ngram", behind=behind)
    assert engine.metrics.accepted_guesses > 50
    for one, other in zip(plain, guessed, strict=True):
        assert [a.token_ids for a in one.answers] == [a.token_ids for a in other.answers]
        assert [a.finish_reason for a in one.answers] == [a.finish_reason for a in other.answers]
        for a, b in zip(one.answers, other.answers, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.token == y.token
                assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
                assert [i for i, _ in x.top] == [i for i, _ in y.top]


@pytest.mark.parametrize("behind", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "behind"])
def test_batch_invariant_draft_equals_seeded_output(behind: bool) -> None:
    """How many guesses a step has depends on who else is there; a result that may not depend on it, does not."""
    _, plain = wished("", 12, batch_invariant=True)
    engine, guessed = wished("draft", 12, batch_invariant=True, behind=behind)
    assert 0.1 < engine.metrics.acceptance_rate < 1
    for one, other in zip(plain, guessed, strict=True):
        assert [a.token_ids for a in one.answers] == [a.token_ids for a in other.answers]
        assert [a.logprobs for a in one.answers] == [a.logprobs for a in other.answers]  # bitwise


def test_draft_logprobs() -> None:
    """Of accepted guesses and of what stands in for refused ones, as the model itself gives them."""
    engine, results = wished("draft", 16)
    assert 0 < engine.metrics.acceptance_rate < 1
    model, answer = fresh_model("qwen3"), results[1].answers[0]
    tokens = torch.tensor([results[1].prompt_token_ids + answer.token_ids])
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    expected = logits.log_softmax(dim=-1)[0, -len(answer.token_ids) - 1 : -1]
    assert answer.logprobs is not None
    for place, logprob in enumerate(answer.logprobs):
        assert logprob.token == answer.token_ids[place]
        assert logprob.logprob == pytest.approx(expected[place, logprob.token].item(), abs=1e-5)


@pytest.mark.parametrize("source", ["ngram", "draft"])
def test_a_stop_token_among_accepted_draft_tokens(source: str) -> None:
    """The answer ends there; what was accepted behind it is dropped, from the counts too."""
    prompts = [3 * prompt for prompt in random_prompts([6], seed=2)]
    (plain,) = answers(hf_engine("gpt2", ""), prompts, [SamplingParams(temperature=0, max_tokens=30)])
    late = [token for i, token in enumerate(plain.token_ids) if token not in plain.token_ids[:i]]
    for stop in late:
        params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(stop,), logprobs=0)
        engine = hf_engine("gpt2", source, guesses=6)
        (found,) = answers(engine, prompts, [params])
        assert found.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
        assert found.finish_reason == "stop"
        assert found.logprobs is not None
        assert len(found.logprobs) == len(found.token_ids) == engine.metrics.generation_tokens


# --- distribution -----------------------------------------------------------------------------------------

FEW = 5  # tokens
PAIRS = [0, 0, 1, 0, 2, 0, 3, 0, 4, 1, 1, 2, 1, 3, 1, 4, 2, 2, 3, 2, 4, 3, 3, 4, 4, 0]  # every pair once
DRAWS = 1000


@cache
def few_tokens() -> GPT:
    shape = {"layers": 1, "hidden": 16, "heads": 2, "vocab": FEW, "context": 32, "init_std": 0.5, "ffn": 32}
    return GPT(ModelSpec.from_dict(shape), seed=3)


def expected_triples(temperature: float, top_k: int) -> np.ndarray:
    """Probability of every continuation of three tokens, from the model itself."""
    table = np.zeros((FEW, FEW, FEW))
    for triple in itertools.product(range(FEW), repeat=3):
        logits = few_tokens()(torch.tensor([[*PAIRS, *triple[:2]]]))
        assert isinstance(logits, Tensor)
        last = logits[0, -3:].double() / temperature
        least = last.topk(top_k).values[:, -1:]
        p = last.masked_fill(last < least, -torch.inf).softmax(dim=-1)
        table[triple] = np.prod([p[i, token].item() for i, token in enumerate(triple)])
    return table.reshape(-1)


def fit_of_triples(source: str, device: str = "cpu") -> tuple[float, Engine]:
    """How likely the engine's counts are under the exact distribution. The fourth token makes room for two guesses."""
    draft = near(few_tokens(), 0.3) if source == "draft" else None
    sizes = {"max_seqs": 64, "guesses": 2, "blocks": 1000, "device": device}
    engine = engine_for(copy.deepcopy(few_tokens()), FEW, source, draft, **sizes)
    params = [SamplingParams(temperature=1.2, top_k=4, seed=seed, max_tokens=4) for seed in range(DRAWS)]
    triples = np.array([result.token_ids[:3] for result in answers(engine, [PAIRS] * DRAWS, params)])
    seen = np.bincount(triples @ [FEW * FEW, FEW, 1], minlength=FEW**3)
    expected = expected_triples(1.2, 4) * DRAWS
    common = expected >= 8
    seen, expected = (np.append(x[common], x[~common].sum()) for x in (seen, expected))
    return chi_square(seen, expected), engine


@pytest.mark.parametrize("source", [pytest.param("ngram", marks=pytest.mark.slow), "draft"])
def test_output_distribution_equals_model(source: str) -> None:
    fit, engine = fit_of_triples(source)
    assert engine.metrics.proposed_guesses > 1.5 * DRAWS
    assert 0.1 < engine.metrics.acceptance_rate < 0.9
    assert fit > 1e-3


def always(p: Tensor, q: Tensor, guesses: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    return guesses


def from_p(p: Tensor, q: Tensor, guesses: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """A refused guess is replaced by a draw from p: likely tokens then have a second chance."""
    settled = rejection_sample(p, q, guesses, seeds, places)
    return torch.where(settled == guesses, guesses, pick(p, seeds, places))


@pytest.mark.slow  # the rule alone, with the same bugs and more draws: test_biased_acceptance_is_detected
@pytest.mark.parametrize("planted", [always, from_p])
def test_injected_bias_is_detected(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_module, "rejection_sample", planted)
    fit, _ = fit_of_triples("draft")
    assert fit < 1e-6


def judged_alone(
    amount: float, propose: Any = sample_draft_token, rule: Any = rejection_sample
) -> tuple[float, float, float]:
    """How well 40,000 tokens fit p, how many of them are the guess, and how many can be: Σ min(p, q)."""
    luck = torch.Generator().manual_seed(2)
    logits = torch.randn(12, generator=luck)
    p = logits.masked_fill(torch.arange(12) == 3, -torch.inf).softmax(0)
    q = (logits + amount * torch.randn(12, generator=luck)).softmax(0)
    seeds, places = torch.arange(40_000), torch.arange(40_000) % 7
    many = p.expand(len(seeds), -1), q.expand(len(seeds), -1)
    guesses = propose(many[1], seeds, places)
    tokens = rule(*many, guesses, seeds, places)
    seen, expected = np.bincount(tokens.numpy(), minlength=12), p.double().numpy() * len(seeds)
    fit = 0.0 if seen[3] else chi_square(np.delete(seen, 3), np.delete(expected, 3))
    return fit, (tokens == guesses).float().mean().item(), torch.minimum(p, q).sum().item()


@pytest.mark.parametrize("amount", [0.0, 0.3, 3.0])
def test_rejection_sampling_follows_the_target_distribution(amount: float) -> None:
    """The rule alone, with many draws; and no more guesses are refused than must be."""
    fit, agreed, most = judged_alone(amount)
    assert fit > 1e-3
    assert agreed == pytest.approx(most, abs=0.01)


def test_a_draft_token_rejected_by_rounding_is_replaced_by_a_draw_from_p() -> None:
    """q is p and a little more everywhere, as rounding may leave it: nothing is left of p − q."""
    p = torch.tensor([0.0, 0.3, 0.7]).expand(40_000, -1)
    seeds = torch.arange(40_000)
    tokens = rejection_sample(
        p, p * 1.5, torch.full_like(seeds, 1), seeds, seeds % 7
    )  # a third of the guesses is refused
    assert 0.1 < (tokens == 2).float().mean().item() < 0.4
    assert not (tokens == 0).any()


@pytest.mark.parametrize(
    "planted",
    [
        {"rule": always},
        {"rule": from_p},
        {"propose": pick},  # with the numbers that its replacement is drawn with
    ],
)
def test_biased_acceptance_is_detected(planted: dict[str, Any]) -> None:
    assert judged_alone(1.0, **planted)[0] < 1e-6


# --- when -------------------------------------------------------------------------------------------------


def test_large_batch_does_not_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at once are too many here; when few are left, guessing begins."""
    monkeypatch.setattr(verification, "MAX_ROWS", 8)
    engine = hf_engine("llama", "ngram", guesses=3)
    prompts = [3 * prompt for prompt in random_prompts([6] * 8, seed=1)]
    together = [SamplingParams(temperature=0, max_tokens=20)] * 8
    answers(engine, prompts, together)
    assert engine.metrics.proposed_guesses == 0
    assert compare(engine, "llama", prompts, [5] * 6 + [40] * 2) == 0
    assert engine.metrics.proposed_guesses > 0


class Watched(FakeDevice):
    """Counts steps that are launched while the one before is under way; none may be where that has guesses."""

    ahead = 0

    def launch(self, step: Step) -> StepOutput:
        assert all(work.num_logits <= 1 for launched in self.queue for work in launched.works)
        self.ahead += bool(self.queue)
        return super().launch(step)


def looked_back(requests: list[Request], vocab: int, **fake: Any) -> tuple[Engine, Watched]:
    """An engine that has answered them. With one token in the vocabulary all is repetition, with many nothing is."""
    device = Watched(EngineSpec(block=4, blocks=200, context=128, max_seqs=8, max_batch_tokens=40), vocab, **fake)
    engine = Engine(device, None, seed=0, speculator=Speculator(device.spec, NgramProposer()))
    for request in requests:
        engine.add(request)
    for piece in engine.run():
        (sequence,), params = piece.request.sequences, piece.request.params
        assert piece.result is not None
        assert piece.result.token_ids == alone(piece.request.prompt, sequence.seed, params.max_tokens, vocab)
    return engine, device


def test_no_synchronisation_without_draft_tokens() -> None:
    """Nor for a batch mate that repeats itself, but has penalties, or a prompt to compute and no room for guesses."""
    requests = [
        Request([1, 2, 3, 4], SamplingParams(max_tokens=50)),
        Request([5] * 9, SamplingParams(max_tokens=40, presence_penalty=0.5)),
        Request([6] * 100, SamplingParams(max_tokens=2)),
    ]
    engine, device = looked_back(requests, 10**9)
    assert engine.metrics.proposed_guesses == 0
    assert device.ahead == engine.metrics.steps - 1


def test_match_is_used_one_step_later() -> None:
    """And then followed with all tokens known, as by an engine that waits for each of them."""

    def answered(**fake: Any) -> tuple[Engine, Watched]:
        return looked_back([Request([0] * 2, SamplingParams(max_tokens=50)) for _ in range(3)], 1, **fake)

    engine, device = answered()
    waiting, _ = answered(synchronous=True)
    assert device.ahead == 1
    assert engine.metrics.acceptance_rate == 1
    assert engine.metrics.steps == waiting.metrics.steps + 1


def test_async_steps_lose_few_draft_tokens() -> None:
    (waiting, _), (ahead, _) = (wished("ngram", behind=behind) for behind in (False, True))
    assert ahead.metrics.accepted_guesses > 0.9 * waiting.metrics.accepted_guesses


class Moody:
    """Speculates in some steps only, and is right in some."""

    def __init__(self, vocab: int) -> None:
        self.draw, self.vocab, self.truth, self.on = random.Random(1), vocab, {}, False  # type: ignore[var-annotated]

    def active(self, running: list[Sequence]) -> bool:
        self.on = self.draw.random() < 0.5
        return self.on

    def propose(self, running: list[Sequence]) -> None:
        for sequence in running:
            ready = self.on and sequence.num_known_tokens == len(sequence.tokens) == sequence.num_computed_tokens + 1
            right = self.truth[sequence.seed][sequence.num_known_tokens - sequence.num_prompt_tokens :]
            wrong = [self.draw.randrange(self.vocab) for _ in range(3)]
            sequence.draft_tokens = (right[: self.draw.randrange(4)] + wrong)[:3] if ready else []


def test_speculation_may_stop_while_a_step_is_in_flight() -> None:
    """A step with guesses is read before anything else is planned, whoever goes on."""
    device = Watched(EngineSpec(block=4, blocks=60, context=64, max_seqs=6, max_batch_tokens=40, graphs=False))
    moody = Moody(device.valid_vocab)
    engine = Engine(device, None, speculator=moody)
    requests = [Request([seed + 1] * 5, SamplingParams(seed=seed, max_tokens=30)) for seed in range(20)]
    moody.truth = {seed: alone(requests[seed].prompt, seed, 30, device.valid_vocab) for seed in range(20)}
    for request in requests:
        engine.add(request)
    for piece in engine.run():
        assert piece.result is not None
        assert piece.result.token_ids == moody.truth[piece.request.params.seed]
    assert 0 < engine.metrics.acceptance_rate < 1


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_results_equal_single_requests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals, cancellations and preemption at random, with so few tokens that looking back often finds some."""
    monkeypatch.setattr(lives, "VOCAB", 3)
    monkeypatch.setattr(lives, "Guesser", lambda draw: Speculator(EngineSpec(guesses=1 + seed % 4), NgramProposer()))
    outcome = lives.live(lives.World(seed, guesses=True))
    lives.verify(outcome)
    assert outcome.engine.spec.max_batch_tokens == 1 or outcome.engine.metrics.accepted_guesses > 10


def test_mismatched_draft_model_is_rejected() -> None:
    def structured(**changes: Any) -> GPT:
        return GPT(ModelSpec.from_dict({"layers": 1, "hidden": 16, "heads": 2, "vocab": 96, "context": 64, **changes}))

    with pytest.raises(SpecError, match="must have the same tokenizer"):
        engine_for(structured(), 96, "draft", structured(vocab=95))
    with pytest.raises(SpecError, match=r"set engine.context = 32 or less"):
        engine_for(structured(), 96, "draft", structured(context=32))
