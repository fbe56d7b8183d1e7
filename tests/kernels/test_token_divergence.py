"""The divergence from a teacher in chunks against `distill_loss` over whole logits, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.align import distill_loss, logprobs_from_logits
from lmworks.kernels.scores import soft_cap
from lmworks.kernels.training import cross_entropy
from lmworks.kernels.training.cross_entropy import IGNORE
from lmworks.kernels.training.token_divergence import CHUNKS_OF_LOGPROBS, Teacher, TokenDivergence, linear_divergence
from lmworks.kernels.training.token_logprobs import VocabShard

TOKENS, WIDTH, VOCAB, TEACHER_WIDTH = 37, 16, 52, 24
KINDS = ("forward", "reverse", "jsd")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", CHUNKS_OF_LOGPROBS * 10 * VOCAB)  # 4 chunks, the last one short


def inputs(vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH) / 4
    states, head = torch.randn(TOKENS, TEACHER_WIDTH), torch.randn(vocab, TEACHER_WIDTH) / 4
    targets = torch.randint(VOCAB, (TOKENS,))
    targets[::5] = IGNORE
    floats = [one.to(dtype) for one in (hidden, weight, states, head)]
    return floats[0].requires_grad_(), floats[1].requires_grad_(), floats[2], floats[3], targets


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss * 0.25, of))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, 0.0), (0.7, 0.0), (2.0, 3.0)])
def test_loss_and_gradients_equal_those_over_whole_logits(kind: Any, temperature: float, softcap: float) -> None:
    hidden, weight, states, head, targets = inputs()
    teacher = Teacher(states, head, 2 * softcap, kind, temperature, jsd_beta=0.3)
    ours = linear_divergence(hidden, weight, targets, teacher, softcap=softcap)
    logits, theirs = soft_cap(hidden @ weight.t(), softcap), soft_cap(states @ head.t(), 2 * softcap)
    counted = targets != IGNORE
    want, metrics = distill_loss(logits, theirs, counted, kind, temperature, 0.3, denominator=1.0)
    torch.testing.assert_close(ours.loss, want, atol=1e-6, rtol=1e-6)
    for got, expected in zip(gradients(ours.loss, hidden, weight), gradients(want, hidden, weight), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert ours.agreement.sum() / counted.sum() == pytest.approx(float(metrics["top1_agreement"]))
    logps = logprobs_from_logits(logits.detach(), targets.clamp(min=0), temperature) * counted
    torch.testing.assert_close(ours.logps, logps, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_vocabulary_is_compared_where_both_have_tokens(kind: Any) -> None:
    hidden, weight, states, head, targets = inputs(vocab=VOCAB - 3)
    targets.clamp_(max=VOCAB - 4)
    ours = linear_divergence(hidden, weight, targets, Teacher(states, head, kind=kind))
    logits = (hidden @ weight.t())[:, : VOCAB - 3]
    want, _ = distill_loss(logits, states @ head.t(), targets != IGNORE, kind, denominator=1.0)
    torch.testing.assert_close(ours.loss, want, atol=1e-6, rtol=1e-6)
    for got, expected in zip(gradients(ours.loss, hidden, weight), gradients(want, hidden, weight), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_compared_in_fp32(kind: Any) -> None:
    hidden, weight, states, head, targets = inputs(dtype=torch.bfloat16)
    found = linear_divergence(hidden, weight, targets, Teacher(states, head, kind=kind))
    logits, theirs = hidden @ weight.t(), states @ head.t()
    want, _ = distill_loss(logits, theirs, targets != IGNORE, kind, denominator=1.0)
    torch.testing.assert_close(found.loss, want, atol=1e-4, rtol=1e-5)
    for got, expected in zip(gradients(found.loss, hidden, weight), gradients(want, hidden, weight), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


def test_without_a_gradient_nothing_is_saved_and_nothing_that_does_not_count_is_seen() -> None:
    hidden, weight, states, head, targets = inputs()
    with torch.no_grad():
        assert not linear_divergence(hidden, weight, targets, Teacher(states, head)).loss.requires_grad
    found = linear_divergence(hidden, weight, torch.full_like(targets, IGNORE), Teacher(states, head))
    (grad,) = torch.autograd.grad(found.loss, (hidden,))
    assert found.loss == 0 and not grad.any() and not found.agreement.any() and not found.logps.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_sharded_over_ranks_gives_the_same(kind: Any) -> None:
    """Two ranks, one after the other: what they gather is worked out in rounds, until nothing is missing."""
    hidden, weight, states, head, targets = inputs()
    whole = linear_divergence(hidden, weight, targets, Teacher(states, head, kind=kind))
    grad_hidden, grad_weight = torch.autograd.grad(whole.loss, (hidden, weight))
    half, sent = VOCAB // 2, [list[Tensor](), list[Tensor]()]  # what each rank puts into its gathers

    def on_rank(rank: int) -> tuple[TokenDivergence, Tensor, Tensor]:
        calls = iter(range(10**6))

        def all_gather(own: Tensor) -> Tensor:
            call = next(calls)
            sent[rank][call:] = [own.clone()]
            other = sent[1 - rank][call] if call < len(sent[1 - rank]) else own
            return torch.stack([own, other] if rank == 0 else [other, own])

        part = weight.detach()[rank * half :][:half].clone().requires_grad_()
        teacher = Teacher(states, head[rank * half :][:half], kind=kind)
        found = linear_divergence(hidden, part, targets, teacher, shard=VocabShard(rank * half, all_gather))
        return found, *torch.autograd.grad(found.loss, (hidden, part))

    for _ in range(4):  # the second gather of a chunk depends on the first
        for rank in range(2):
            on_rank(rank)
    total = torch.zeros_like(hidden)
    for rank in range(2):
        found, own_hidden, own_weight = on_rank(rank)
        torch.testing.assert_close(found, whole, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(own_weight, grad_weight[rank * half :][:half], atol=2e-6, rtol=1e-5)
        total += own_hidden
    torch.testing.assert_close(total, grad_hidden, atol=2e-6, rtol=1e-5)
