"""Tokens are drawn from the distribution that was asked for, the same alone and in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chance import chi_square, independent
from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Sequence
from lmworks.engine.core.sampler import Sampler, SamplerOutput, SamplingMetadata, check
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.spec import SpecError

VOCAB = 50
PROMPT = [3, 4, 4, 7]


def sequence(seed: int = 1, prompt: list[int] = PROMPT, answer: list[int] | None = None, **params: Any) -> Sequence:
    ends = params.pop("ends", ())
    request = Request(prompt, SamplingParams(max_tokens=1000, **params), end_token_ids=ends)
    return Sequence(request, 0, seed, prompt + (answer or []), len(prompt))


def sampler_of(*sequences: Sequence, vocab: int = VOCAB, valid: int = VOCAB) -> Sampler:
    sampler = Sampler(vocab, valid, max_seqs=max(4, len(sequences)), device="cpu")
    for slot, each in enumerate(sequences):
        sampler.admit(slot, each)
    return sampler


def some_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(sampler: Sampler, logits: Tensor, slot: int = 0, place: int = 0, mask: Tensor | None = None) -> SamplerOutput:
    return sampler(logits, torch.tensor([slot]), torch.tensor([place]), mask)


def draws(sampler: Sampler, logits: Tensor, count: int, slot: int = 0) -> np.ndarray:
    """Tokens at `count` places of one sequence, were the logits (1, vocab) the same at all of them."""
    rows = logits.expand(count, -1)
    return sampler(rows, torch.full((count,), slot), torch.arange(count)).tokens.numpy()


def fit(tokens: np.ndarray, probabilities: Tensor) -> float:
    """How likely such counts, or stranger ones, are under these probabilities (chi-square; rare tokens together)."""
    expected = probabilities.double().numpy() * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    common = expected >= 10
    seen, wanted = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    return chi_square(seen[wanted > 1], wanted[wanted > 1])


# --- against transformers ---

CUTS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"top_p": 1e-50},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.3, "top_k": 1000, "top_p": 0.999},
    {"repetition_penalty": 1.5, "temperature": 1.2, "top_p": 0.9},
    {"repetition_penalty": 0.6},
]


def theirs(logits: Tensor, tokens: list[int], params: dict[str, Any]) -> Tensor:
    steps = LogitsProcessorList()
    if "repetition_penalty" in params:
        steps.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    steps.append(TemperatureLogitsWarper(params.get("temperature", 1.0)))
    for key, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if key in params:
            steps.append(warper(params[key]))
    return steps(torch.tensor([tokens]), logits).softmax(dim=1)


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_probabilities_equal_transformers(params: dict[str, Any]) -> None:
    for trial in range(20):
        logits = some_logits(seed=trial)
        sampler = sampler_of(sequence(answer=[9, 9], **params))
        ours = sampler.distribution(logits, torch.tensor([0]), torch.tensor([0]))
        expected = theirs(logits.clone(), [*PROMPT, 9, 9], params)
        assert torch.equal(ours > 0, expected > 0)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_rows_are_independent() -> None:
    everyone = [sequence(seed, answer=[9], **params) for seed, params in enumerate(CUTS)]
    together, logits = sampler_of(*everyone), some_logits(len(CUTS))
    slots, places = torch.arange(len(CUTS)), torch.arange(len(CUTS)) * 3
    probabilities = together.distribution(logits, slots, places)
    tokens = together(logits, slots, places).tokens
    for i, each in enumerate(everyone):
        alone = sampler_of(each)
        row, where = logits[i : i + 1], (torch.tensor([0]), places[i : i + 1])
        torch.testing.assert_close(alone.distribution(row, *where), probabilities[i : i + 1], rtol=0, atol=0)
        assert alone(row, *where).tokens.item() == tokens[i]


# --- samples follow the distribution ---


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_p": 0.9, "top_k": 30}], ids=str)
def test_samples_follow_the_distribution(params: dict[str, Any]) -> None:
    logits, count = some_logits(scale=1), 20_000
    sampler = sampler_of(sequence(seed=5, **params))
    probabilities = sampler.distribution(logits, torch.tensor([0]), torch.tensor([0]))[0]
    tokens = draws(sampler, logits, count)
    assert fit(tokens, probabilities) > 1e-3
    # The test can fail: one token too likely, and a temperature 30% off.
    biased = probabilities.clone()
    biased[probabilities.argmax()] *= 1.3
    assert fit(tokens, biased / biased.sum()) < 1e-6
    hotter = torch.where(probabilities > 0, probabilities.log() / 1.3, -math.inf).softmax(dim=0)
    assert fit(tokens, hotter) < 1e-6


def test_seeds_are_independent_and_repeatable() -> None:
    logits = torch.zeros(1, 8)
    first, second, again = (draws(sampler_of(sequence(seed), vocab=8, valid=8), logits, 8000) for seed in (1, 2, 1))
    assert (first == again).all()
    assert independent(first, second, 8) > 1e-3
    assert independent(first[:-1], first[1:], 8) > 1e-3


# --- greedy, and the ends of the range ---


def test_greedy_breaks_ties_by_first_index() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [11, 30, 31]] = 2.0
    assert one(sampler_of(sequence(temperature=0)), logits).tokens.item() == 11
    beside = sampler_of(sequence(temperature=0), sequence(temperature=1.5, top_p=0.5, repetition_penalty=2.0))
    assert one(beside, logits).tokens.item() == 11  # whatever others in the batch want


@pytest.mark.parametrize("temperature", [1e-45, 1e-12, 1e-3])
def test_a_tiny_temperature_is_almost_greedy(temperature: float) -> None:
    logits = some_logits(scale=30)
    sampler = sampler_of(sequence(temperature=temperature, top_p=0.9, min_p=0.1))
    assert (draws(sampler, logits, 50) == logits.argmax().item()).all()
    probabilities = sampler.distribution(logits, torch.tensor([0]), torch.tensor([0]))
    assert probabilities[0, logits.argmax()] == 1 and probabilities.isfinite().all()


def test_a_huge_temperature_is_uniform() -> None:
    tokens = draws(sampler_of(sequence(temperature=3e38)), some_logits(scale=10), 10_000)
    assert fit(tokens, torch.full((VOCAB,), 1 / VOCAB)) > 1e-3


def test_invalid_ids_are_never_sampled() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 40:] = 50.0
    for params in ({}, {"temperature": 0}, {"top_k": 3}, {"logit_bias": {1: 1.0}}):
        sampler = sampler_of(sequence(**params), valid=40)
        assert draws(sampler, logits, 200).max() < 40
        probabilities = sampler.distribution(logits, torch.tensor([0]), torch.tensor([0]))
        assert probabilities.shape == (1, VOCAB) and probabilities[0, 40:].sum() == 0
    listed = one(sampler_of(sequence(logprobs=5), valid=40), logits)
    assert listed.top_ids is not None and listed.top_ids.max() < 40


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5, "repetition_penalty": 1.1, "logprobs": 2}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_row_is_flagged(params: dict[str, Any], value: float) -> None:
    logits = some_logits(3)
    logits[1, 7] = value
    sampler = sampler_of(*(sequence(i, **params) for i in range(3)))
    slots, places = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    sampled = sampler(logits, slots, places)
    assert sampled.bad.tolist() == [False, True, False] and sampled.tokens[1] == 0
    alone = sampler_of(sequence(2, **params))(logits[2:], torch.tensor([0]), torch.tensor([0]))
    assert alone.tokens[0] == sampled.tokens[2]


# --- penalties, bias, bans, masks ---


def test_penalties_count_output_only() -> None:
    logits = some_logits(seed=3)
    sampler = sampler_of(sequence(answer=[9, 9, 11], presence_penalty=0.5, frequency_penalty=-1.25))
    expected = logits.clone()
    expected[0, 9] -= 0.5 - 2 * 1.25
    expected[0, 11] -= 0.5 - 1.25
    torch.testing.assert_close(
        sampler.distribution(logits, torch.tensor([0]), torch.tensor([3])), expected.softmax(dim=1)
    )


def test_sampled_tokens_are_counted_for_penalties() -> None:
    """Greedy with a strong penalty walks down the list; a sequence that is let in again goes on where it was."""
    logits = some_logits(seed=4)
    order = logits[0].argsort(descending=True).tolist()
    sampler = sampler_of(sequence(temperature=0, presence_penalty=2.0), sequence(temperature=0))
    close = logits.clone()
    close[0, order[:5]] = torch.tensor([10.0, 9.9, 9.8, 9.7, 9.6])
    picked = [one(sampler, close, place=i).tokens.item() for i in range(3)]
    assert picked == order[:3]
    assert one(sampler, close, slot=1).tokens.item() == order[0]
    sampler.admit(2, sequence(answer=[*picked, PLACEHOLDER_TOKEN], temperature=0, presence_penalty=2.0))
    assert one(sampler, close, slot=2).tokens.item() == order[3]
    sampler.admit(2, sequence(temperature=0, presence_penalty=2.0))  # another one in the same slot
    assert one(sampler, close, slot=2).tokens.item() == order[0]


def test_logit_bias_is_removed_with_sequence() -> None:
    logits = some_logits(seed=5)
    bias = {0: 1.5, 17: -100.0, 30: 2.25}
    sampler = sampler_of(sequence(logit_bias=bias), sequence(logit_bias={5: 1.0}), sequence())
    expected = logits.clone()
    expected[0, list(bias)] += torch.tensor(list(bias.values()))
    where = torch.tensor([0]), torch.tensor([0])
    torch.testing.assert_close(sampler.distribution(logits, *where), expected.softmax(dim=1))
    torch.testing.assert_close(sampler.distribution(logits, torch.tensor([2]), where[1]), logits.softmax(dim=1))
    sampler.admit(0, sequence())
    torch.testing.assert_close(sampler.distribution(logits, *where), logits.softmax(dim=1))


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = some_logits(seed=6)
    logits[0, 0], logits[0, 8] = 50.0, 60.0
    best = logits[0].argsort(descending=True).tolist()
    sampler = sampler_of(sequence(temperature=0, min_tokens=2, ends=(8, 0)), sequence(temperature=0, ends=(8,)))
    assert [one(sampler, logits, place=i).tokens.item() for i in range(4)] == [best[2], best[2], 8, 8]
    assert one(sampler, logits, slot=1).tokens.item() == 8


def test_infinite_stop_score_is_banned() -> None:
    sampler = sampler_of(sequence(temperature=0, min_tokens=2, ends=(3,), repetition_penalty=1e-38))  # 3 was seen
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 9] = 50.0, 1.0
    assert one(sampler, logits).tokens.item() == 9
    assert not one(sampler, logits).bad.item()


def test_a_mask_allows_only_its_bits() -> None:
    logits, allowed = some_logits(seed=7), [0, 31, 32, 49]
    words = np.zeros(2, np.uint32)
    for i in allowed:
        words[i // 32] |= np.uint32(1 << (i % 32))
    mask = torch.from_numpy(words.view(np.int32)).unsqueeze(0)
    sampler = sampler_of(sequence(top_p=0.9), sequence(temperature=0))
    probabilities = sampler.distribution(logits, torch.tensor([0]), torch.tensor([0]), mask)
    masked = torch.full_like(logits, -math.inf)
    masked[0, allowed] = logits[0, allowed]
    torch.testing.assert_close(probabilities, theirs(masked, PROMPT, {"top_p": 0.9}))
    assert one(sampler, logits, slot=1, mask=mask).tokens.item() == masked.argmax().item()
    nothing = one(sampler, logits, mask=torch.zeros_like(mask))
    assert nothing.bad.item() and nothing.tokens.item() == 0


# --- log-probabilities ---


def test_logprobs_are_before_temperature() -> None:
    logits = some_logits(2, seed=8)
    params = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 3.0, "logit_bias": {1: 5.0}}
    sampler = sampler_of(sequence(logprobs=3, **params), sequence(logprobs=0, temperature=0))
    sampled = sampler(logits, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    expected = logits.log_softmax(dim=1)
    assert sampled.logprob is not None and sampled.top_ids is not None and sampled.top_logprobs is not None
    torch.testing.assert_close(sampled.logprob, expected.gather(1, sampled.tokens.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(sampled.top_logprobs, expected.topk(3, dim=1).values)
    assert torch.equal(sampled.top_ids, expected.topk(3, dim=1).indices)


def test_only_requested_outputs_are_computed() -> None:
    sampler = sampler_of(sequence(temperature=0), sequence(), sequence(top_p=0.5, frequency_penalty=1.0))
    assert sampler.sampling_metadata([0]) == SamplingMetadata() and sampler.sampling_metadata(
        [0, 1]
    ) == SamplingMetadata(noise=True)
    assert sampler.sampling_metadata([0, 1]).plain and not sampler.sampling_metadata([2]).plain
    assert sampler.sampling_metadata([1, 2]) == SamplingMetadata(noise=True, truncated=True, penalties=True)
    assert one(sampler, some_logits()).logprob is None
    assert sampler_of(sequence()).output_counts is None
    # A padded row names the spare slot, and asks for nothing.
    sampler(some_logits(), torch.tensor([4]), torch.tensor([0]), None, sampler.sampling_metadata([4]))


def test_unknown_tokens_are_rejected() -> None:
    with pytest.raises(SpecError, match=r"logit_bias names token 50: the model's tokens are 0 to 49"):
        check(SamplingParams(logit_bias={50: 1.0}), VOCAB)
    with pytest.raises(SpecError, match="stop_token_ids names token -1"):
        check(SamplingParams(stop_token_ids=[-1]), VOCAB)
