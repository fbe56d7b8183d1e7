"""Further exercises, `src/parallelism/`: against one rank that has everything; schedules in the planner's simulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...plan.pipelines.schedule import Action, Times, simulate, total
from ..checking.expect import Mismatch, expect_at_most, expect_close, expect_equal
from .simulated_ranks import SimulatedLink, on_ranks

TARGET = "a target of this exercise"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensor_parallel_mlp(module: ModuleType) -> None:
    for ranks, width, inner in ((1, 2, 4), (2, 1, 2), (2, 3, 4), (4, 3, 8)):
        x, up, down, bias = (
            numbers(2, width),
            numbers(inner, width, seed=1),
            numbers(width, inner, seed=2),
            numbers(width),
        )

        def run(x: Tensor, link: SimulatedLink, up: Tensor = up, down: Tensor = down, bias: Tensor = bias) -> Any:
            parts = module.shard_mlp(up, down, link)
            return parts, module.parallel_mlp(x, *parts, bias, link)

        case = f"{ranks} ranks, width {width}, inner width {inner}"
        got, network = on_ranks(case, [x] * ranks, run)
        expected = F.gelu(x @ up.T) @ down.T + bias
        for rank, ((own_up, own_down), out) in enumerate(got):
            remark = "each rank holds 1/ranks of both weights"
            shapes = (inner // ranks, width), (width, inner // ranks)
            found = tuple(own_up.shape), tuple(own_down.shape)
            expect_equal(f"{case}: shapes of the parts of up and down", found, shapes, remark=remark)
            expect_close(f"{case}: rank {rank}", out, expected, atol=1e-5, x=x)
        remark = f"{TARGET}: one all-reduce in a forward pass"
        expect_at_most(f"{case}: messages", max(network.messages), 1, remark=remark)
        expect_at_most(f"{case}: bytes reduced", max(network.bytes_sent), 4 * expected.numel(), remark=remark)


@contextmanager
def kept_for_backward(weights: list[Tensor]) -> Iterator[dict[int, int]]:
    """Address → bytes of what the forward pass of this thread keeps, its weights aside."""
    own = {one.untyped_storage().data_ptr() for one in weights}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def sequence_parallel(module: ModuleType) -> None:
    for ranks, tokens, width, inner in ((1, 1, 2, 2), (2, 2, 2, 2), (2, 6, 4, 4), (4, 8, 4, 8)):
        case = (
            f"{ranks} rank{'s' * (ranks > 1)}, {tokens} token{'s' * (tokens > 1)}, width {width}, inner width {inner}"
        )
        shapes = (tokens, width), (width,), (inner, width), (width, inner)
        whole = [numbers(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        x, norm, up, down = whole
        expected = F.gelu(F.rms_norm(x, norm.shape, norm, 1e-5) @ up.T) @ down.T
        expect_slices(module, case, [rank_parts(whole, rank, ranks) for rank in range(ranks)], expected.detach())
        weights = numbers(tokens, width, seed=4)  # of the outputs in the loss
        (expected * weights).sum().backward()
        expect_gradients(module, case, whole, list(weights.chunk(ranks)))


def expect_slices(module: ModuleType, case: str, parts: list[list[Tensor]], expected: Tensor) -> None:
    """Results of the forward pass, what it sends, and what it keeps."""

    def forward(own: list[Tensor], link: SimulatedLink) -> tuple[Any, int]:
        with kept_for_backward(own[1:]) as kept:
            out = module.sequence_parallel_mlp(*own, link)
        return out.detach() if isinstance(out, Tensor) else out, sum(kept.values())

    got, network = on_ranks(case, parts, forward)
    for rank, (out, _) in enumerate(got):
        expect_close(f"{case}: rank {rank}", out, expected.chunk(len(parts))[rank], atol=1e-5)
    x, norm, up, _ = parts[0]
    remark = f"{TARGET}: an all-gather and a reduce-scatter, together the bytes of an all-reduce around a ring"
    most = 2 * (len(parts) - 1) * 4 * x.numel()
    expect_at_most(f"{case}: bytes sent in the forward pass", max(network.bytes_sent), most, remark=remark)
    with kept_for_backward([norm]) as of_norm:
        F.rms_norm(x, norm.shape, norm, 1e-5)
    most = sum(of_norm.values()) + 4 * expected.numel() + 2 * 4 * len(expected) * len(up)
    remark = (
        f"{TARGET}: the norm keeps what it needs for tokens / ranks, the MLP the inputs of its products and of GELU"
    )
    kept = max(kept for _, kept in got)
    expect_at_most(f"{case}: bytes kept for the backward pass", kept, most, remark=remark)


def expect_gradients(module: ModuleType, case: str, whole: list[Tensor], weights: list[Tensor]) -> None:
    def backward(own: list[Tensor], link: SimulatedLink) -> list[Tensor | None]:
        (module.sequence_parallel_mlp(*own, link) * weights[link.rank]).sum().backward()
        module.finish_gradients(*own[1:], link)
        return [one.grad for one in own]

    ranks = len(weights)
    got, _ = on_ranks(case, [rank_parts(whole, rank, ranks) for rank in range(ranks)], backward)
    expected = [rank_parts([one.grad for one in whole], rank, ranks) for rank in range(ranks)]
    for index, name in ((3, "down"), (2, "up"), (0, "x"), (1, "norm")):  # those first that need the least to be right
        for rank in range(ranks):
            wanted = expected[rank][index].detach()
            expect_close(f"{case}: gradient of {name} on rank {rank}", got[rank][index], wanted, rtol=1e-3, atol=1e-5)


def rank_parts(whole: list[Any], rank: int, ranks: int) -> list[Tensor]:
    """Copies of x, norm, up and down as a rank has them."""
    x, norm, up, down = (one.detach() for one in whole)
    cut = x.chunk(ranks)[rank], norm, up.chunk(ranks)[rank], down.chunk(ranks, dim=1)[rank]
    return [one.clone().requires_grad_() for one in cut]


def vocab_parallel_loss(module: ModuleType) -> None:
    for ranks, tokens, vocab, scale in (
        (1, 1, 2, 1.0),
        (2, 1, 2, 1.0),
        (2, 3, 4, 1.0),
        (4, 6, 12, 1.0),
        (2, 2, 4, 200.0),
    ):
        logits = numbers(tokens, vocab) * scale
        targets = torch.arange(tokens) * 5 % vocab
        case = f"{ranks} ranks, {tokens} tokens, vocabulary of {vocab}" + (", logits of hundreds" if scale > 1 else "")

        def run(own: Tensor, link: SimulatedLink, targets: Tensor = targets) -> Any:
            return module.vocab_parallel_loss(own, targets, link)

        got, network = on_ranks(case, list(logits.chunk(ranks, dim=1)), run)
        for rank, loss in enumerate(got):
            expect_close(f"{case}: rank {rank}", loss, F.cross_entropy(logits, targets), logits=logits, targets=targets)
        remark = f"{TARGET}: three numbers a token; logits are never gathered"
        expect_at_most(f"{case}: bytes reduced", max(network.bytes_sent), 3 * tokens * 4, remark=remark)


def expert_dispatch(module: ModuleType) -> None:
    ladder = torch.tensor([[0.15, 0.5, 0.1, 0.25]])
    expect_routes("probabilities 0.15, 0.5, 0.1, 0.25, top 1", module, ladder.log(), torch.eye(4), 1,
                  torch.tensor([[0.0, 1.0, 0.0, 0.0]]))  # fmt: skip
    expect_routes("probabilities 0.15, 0.5, 0.1, 0.25, top 2", module, ladder.log(), torch.eye(4), 2,
                  torch.tensor([[0.0, 2 / 3, 0.0, 1 / 3]]))  # fmt: skip
    x, router = numbers(3, 4), numbers(5, 4, seed=1)
    probabilities = (x @ router.T).softmax(dim=-1)
    kept = probabilities.where(probabilities >= probabilities.sort(dim=-1).values[:, 2:3], 0.0)
    expect_routes("3 tokens, 5 experts, top 3", module, x, router, 3, kept / kept.sum(dim=-1, keepdim=True))
    for local, tokens, top_k, first in (
        (2, (1,), 1, 1),
        (1, (1, 1), 1, 2),
        (1, (2, 1), 1, 2),
        (2, (3, 2), 2, 4),
        (2, (2, 3), 1, 1),  # all choose expert 0
        (2, (5, 3, 0, 4), 2, 8),
    ):
        expect_dispatched(module, local, tokens, top_k, first)


def expect_routes(case: str, module: ModuleType, x: Tensor, router: Tensor, top_k: int, expected: Tensor) -> None:
    chosen, weights = pair(module.route(x, router, top_k), "experts, weights")
    for name, found in (("experts", chosen), ("weights", weights)):
        expect_equal(f"{case}: shape of the {name}", tuple(found.shape), (len(x), top_k))
    got = torch.zeros_like(expected).scatter(1, chosen, weights)
    expect_close(f"{case}: weight of each expert", got, expected, remark="the chosen ones' weights sum to 1", x=x)


def expect_dispatched(module: ModuleType, local: int, tokens: tuple[int, ...], top_k: int, used: int) -> None:
    """`used`: of the experts, the first so many are chosen from."""
    ranks, width, generator = len(tokens), 2, torch.Generator().manual_seed(len(tokens))
    experts = [lambda rows, factor=factor: factor * rows**2 for factor in range(1, ranks * local + 1)]
    inputs = []
    for rank, count in enumerate(tokens):
        chosen = torch.rand(count, used, generator=generator).argsort(dim=1)[:, :top_k]
        weights = torch.rand(count, top_k, generator=generator)
        inputs.append((numbers(count, width, seed=rank), chosen, weights, experts[rank * local : (rank + 1) * local]))
    case = f"tokens of each rank {tokens}, {local} expert{'s' * (local > 1)} each, top {top_k}"
    got, network = on_ranks(case, inputs, lambda one, link: module.dispatch(*one, link))
    for rank, (x, chosen, weights, _) in enumerate(inputs):
        expected = (weights.unsqueeze(-1) * (chosen + 1).unsqueeze(-1) * x.unsqueeze(1) ** 2).sum(dim=1)
        remark = "expert e gives (e + 1) · x²"
        expect_close(f"{case}: rank {rank}", got[rank], expected, remark=remark, x=x, experts=chosen, weights=weights)
    for rank in range(ranks):
        leave = int((inputs[rank][1] // local != rank).sum())
        come = sum(int((inputs[other][1] // local == rank).sum()) for other in range(ranks) if other != rank)
        remark = (
            f"{TARGET}: a vector for each expert on another rank that one of its tokens chose, and each result back"
        )
        sent = network.bytes_sent[rank] / (4 * width)
        expect_at_most(
            f"{case}: vectors that rank {rank} sends", sent, leave + come, remark=remark, chosen=inputs[rank][1]
        )


SIZES = (1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (4, 2), (4, 8)  # stages, micro-batches


def simulated(
    schedule: Any, stages: int, micro_batches: int, times: Times
) -> tuple[str, list[list[tuple[str, int]]], float]:
    """Case, what each stage does, and how long it takes together."""
    case = f"{stages} stage{'s' * (stages > 1)}, {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    orders = [[(str(kind), int(index)) for kind, index in schedule(stage, stages, micro_batches)]
              for stage in range(stages)]  # fmt: skip
    expected = sorted((kind, index) for kind in times for index in range(micro_batches))
    for stage, order in enumerate(orders):
        remark = "each pass of each micro-batch once"
        expect_equal(f"{case}: stage {stage}, sorted", sorted(order), expected, remark=remark)
        done: set[tuple[str, int]] = set()
        for kind, index in order:
            before = {"B": "F", "I": "F", "W": "I"}.get(kind, kind)
            if before != kind and (before, index) not in done:
                raise Mismatch(f"{case}: stage {stage}", f"{before}{index} before {kind}{index}", words(order))
            done.add((kind, index))
    try:
        actions = [[Action(stage, *one) for one in order] for stage, order in enumerate(orders)]
        spans = simulate(actions, [times] * stages)
    except ValueError as error:
        raise Mismatch(f"{case}: the stages together", "each gets through", "they wait for each other",
                       remark=str(error)) from None  # fmt: skip
    return case, orders, total(spans)


def words(order: list[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{index}" for kind, index in order)


def most_held(order: list[tuple[str, int]], last: str) -> int:
    """Micro-batches whose forward pass is done and whose last pass is not."""
    held = most = 0
    for kind, _ in order:
        held += {"F": 1, last: -1}.get(kind, 0)
        most = max(most, held)
    return most


def one_f_one_b(module: ModuleType) -> None:
    for stages, micro_batches in SIZES:
        case, orders, seconds = simulated(module.one_f_one_b, stages, micro_batches, {"F": 1.0, "B": 2.0})
        for stage, order in enumerate(orders):
            limit = min(stages - stage, micro_batches)
            remark = f"{TARGET}: stage s keeps the activations of at most stages − s micro-batches"
            found = most_held(order, "B")
            expect_at_most(f"{case}: held by stage {stage}", found, limit, remark=remark, order=words(order))
        remark = f"{TARGET}: (micro-batches + stages − 1) · 3, with F of one second and B of two"
        orders_shown = {f"stage {stage}": words(order) for stage, order in enumerate(orders)}
        expect_at_most(
            f"{case}: seconds", seconds, 3.0 * (micro_batches + stages - 1), remark=remark, orders=orders_shown
        )


def zero_bubble(module: ModuleType) -> None:
    for stages, micro_batches in ((1, 1), (1, 3), (2, 2), (2, 4), (3, 6), (4, 8)):
        case, orders, seconds = simulated(module.zero_bubble, stages, micro_batches, {"F": 1.0, "I": 1.0, "W": 1.0})
        for stage, order in enumerate(orders):
            remark = f"{TARGET}: no stage keeps more than `stages` micro-batches, until their W is done"
            found = most_held(order, "W")
            expect_at_most(f"{case}: held by stage {stage}", found, stages, remark=remark, order=words(order))
        remark = (
            f"{TARGET}: 3 · micro-batches + stages − 1, with F, I and W of one second; 1F1B idles three times as long"
        )
        orders_shown = {f"stage {stage}": words(order) for stage, order in enumerate(orders)}
        expect_at_most(
            f"{case}: seconds", seconds, 3.0 * micro_batches + stages - 1, remark=remark, orders=orders_shown
        )


def merge_attention(module: ModuleType) -> None:
    nothing = torch.zeros(1, 1, 1), torch.full((1, 1), float("-inf"))
    one = torch.full((1, 1, 1), 3.0), torch.tensor([[0.5]])
    for case, first, second in (("no keys before", nothing, one), ("no keys after", one, nothing)):
        out, lse = pair(module.merge(*first, *second), "output, log Σ exp")
        expect_close(f"{case}: output", out, one[0])
        expect_close(f"{case}: log Σ exp", lse, one[1])
    out, lse = pair(module.merge(*one, torch.full((1, 1, 1), 5.0), torch.tensor([[0.5]])), "output, log Σ exp")
    expect_close("equal weights: log Σ exp", lse, torch.tensor([[0.5]]).exp().mul(2).log())
    expect_close("equal weights: output", out, torch.full((1, 1, 1), 4.0))
    for scale in (1.0, 300.0):
        q, k, v = (numbers(2, 3, 4, seed=seed) * scale for seed in range(3))
        case = "two of three keys, and the third" + (", scores of ten thousands" if scale > 1 else "")
        parts = [module.attend(q, k[:, keys], v[:, keys], False) for keys in (slice(0, 2), slice(2, 3))]
        out, lse = pair(module.merge(*parts[0], *parts[1]), "output, log Σ exp")
        expect_close(f"{case}: output", out, F.scaled_dot_product_attention(q, k, v), rtol=1e-3, atol=1e-4 * scale)
        expect_close(f"{case}: log Σ exp", lse, (q @ k.transpose(-2, -1) / 2).logsumexp(-1))


def pair(found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Mismatch("what is returned", f"a tuple ({what})", found)
    return found


def ring_attention(module: ModuleType) -> None:
    for ranks, chunk in ((1, 2), (2, 1), (2, 3), (4, 2)):
        case = f"{ranks} ranks, {chunk} position{'s' * (chunk > 1)} each"
        q, k, v = (numbers(2, ranks * chunk, 4, seed=seed) for seed in range(3))
        parts = list(zip(*(x.chunk(ranks, dim=1) for x in (q, k, v)), strict=True))
        got, network = on_ranks(case, parts, lambda own, link: module.ring_attention(*own, link))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(ranks, dim=1)
        for rank in range(ranks):
            expect_close(f"{case}: rank {rank}", got[rank], expected[rank], rtol=1e-3, atol=1e-5)
        most = (ranks - 1) * 2 * 2 * chunk * 4 * 4
        remark = f"{TARGET}: keys and values of each rank pass every other once"
        expect_at_most(f"{case}: bytes sent", max(network.bytes_sent), most, remark=remark)


CHECKS = {
    "tensor_parallel_mlp": tensor_parallel_mlp,
    "sequence_parallel": sequence_parallel,
    "vocab_parallel_loss": vocab_parallel_loss,
    "expert_dispatch": expert_dispatch,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
    "merge_attention": merge_attention,
    "ring_attention": ring_attention,
}
