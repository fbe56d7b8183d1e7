"""Uneven micro-batches, divided by the count of the global batch, add up to the loss and gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmworks.align import (
    distill_loss,
    dpo_loss,
    grpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    ppo_policy_loss,
    ppo_value_loss,
    reward_loss,
    rloo_loss,
    sequence_logps,
    sft_loss,
    simpo_loss,
)
from lmworks.align.masked import Denominator

BATCH, TOKENS, VOCAB = 7, 5, 6
GENERATOR = torch.Generator().manual_seed(3)
LENGTHS = torch.tensor([5, 1, 3, 2, 5, 4, 1])
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()
OLD, REF, SAMPLER, RETURNS = torch.randn(4, BATCH, TOKENS, generator=GENERATOR)
ADVANTAGES = torch.randn(BATCH, generator=GENERATOR)
LABELS = torch.tensor([True, False, False, True, True, False, True])
TEACHER = torch.randn(BATCH, TOKENS, VOCAB, generator=GENERATOR)
ANSWERS, ALL_TOKENS = float(BATCH), MASK.sum()  # a number, or a tensor as an all-reduce leaves it

Loss = Callable[[Tensor, slice, bool], Tensor]
"""(values of all answers, which of them, whether to divide by the global count) → loss."""


def pairs(name: str, x: Tensor, part: slice, count: Denominator) -> Tensor:
    """Answers and, as the rejected ones, a constant beside each."""
    chosen, rejected = x[part].sum(-1), x[part, 0] - OLD[part, 0]
    ref_chosen, ref_rejected = REF[part].sum(-1), REF[part, 0]
    if name == "dpo":
        return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.3, 0.1, count)[0]
    if name == "ipo":
        return ipo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.3, count)[0]
    if name == "simpo":
        return simpo_loss(chosen, rejected, denominator=count)[0]
    return reward_loss(chosen, rejected, 0.2, 0.1, count)[0]


def orpo(x: Tensor, part: slice, globally: bool) -> Tensor:
    logps, mask = -x[part].abs(), MASK[part]
    nll, _ = sft_loss(logps, mask, ALL_TOKENS if globally else None)
    chosen = sequence_logps(logps, mask, average=True)
    return orpo_loss(chosen, chosen - 0.5, nll, 0.2, ANSWERS if globally else None)[0]


def kto(x: Tensor, part: slice, globally: bool) -> Tensor:
    count, kl = ANSWERS if globally else None, torch.tensor(0.1)
    return kto_loss(x[part].sum(-1), REF[part].sum(-1), LABELS[part], kl, 0.3, 1.0, 1.3, count)[0]


def grpo(aggregation: str, unit: float | Tensor, ratio: str = "token") -> Loss:
    def loss(x: Tensor, part: slice, globally: bool) -> Tensor:
        return grpo_loss(
            x[part],
            OLD[part],
            ADVANTAGES[part],
            MASK[part],
            ratio=ratio,  # type: ignore[arg-type]
            aggregation=aggregation,  # type: ignore[arg-type]
            max_length=8,
            ref_logps=REF[part],
            beta=0.1,
            sampler_logps=SAMPLER[part],
            denominator=unit if globally else None,
        )[0]

    return loss


def over(unit: float | Tensor, loss: Callable[[Tensor, slice, Denominator], Tensor]) -> Loss:
    return lambda x, part, globally: loss(x, part, unit if globally else None)


LOSSES: dict[str, Loss] = {
    "dpo": over(ANSWERS, lambda x, part, count: pairs("dpo", x, part, count)),
    "ipo": over(ANSWERS, lambda x, part, count: pairs("ipo", x, part, count)),
    "simpo": over(ANSWERS, lambda x, part, count: pairs("simpo", x, part, count)),
    "reward": over(ANSWERS, lambda x, part, count: pairs("reward", x, part, count)),
    "orpo": orpo,
    "kto": kto,
    "sft": over(ALL_TOKENS, lambda x, part, count: sft_loss(x[part], MASK[part], count)[0]),
    "grpo": grpo("grpo", ANSWERS),
    "gspo": grpo("grpo", ANSWERS, "sequence"),
    "dapo": grpo("dapo", ALL_TOKENS),
    "dr_grpo": grpo("dr_grpo", ANSWERS),
    "rloo": over(
        ANSWERS,
        lambda x, part, count: rloo_loss(x[part], OLD[part], ADVANTAGES[part], MASK[part], denominator=count)[0],
    ),
    "ppo_policy": over(
        ALL_TOKENS,
        lambda x, part, count: ppo_policy_loss(x[part], OLD[part], RETURNS[part], MASK[part], denominator=count)[0],
    ),
    "ppo_value": over(
        ALL_TOKENS, lambda x, part, count: ppo_value_loss(x[part], OLD[part], RETURNS[part], MASK[part], 0.2, count)[0]
    ),
    "distill": over(
        ALL_TOKENS,
        lambda x, part, count: distill_loss(
            x[part, :, None] * TEACHER[part].flip(-1), TEACHER[part], MASK[part], "jsd", denominator=count
        )[0],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    loss = LOSSES[name]
    whole = torch.randn(BATCH, TOKENS, generator=torch.Generator().manual_seed(4), requires_grad=True)
    expected = loss(whole, slice(None), False)
    expected.backward()
    split = whole.detach().clone().requires_grad_()
    parts = (slice(0, 1), slice(1, 5), slice(5, 7))
    total = torch.stack([loss(split, part, True) for part in parts]).sum()
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    assert split.grad is not None and whole.grad is not None and whole.grad.any()
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-5, atol=1e-6)
    mean_of_means = torch.stack([loss(split, part, False) for part in parts]).mean()
    assert mean_of_means.item() != pytest.approx(expected.item(), rel=1e-4)
