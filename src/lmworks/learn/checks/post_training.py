"""Further exercises, `src/post_training/`: against sums written out, and gradients."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checking.expect import Mismatch, expect_close, expect_equal


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Mismatch("what is returned", f"a tuple ({what})", found)
    return found


def plain(turns: list[Any]) -> list[tuple[str, list[int]]]:
    return [(turn.role, [*turn.header, *turn.content, *turn.end]) for turn in turns]


def sft_labels(module: ModuleType) -> None:
    system, user = module.Turn("system", [1], [10], [9]), module.Turn("user", [2], [20, 21], [9])
    answer, other = module.Turn("assistant", [3], [30, 31], [9]), module.Turn("assistant", [3, 4], [32], [9, 8])
    for case, turns, tokens, labels, remark in (
        ("a question", [user], [2, 20, 21, 9], [-100] * 4, "what the user says is not learned"),
        ("one answer", [answer], [3, 30, 31, 9], [-100, 30, 31, 9], "the header is given, the end is to be learned"),
        ("question and answer", [user, answer], [2, 20, 21, 9, 3, 30, 31, 9], [-100] * 5 + [30, 31, 9], ""),
        ("system, question, answer, question, answer", [system, user, answer, user, other],
         [1, 10, 9, 2, 20, 21, 9, 3, 30, 31, 9, 2, 20, 21, 9, 3, 4, 32, 9, 8],
         [-100] * 8 + [30, 31, 9] + [-100] * 6 + [32, 9, 8], "every answer is learned, not the last alone"),
        ("nothing", [], [], [], ""),
    ):  # fmt: skip
        kept = plain(turns)
        got = pair(module.sft_labels(turns), "tokens, labels")
        expect_equal(f"{case}: tokens", list(got[0]), tokens, turns=turns)
        expect_equal(f"{case}: labels", list(got[1]), labels, remark=remark, turns=turns)
        expect_equal(f"{case}: the turns are left as they were", plain(turns), kept)


def sequence_logps(module: ModuleType) -> None:
    logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [0.0, 0.0]]])
    for case, rows, expected, remark in (
        ("two tokens", [[0, 1, 0]], math.log(0.5) + math.log(0.75), "position 0 predicts token 1, position 1 token 2"),
        ("the second is not counted", [[0, -100, 1]], math.log(0.25), "a label of −100 counts for nothing"),
        ("none is counted", [[1, -100, -100]], 0.0, "nothing predicts the first token"),
    ):
        labels = torch.tensor(rows)
        got = module.sequence_logps(logits, labels)
        expect_close(case, got, torch.tensor([expected]), remark=remark, logits=logits, labels=labels)
    logits, labels = numbers(3, 6, 5) * 4, torch.arange(18).view(3, 6) % 5
    labels[0, :3], labels[2, 4:] = -100, -100
    kept = labels.clone()
    wanted = -F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(-1)
    expect_close("three answers of different length", module.sequence_logps(logits, labels), wanted, labels=labels)
    expect_close("the labels are left as they were", labels, kept)
    large = torch.tensor([[[500.0, 0.0], [0.0, 0.0]]])
    got = module.sequence_logps(large, torch.tensor([[0, 1]]))
    expect_close("a logit of 500", got, torch.tensor([-500.0]), remark="log_softmax, not the log of a softmax")


def dpo_loss(module: ModuleType) -> None:
    def tensors(*values: float) -> list[Tensor]:
        return [torch.tensor([value]) for value in values]

    for case, inputs, beta, expected, remark in (
        ("policy is the reference", tensors(-5, -7, -5, -7), 0.1, math.log(2), "no margin: −log σ(0)"),
        ("chosen two nats up", tensors(-3, -7, -5, -7), 0.5, -math.log(1 / (1 + math.exp(-1))), "β · 2 = 1"),
        ("rejected two nats down", tensors(-5, -9, -5, -7), 0.5, -math.log(1 / (1 + math.exp(-1))), "the same margin"),
        ("rejected two nats up", tensors(-5, -5, -5, -7), 0.5, -math.log(1 / (1 + math.exp(1))), "a margin of −2"),
        ("a margin of −2000", tensors(-2000, 0, 0, 0), 0.1, 200.0, "log σ must not underflow: F.logsigmoid"),
    ):
        names: dict[str, Any] = dict(zip(("chosen", "rejected", "ref_chosen", "ref_rejected"), inputs, strict=True))
        got = module.dpo_loss(*inputs, beta)
        expect_close(f"{case}, β = {beta}", got, torch.tensor(expected), remark=remark, **names)
    inputs = [numbers(4, seed=seed) for seed in range(4)]
    chosen, rejected, ref_chosen, ref_rejected = inputs
    wanted = -(0.3 * (chosen - ref_chosen - rejected + ref_rejected)).sigmoid().log().mean()
    expect_close("the mean of four pairs", module.dpo_loss(*inputs, 0.3), wanted)


def gae(module: ModuleType) -> None:
    for case, rewards, values, gamma, lam, advantages, remark in (
        ("one token", [[2.0]], [[0.5]], 0.9, 0.8, [[1.5]], "after the last token comes nothing: A = r − V"),
        ("two tokens, λ = 0", [[0.0, 1.0]], [[0.5, 0.25]], 1.0, 0.0, [[-0.25, 0.75]], "A = r + V′ − V alone"),
        ("two tokens, λ = 1", [[0.0, 1.0]], [[0.5, 0.25]], 1.0, 1.0, [[0.5, 0.75]], "A = all rewards to come − V"),
        ("two tokens, γ = λ = 0.5", [[0.0, 1.0]], [[0.5, 0.25]], 0.5, 0.5, [[-0.375 + 0.25 * 0.75, 0.75]], ""),
        ("a reward at the end", [[0.0, 0.0, 1.0]], [[0.0, 0.0, 0.0]], 1.0, 0.5, [[0.25, 0.5, 1.0]], "A = δ + γλ A′"),
    ):
        r, v = torch.tensor(rewards), torch.tensor(values)
        got = pair(module.gae(r, v, gamma, lam), "advantages, returns")
        expect_close(f"{case}: advantages", got[0], torch.tensor(advantages), remark=remark, rewards=r, values=v)
        expect_close(f"{case}: returns", got[1], torch.tensor(advantages) + v, remark="returns = advantages + values")
    r, v = numbers(3, 7), numbers(3, 7, seed=1)
    delta = r + 0.9 * F.pad(v, (0, 1))[:, 1:] - v
    decay = torch.tensor([[(0.9 * 0.7) ** (i - t) if i >= t else 0.0 for t in range(7)] for i in range(7)])
    got = pair(module.gae(r, v, 0.9, 0.7), "advantages, returns")
    expect_close("a batch of three: advantages", got[0], delta @ decay, rtol=1e-3, atol=1e-5)


def grpo_advantages(module: ModuleType) -> None:
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    for case, rewards, expected, remark in (
        ("two of four right", [[1.0, 0.0, 1.0, 0.0]], [[half, -half, half, -half]], "unbiased: √(4 · 0.25 / 3)"),
        ("all alike", [[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]], "nothing to learn from: zeros, not NaN"),
        ("two prompts", [[1.0, 0.0, 1.0, 0.0], [2.0, 0.0, 2.0, 0.0]],
         [[half, -half, half, -half], [1 / (math.sqrt(4 / 3) + 1e-4) * sign for sign in (1, -1, 1, -1)]],
         "each prompt has a mean and a spread of its own"),
        ("three rewards", [[0.0, 1.0, 5.0]], [[(x - 2) / (math.sqrt(7) + 1e-4) for x in (0, 1, 5)]], ""),
    ):  # fmt: skip
        given = torch.tensor(rewards)
        expect_close(case, module.grpo_advantages(given), torch.tensor(expected), remark=remark, rewards=given)


def ppo_loss(module: ModuleType) -> None:
    for case, ratio, advantage, expected, remark in (
        ("ratio 1, advantage 2", 1.0, 2.0, -2.0, "the loss is minus the gain"),
        ("ratio 1.1, advantage 2", 1.1, 2.0, -2.2, "within the clip range"),
        ("ratio 0.5, advantage 2", 0.5, 2.0, -1.0, "the smaller gain: no clip below for a good token"),
        ("ratio 1.5, advantage 2", 1.5, 2.0, -2.4, "a good token is not pushed beyond 1.2"),
        ("ratio 0.5, advantage −2", 0.5, -2.0, 1.6, "a bad token is not pushed below 0.8"),
        ("ratio 1.5, advantage −2", 1.5, -2.0, 3.0, "the smaller gain: no clip above for a bad token"),
    ):
        old = torch.tensor([[-1.0]])
        logps = old + math.log(ratio)
        got = module.ppo_loss(logps, old, torch.tensor([[advantage]]), torch.ones(1, 1))
        expect_close(case, got, torch.tensor(expected), remark=remark)
    logps, old, advantages = numbers(2, 3), numbers(2, 3, seed=1), numbers(2, 3, seed=2)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    ratios = (logps - old).exp()
    gains = torch.min(ratios * advantages, ratios.clamp(0.9, 1.1) * advantages)[mask.bool()]
    remark = "the mean over the tokens of the mask, of the whole batch"
    expect_close("three tokens of six, clip 0.1", module.ppo_loss(logps, old, advantages, mask, 0.1), -gains.mean(),
                 remark=remark, mask=mask)  # fmt: skip
    broken = torch.where(mask.bool(), logps, torch.inf)
    got = module.ppo_loss(broken, old, advantages, mask, 0.1)
    expect_close(
        "infinite outside of the mask", got, -gains.mean(), remark="what is outside is replaced, not multiplied"
    )
    logps = old.clone().requires_grad_()
    module.ppo_loss(logps, logps, advantages, torch.ones(2, 3)).backward()
    grad = torch.zeros(2, 3) if logps.grad is None else logps.grad
    remark = "the old log-probabilities are constants: detach()"
    expect_close("the gradient where old and new are one tensor", grad, -advantages / 6, remark=remark)


CHECKS = {
    "sft_labels": sft_labels,
    "sequence_logps": sequence_logps,
    "dpo_loss": dpo_loss,
    "gae": gae,
    "grpo_advantages": grpo_advantages,
    "ppo_loss": ppo_loss,
}
