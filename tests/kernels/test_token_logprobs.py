"""Log-probabilities of tokens in chunks against log_softmax over whole logits, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training import cross_entropy
from lmworks.kernels.training.cross_entropy import IGNORE
from lmworks.kernels.training.token_logprobs import VocabShard, linear_logprobs, reference

TOKENS, WIDTH, VOCAB = 37, 16, 52


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 10 * VOCAB)  # 4 chunks, the last one short


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    targets = torch.randint(VOCAB, (TOKENS,))
    targets[::5] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_values_and_gradients_equal_log_softmax(temperature: float, softcap: float) -> None:
    hidden, weight, targets = inputs()
    factors = torch.randn(TOKENS)  # of a loss in which every token has a weight of its own
    ours = linear_logprobs(hidden, weight, targets, temperature=temperature, softcap=softcap, with_entropy=True)
    grads = torch.autograd.grad((ours.logps * factors).sum(), (hidden, weight))
    theirs = reference(hidden, weight, targets, temperature, softcap)
    expected = torch.autograd.grad((theirs.logps * factors).sum(), (hidden, weight))
    torch.testing.assert_close(ours.logps, theirs.logps, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(ours.entropies, theirs.entropies, atol=1e-5, rtol=1e-6)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)


def test_ignored_targets_have_neither_value_nor_gradient() -> None:
    hidden, weight, targets = inputs()
    logps, entropies = linear_logprobs(hidden, weight, targets, with_entropy=True)
    (grad,) = torch.autograd.grad(logps.sum(), (hidden,))
    ignored = targets == IGNORE
    assert not logps[ignored].any() and not entropies[ignored].any() and not grad[ignored].any()
    assert (logps[~ignored] < 0).all() and grad[~ignored].any(dim=1).all()


def test_the_entropy_is_between_zero_and_that_of_the_uniform_distribution() -> None:
    hidden, weight, targets = inputs()
    uniform = linear_logprobs(torch.zeros_like(hidden), weight, targets, with_entropy=True).entropies
    torch.testing.assert_close(uniform[targets != IGNORE], torch.full((29,), VOCAB).float().log())


def test_without_a_gradient_nothing_is_saved() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, targets).logps.requires_grad


def test_a_vocabulary_sharded_over_ranks_gives_the_same() -> None:
    """Two ranks, one after the other: what each gathers from the other is computed beforehand."""
    hidden, weight, targets = inputs()
    factors = torch.randn(TOKENS)
    whole = linear_logprobs(hidden, weight, targets, with_entropy=True)
    grad_hidden, grad_weight = torch.autograd.grad((whole.logps * factors).sum(), (hidden, weight))
    halves, half = weight.detach().chunk(2), VOCAB // 2
    sums: list[list[Tensor]] = [[], []]  # of each rank, by chunk

    for rank, own_sums in enumerate(sums):
        keep = VocabShard(rank * half, lambda own, kept=own_sums: kept.append(own) or own.unsqueeze(0))  # type: ignore[misc]
        linear_logprobs(hidden.detach(), halves[rank], targets, with_entropy=True, shard=keep)
    gathered = [torch.stack(pair) for pair in zip(*sums, strict=True)]
    total = torch.zeros_like(hidden)
    for rank in range(2):
        chunks = iter(gathered)
        shard = VocabShard(rank * half, lambda _own, chunks=chunks: next(chunks))  # type: ignore[misc]
        head = halves[rank].clone().requires_grad_()
        found = linear_logprobs(hidden, head, targets, with_entropy=True, shard=shard)
        torch.testing.assert_close(found, whole, atol=5e-6, rtol=1e-5)
        own_hidden, own_head = torch.autograd.grad((found.logps * factors).sum(), (hidden, head))
        torch.testing.assert_close(own_head, grad_weight.chunk(2)[rank], atol=1e-5, rtol=1e-5)
        total += own_hidden
    torch.testing.assert_close(total, grad_hidden, atol=1e-5, rtol=1e-5)
