"""Generation: the cache equals recomputation, the sampler draws from the distribution that it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.model import GPT, Sampling, generate
from lmworks.model.generation import KVCache, sample, stream
from lmworks.spec import ModelSpec, SpecError

VOCAB = 40
SHAPES: dict[str, dict[str, Any]] = {
    "rope": {},
    "gqa": {"kv_heads": 2},
    "mqa-qk-norm": {"kv_heads": 1, "qk_norm": True},
    "learned": {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
    "alibi": {"positions": "alibi"},
    "window": {"sliding_window": 5, "kv_heads": 2},
    "layers": {"sliding_window": 5, "layer_types": ("full", "sliding"), "rope_local_theta": 50.0},
    "alibi-window": {"positions": "alibi", "sliding_window": 5},
    "soft cap": {"attention_softcap": 1.0, "final_softcap": 2.0, "kv_heads": 2},
    "sinks": {"attention_sinks": True, "sliding_window": 5},
    "moe": {"experts": 4},
    "latent": {"kv_lora_rank": 12, "q_lora_rank": 20, "rope_head_dim": 4, "v_head_dim": 6},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
}


def lively(**changes: Any) -> GPT:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocab": VOCAB, "context": 40, "init_std": 0.3, **changes}
    return GPT(ModelSpec.from_dict(shape)).eval()


PROMPT = torch.randint(0, VOCAB, (3, 8), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def recomputed(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy continuation without a cache: the whole sequence again for every token."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    return tokens


def test_a_model_that_trains_with_flash_attention_generates_without_a_gpu() -> None:
    assert torch.equal(generate(lively(attention="flash"), PROMPT, 4), generate(lively(), PROMPT, 4))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *((shape, "auto") for shape in SHAPES),
        ("window", "reference"),
        ("window", "flex"),
        *(pytest.param(shape, "flex", marks=pytest.mark.slow) for shape in ("alibi-window", "soft cap", "sinks")),
    ],
)
def test_the_cache_equals_recomputation_token_for_token(shape: str, backend: str) -> None:
    model = lively(**SHAPES[shape], attention=backend)
    tokens = generate(model, PROMPT, 20)  # far beyond the window
    assert tokens.shape == (3, 28)
    assert torch.equal(tokens, recomputed(model, PROMPT, 20))
    assert len(set(tokens[0, 8:].tolist())) > 3, "a model that repeats itself proves little"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [(8, 1, 1), (3, 5, 2), (1, 1, 8)])
@torch.no_grad()
def test_the_cache_takes_a_prompt_in_pieces(shape: str, pieces: tuple[int, ...]) -> None:
    """Chunked prefill: several queries against keys that are already there, inside the window and out of it."""
    model = lively(**SHAPES[shape])
    tokens = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    cache, logits = KVCache(model.spec, 10, tokens.device), []
    for piece in tokens.split(pieces, dim=1):
        positions = torch.arange(cache.length, cache.length + piece.shape[1])
        logits.append(model(piece, positions=positions, attend=cache))
        cache.advance(piece.shape[1])
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens), rtol=0, atol=5e-5)


@torch.no_grad()
def test_the_cache_has_the_precision_that_attention_runs_in() -> None:
    """A cache in the weights' fp32 would be cast whole, at every token and layer, under autocast."""
    model = lively(qk_norm=True, layers=1)
    seen = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        seen.append({q.dtype, k.dtype, v.dtype})
        return cache(q, k, v, layer)

    cache = KVCache(model.spec, 8, PROMPT.device)
    with torch.autocast("cpu", torch.bfloat16):
        model(PROMPT, attend=watch)
    assert seen == [{torch.bfloat16}]
    assert [store.dtype for store in cache.store] == [torch.bfloat16] * 2


def test_a_row_that_stopped_repeats_the_stop_token() -> None:
    model = lively()
    free = generate(model, PROMPT, 20)
    stop = int(free[0, 12])
    stopped = generate(model, PROMPT, 20, stop=stop)
    for row, reference in zip(stopped.tolist(), free.tolist(), strict=True):
        new = reference[8:]
        end = new.index(stop) + 1 if stop in new else len(new)
        assert row[8 : 8 + end] == new[:end] and set(row[8 + end :]) <= {stop}
    alone = generate(model, PROMPT[:1], 20, stop=stop)
    assert alone[0, -1] == stop and alone.shape[1] <= 13


# --- sampling -----------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, 3.0]])
DRAWS = 20_000


def filtered(how: Sampling) -> torch.Tensor:
    """The distribution as it is defined, token by token."""
    probs = torch.softmax(LOGITS[0].double() / how.temperature, dim=0)
    order = sorted(range(len(probs)), key=probs.tolist().__getitem__, reverse=True)
    kept = order[: how.top_k or len(order)]
    total, nucleus, mass = sum(float(probs[i]) for i in kept), [], 0.0
    for i in kept:  # the likeliest tokens until their mass reaches top_p; the one that crosses it is in
        if mass < how.top_p:
            nucleus.append(i)
        mass += float(probs[i]) / total
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


@pytest.mark.parametrize(
    "how",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=3),
        Sampling(top_p=0.7),
        Sampling(top_k=5, top_p=0.9, temperature=1.3),
        Sampling(top_k=100),
        Sampling(top_p=1e-6),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(how: Sampling) -> None:
    expected = filtered(how)
    generator = torch.Generator().manual_seed(7)
    drawn = sample(LOGITS.expand(DRAWS, -1), how, generator)
    counts = torch.bincount(drawn, minlength=LOGITS.shape[1]).double()
    assert not counts[expected == 0].any() and counts[expected > 20 / DRAWS].all()
    errors = (counts / DRAWS - expected).abs() / (expected * (1 - expected) / DRAWS).sqrt().clamp(min=1e-9)
    assert errors[expected > 0].max() < 4.5  # standard deviations


def test_the_same_seed_draws_the_same_text() -> None:
    model = lively(init_std=0.1)
    one, again = (generate(model, PROMPT, 20, Sampling(seed=3)) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, generate(model, PROMPT, 20, Sampling(seed=4)))
    assert torch.equal(generate(model, PROMPT, 20), generate(model, PROMPT, 20, Sampling(temperature=0, seed=9)))


def test_generation_draws_from_no_global_state() -> None:
    before = torch.get_rng_state()
    generate(lively(), PROMPT, 4, Sampling())
    assert torch.equal(before, torch.get_rng_state())


# --- errors -------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(SpecError, match="the prompt is empty"):
        generate(lively(), PROMPT[:, :0], 4)


def test_a_request_beyond_the_context_says_what_fits() -> None:
    assert generate(lively(), PROMPT, 32).shape[1] == 40
    with pytest.raises(SpecError, match=r"prompt \(8 tokens\) .* context of 40; at most 32 new tokens fit"):
        next(stream(lively(), PROMPT, 33, Sampling()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1 is out of range"),
        ({"top_k": -1}, "top-k = -1 is out of range"),
        ({"top_p": 0.0}, "top-p = 0 is out of range"),
        ({"top_p": 1.1}, "top-p = 1.1 is out of range"),
        ({"temperature": float("nan")}, "temperature = nan is out of range"),
        ({"temperature": float("inf")}, "temperature = inf is out of range"),
    ],
)
def test_impossible_sampling_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Sampling(**wrong)


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    """A head is often padded; even a wild temperature must stay within the ids that decode to something."""
    model = lively()
    wild = Sampling(temperature=50.0, vocab=7)
    assert generate(model, PROMPT, 20, wild)[:, PROMPT.shape[1] :].max() < 7
    assert generate(model, PROMPT, 20, Sampling(temperature=0, vocab=7))[:, PROMPT.shape[1] :].max() < 7


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(SpecError, match="seed"):
        Sampling(seed=seed)
