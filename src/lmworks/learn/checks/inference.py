"""Further exercises, `src/inference/`: against attention over the whole sequence, and sums worked out by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checking.expect import Mismatch, expect_at_most, expect_close, expect_equal


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Mismatch("what is returned", f"a tuple ({what})", found)
    return found


def decode_step(module: ModuleType) -> None:
    for heads, kv_heads, tokens in ((1, 1, 1), (1, 1, 3), (2, 2, 3), (4, 2, 3), (6, 2, 5)):
        q, k, v = numbers(tokens, heads, 4), numbers(tokens, kv_heads, 4, seed=1), numbers(tokens, kv_heads, 4, seed=2)
        keys, values = (torch.full((tokens + 2, kv_heads, 4), left) for left in (0.5, 99.0))  # by other requests
        per_query = heads // kv_heads
        whole_k, whole_v = (x.repeat_interleave(per_query, 1).transpose(0, 1) for x in (k, v))
        whole = F.scaled_dot_product_attention(q.transpose(0, 1), whole_k, whole_v, is_causal=True)
        expected = whole.transpose(0, 1)
        for position in range(tokens):
            case = f"{heads} heads, {kv_heads} KV heads, position {position}"
            got = module.decode_step(q[position], k[position], v[position], keys, values, position)
            remark = "as causal attention over the whole sequence has it; what the cache holds beyond is not read"
            expect_close(case, got, expected[position], rtol=1e-3, atol=1e-5, remark=remark)
            for name, cache, fresh in (("keys", keys, k), ("values", values, v)):
                remark = "the token's own are kept for those after it"
                expect_close(f"{case}: {name} kept", cache[: position + 1], fresh[: position + 1], remark=remark)


def block_table(module: ModuleType) -> None:
    for tokens, block, had, free, enough, table, left, remark in (
        (1, 4, [], [7], True, [7], [], "one token needs a block"),
        (4, 4, [], [8, 7], True, [7], [8], "four tokens fill a block of four"),
        (5, 4, [7], [8, 9], True, [7, 9], [8], "the fifth token needs a second block, from the end of `free`"),
        (6, 4, [7, 9], [8], True, [7, 9], [8], "there is room in the last block"),
        (9, 4, [], [1, 2, 3], True, [3, 2, 1], [], "three blocks"),
        (9, 4, [5], [6], False, [5], [6], "two are missing and one is free: it takes none"),
        (3, 4, [5, 6], [], True, [5, 6], [], "it has more than it needs"),
        (0, 4, [], [1], True, [], [1], "no tokens, no blocks"),
    ):
        mine, pool = list(had), list(free)
        case = f"grow to {tokens} tokens, blocks of {block}, table {had}, free {free}"
        got = module.grow(mine, tokens, pool, block)
        expect_equal(f"{case}: returned", got, enough, remark=remark)
        expect_equal(f"{case}: table and free", (mine, pool), (table, left), remark=remark)
    for table, first, count, block, expected in (
        ([3], 0, 2, 4, [12, 13]),
        ([3, 1], 3, 2, 4, [15, 4]),
        ([5, 0, 2], 1, 5, 2, [11, 0, 1, 4, 5]),
        ([5], 0, 0, 2, []),
    ):
        case = f"slots of {count} tokens from {first} on, table {table}, blocks of {block}"
        expect_equal(case, module.slots(table, first, count, block), expected)


def top_k_top_p(module: ModuleType) -> None:
    ladder = torch.tensor([0.5, 0.25, 0.15, 0.1])
    for case, logits, options, expected, remark in (
        ("nothing is cut", ladder.log(), {}, ladder, ""),
        ("temperature 0.5", ladder.log(), {"temperature": 0.5}, ladder**2 / (ladder**2).sum(), "p² normalised"),
        ("top_k 2", ladder.log(), {"top_k": 2}, torch.tensor([2 / 3, 1 / 3, 0, 0]), ""),
        ("top_k 9 of 4", ladder.log(), {"top_k": 9}, ladder, "more than there are: all"),
        ("top_p 0.6", ladder.log(), {"top_p": 0.6}, torch.tensor([2 / 3, 1 / 3, 0, 0]), "0.5 is not enough"),
        ("top_p 0.4", ladder.log(), {"top_p": 0.4}, torch.tensor([1.0, 0, 0, 0]), "the likeliest is always kept"),
        ("top_p 0.95", ladder.log(), {"top_p": 0.95}, ladder, "0.9 is too little: all four"),
        ("top_k 2, top_p 0.6", ladder.log(), {"top_k": 2, "top_p": 0.6}, torch.tensor([1.0, 0, 0, 0]),
         "of the two that are left the first has 2/3"),
        ("reordered, top_k 2", ladder.log()[[2, 0, 3, 1]], {"top_k": 2}, torch.tensor([0, 2 / 3, 0, 1 / 3]), ""),
        ("reordered, top_p 0.6", ladder.log()[[2, 0, 3, 1]], {"top_p": 0.6}, torch.tensor([0, 2 / 3, 0, 1 / 3]), ""),
        ("equals, top_k 2", torch.tensor([1.0, 0.0, 0.0]), {"top_k": 2}, torch.tensor([1.0, 0.0, 0.0]).softmax(-1),
         "the third is as likely as the second"),
        ("temperature 2, top_p 0.6", ladder.log(), {"temperature": 2.0, "top_p": 0.6},
         torch.tensor([0.5, 0.25, 0, 0]).sqrt() / (0.5**0.5 + 0.5), "top_p is of the tempered probabilities"),
    ):  # fmt: skip
        kept = logits.clone()
        expect_close(case, module.truncated(logits, **options), expected, remark=remark, logits=logits)
        expect_close(f"{case}: the logits are left as they were", logits, kept)


def speculative(module: ModuleType) -> None:
    q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]])
    p = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2], [0.1, 0.2, 0.7]])
    residual = [torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])]
    for draft, chances, count, expected, remark in (
        ([1, 0], [0.99, 0.99], 2, p[2], "both are as likely for the model: accepted, and one more token"),
        ([0, 0], [0.6, 0.0], 0, residual[0], "p / q = 0.5: a chance of 0.6 rejects it"),
        ([0, 0], [0.4, 0.0], 2, p[2], "p / q = 0.5: a chance of 0.4 accepts it"),
        ([1, 2], [0.0, 0.5], 1, residual[1], "p / q of the second is 1/3"),
        ([0, 2], [0.6, 0.9], 0, residual[0], "after a rejection nothing of the draft is left"),
        ([0, 1], [0.6, 0.0], 0, residual[0], "the first is rejected, though the second would be accepted"),
    ):
        got = module.accept(draft, q, p, chances)
        accepted, after = pair(got, "how many, distribution")
        case = f"draft {draft}, chances {chances}"
        expect_equal(f"{case}: accepted", int(accepted), count, remark=remark, p=p, q=q)
        remark = "max(0, p − q), normalised" if count < 2 else "the model's own, after the last draft token"
        expect_close(f"{case}: distribution after them", after, expected, remark=remark, p=p, q=q)
    got = pair(module.accept([], q[:0], p[:1], []), "how many, distribution")
    expect_equal("no draft tokens: accepted", int(got[0]), 0)
    expect_close("no draft tokens: distribution", got[1], p[0])
    first_tokens(module, numbers(5, seed=3).softmax(-1), numbers(5, seed=4).softmax(-1))


def first_tokens(module: ModuleType, q: Tensor, p: Tensor) -> None:
    """Over all draft tokens and a fine grid of chances: the first token is distributed as p."""
    grid = 400
    total = torch.zeros(5)
    for token in range(5):
        for index in range(grid):
            count, after = module.accept([token], q[None], torch.stack((p, p)), [(index + 0.5) / grid])
            total += q[token] / grid * (F.one_hot(torch.tensor(token), 5).float() if count else after)
    remark = "accepted draft tokens and what replaces the others are together distributed as the model's own"
    expect_close("the first token, over all draft tokens and chances", total, p, atol=3e-3, rtol=0, remark=remark, q=q)


def int8(module: ModuleType) -> None:
    for case, rows, expected, scales in (
        ("one row", [[1.0, -0.5, 0.25]], [[127, -64, 32]], [1 / 127]),
        ("two rows", [[1.0, 0.0], [0.0, 100.0]], [[127, 0], [0, 127]], [1 / 127, 100 / 127]),
        ("the largest is negative", [[0.3, -3.0]], [[13, -127]], [3 / 127]),
        ("round to nearest", [[127.0, 0.6, -0.6, 1.4]], [[127, 1, -1, 1]], [1.0]),
    ):
        got, scale = pair(module.quantize_int8(torch.tensor(rows)), "integers, scales")
        expect_close(f"{case}: scales", scale, torch.tensor(scales), remark="the largest of a row becomes 127")
        expect_close(f"{case}: integers", got, torch.tensor(expected, dtype=torch.int8), weight=torch.tensor(rows))
    got, scale = pair(module.quantize_int8(torch.tensor([[0.0, 0.0], [1.0, 1.0]])), "integers, scales")
    remark = "a row of zeros: its scale must not be 0"
    expect_close("a row of zeros: integers", got, torch.tensor([[0, 0], [127, 127]], dtype=torch.int8), remark=remark)
    expect_equal("a row of zeros: all scales are finite and above 0", bool((scale > 0).all()), True, remark=remark)
    weight = numbers(6, 32) * torch.tensor([[1.0], [1e-3], [30.0], [1.0], [2.0], [1.0]])
    got, scale = pair(module.quantize_int8(weight), "integers, scales")
    worst = ((got.float() * scale.unsqueeze(1) - weight).abs() / scale.unsqueeze(1)).max().item()
    remark = "rounding to nearest is off by half a step at most"
    expect_at_most("six rows of different size: steps that a weight is off", worst, 0.5001, remark=remark)
    x = numbers(3, 32, seed=1)
    product = x @ (got.float() * scale.unsqueeze(1)).T
    expect_close("x · weightᵀ", module.int8_linear(x, got, scale), product, rtol=1e-3, atol=1e-3, x=x)
    half = module.int8_linear(x.bfloat16(), got, scale.bfloat16())
    expect_equal("x in bf16: the result's dtype", getattr(half, "dtype", None), torch.bfloat16)


CHECKS = {
    "decode_step": decode_step,
    "block_table": block_table,
    "top_k_top_p": top_k_top_p,
    "speculative": speculative,
    "int8": int8,
}
