"""The loss whose kernel turns logits into their gradient, against torch's cross-entropy and autograd.

The kernels run where there is a GPU, or under Triton's interpreter: TRITON_INTERPRET=1, with triton on the path. The
interpreter rounds to bf16 wrongly, so there half precision is fp16.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.training import cross_entropy
from lmworks.kernels.training.cross_entropy import (
    IGNORE,
    WeightGradient,
    chunk_rows,
    linear_cross_entropy,
    reference,
    sum_dtype,
)
from lmworks.parallel import collectives
from lmworks.parallel.tensor_parallel import VocabParallelCrossEntropy
from lmworks.spec import LMWorksError

GPU = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")


def drawn(tokens: int, vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator)
    hidden[1] *= 40  # logits of a few hundred: exp would overflow
    weight = torch.randn(vocab, width, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = IGNORE
    targets[-1] = vocab - 1  # the last column, on whatever side of a step it lies
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), targets.to(DEVICE)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("vocab", "columns"), [(50, 50), (131, 192), (64, 64)])
def test_logits_are_replaced_by_gradient(
    vocab: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 64 columns: less than one, two and a part with columns that are no tokens, exactly one."""
    from lmworks.kernels.training import cross_entropy_triton

    monkeypatch.setattr(cross_entropy_triton, "BLOCK", 64)
    logits = (torch.randn(7, columns, generator=torch.Generator().manual_seed(0)) * 9).to(DEVICE, dtype)
    logits[:, vocab:] = 99  # must not count
    logits[2, 3] = 500
    _, _, targets = drawn(7, vocab, 1, dtype)
    wanted = logits[:, :vocab].detach().double().requires_grad_()
    loss = F.cross_entropy(wanted, targets, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, wanted)
    before = logits.clone()
    alone = cross_entropy_triton.loss_in_place(logits, targets, False, vocab)
    assert torch.equal(logits, before)
    graded = cross_entropy_triton.loss_in_place(logits, targets, True, vocab)
    assert float(alone) == float(graded) == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(logits[:, :vocab], gradient.to(dtype), rtol=2e-6 if dtype == torch.float32 else 1e-2,
                               atol=1e-6)  # fmt: skip
    assert not logits[:, vocab:].any()
    assert not logits[targets == IGNORE].any()


@with_triton
@pytest.mark.parametrize(
    ("vocab", "columns", "held"),
    [
        (500, 512, 13),
        pytest.param(1000, 1000, 2, marks=pytest.mark.slow),
        (1030, 1088, 3),
    ],
)
def test_one_pass_gradient_equals_two_pass(
    vocab: int, columns: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 256 logits, all of them held or the last few, the last one cut; more rows than programs, so that each
    takes on the next row. The interpreter cuts bf16 where a GPU rounds: twice the error."""
    from lmworks.kernels.training import cross_entropy_triton

    for name, value in {"ONE_PASS_WARPS": 1, "HELD_BLOCKS": held, "MIN_ROW": 64}.items():
        monkeypatch.setattr(cross_entropy_triton, name, value)
    monkeypatch.setattr(cross_entropy_triton, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(cross_entropy_triton, "launch", lambda *_, **__: pytest.fail("read twice"))
    logits = (torch.randn(7, columns, generator=torch.Generator().manual_seed(0)) * 5).to(DEVICE, torch.bfloat16)
    logits[:, vocab:] = 99  # must not count
    logits[2, 3] = 500
    targets = torch.tensor([0, vocab - 1, 3, IGNORE, 257, IGNORE, vocab - 2], device=DEVICE)
    wanted = logits[:, :vocab].detach().double().requires_grad_()
    loss = F.cross_entropy(wanted, targets, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, wanted)
    found = cross_entropy_triton.loss_in_place(logits, targets, True, vocab)
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(logits[:, :vocab].double(), gradient, rtol=2**-7, atol=1e-7)
    assert not logits[:, vocab:].any()
    assert not logits[targets == IGNORE].any()


@with_triton
def test_one_pass_eligibility() -> None:
    from lmworks.kernels.training.cross_entropy_triton import one_pass_supports

    rows = torch.empty(2, 50_304, dtype=torch.bfloat16)
    assert one_pass_supports(rows, 50_257) and one_pass_supports(rows, 49_153)
    assert not one_pass_supports(rows, 49_152)  # the last block has no token
    assert not one_pass_supports(rows.half(), 50_257)
    assert not one_pass_supports(rows[:, :50_300], 50_257)  # half a load at the end
    assert not one_pass_supports(rows[:, :8192], 8192)  # short


@with_triton
def test_invalid_target_gives_nan_loss() -> None:
    from lmworks.kernels.training.cross_entropy_triton import loss_in_place

    logits = torch.zeros(3, 64, device=DEVICE)
    assert loss_in_place(logits, torch.tensor([1, 60, 2], device=DEVICE), False, 60).isnan()
    assert loss_in_place(logits, torch.tensor([1, -1, 2], device=DEVICE), False, 60).isnan()


@with_triton
@pytest.mark.parametrize("rows", [4, 64], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_loss_and_gradients_equal_torch(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is kept in the precision of the products; its gradient is, too, however many chunks there are."""
    tokens, vocab, width = 11, 70, 16
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_IN_PLACE", rows * 128 * dtype.itemsize)
    monkeypatch.setattr(cross_entropy, "padded_vocab", lambda vocab, hidden, fp8: 128)
    hidden, weight, targets = drawn(tokens, vocab, width, dtype)
    found, wanted = [], []
    for results, loss_of, given in (
        (found, lambda *args: linear_cross_entropy(*args, implementation="triton"), (hidden, weight)),
        (wanted, reference, (hidden.double(), weight.double())),
    ):
        leaves = [leaf.detach().requires_grad_() for leaf in given]
        loss = loss_of(*leaves, targets)
        results += [loss.detach(), *torch.autograd.grad(0.5 * loss, leaves)]
    assert [one.dtype for one in found] == [torch.float32, dtype, dtype]
    bounds = (1e-6, 1e-5, 1e-5) if dtype == torch.float32 else (2e-3, 1e-2, 1e-2)
    for ours, theirs, bound in zip(found, wanted, bounds, strict=True):
        assert off(ours, theirs) < bound
    with torch.no_grad():
        assert float(linear_cross_entropy(hidden, weight, targets, implementation="triton")) == float(found[0])


@with_triton
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))])
def test_random_shapes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any number of rows, the last of them shorter, over a vocabulary that fills no block."""
    draw = Random(seed)
    tokens, vocab, width = draw.randint(2, 40), draw.randint(2, 1500), draw.randint(1, 70)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_IN_PLACE", draw.randint(1, tokens) * vocab * 4)
    hidden, weight, targets = drawn(tokens, vocab, width, torch.float32)
    hidden[1] /= 40
    found, wanted = [], []
    for results, loss_of, given in (
        (found, partial(linear_cross_entropy, implementation="triton"), (hidden, weight)),
        (wanted, reference, (hidden.double(), weight.double())),
    ):
        leaves = [leaf.detach().requires_grad_() for leaf in given]
        loss = loss_of(*leaves, targets)
        results += [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert off(ours, theirs) < 1e-5


@with_triton
def test_sharded_vocabulary_gives_full_gradient() -> None:
    """As two ranks have it: each the sums of its own columns, and the gradient once the sum of all is known."""
    from lmworks.kernels.training.cross_entropy_triton import gradient_in_place, row_sums

    logits = (torch.randn(6, 100, generator=torch.Generator().manual_seed(0)) * 5).to(DEVICE)
    targets = torch.tensor([3, 99, 50, 49, IGNORE, 7], device=DEVICE)
    counted = targets != IGNORE
    onehot = F.one_hot(targets.clamp(min=0), 100) * counted.unsqueeze(1)
    halves = [half.contiguous() for half in logits.split(50, dim=1)]
    index = [torch.where((targets >= s) & (targets < s + 50), targets - s, -1) for s in (0, 50)]
    sums = [row_sums(half, where) for half, where in zip(halves, index, strict=True)]
    whole = torch.stack([one[0] for one in sums]).logsumexp(dim=0)
    torch.testing.assert_close(whole, logits.logsumexp(dim=1))
    torch.testing.assert_close(sums[0][1] + sums[1][1], (logits * onehot).sum(dim=1))
    for half, where in zip(halves, index, strict=True):
        gradient_in_place(half, where, whole.masked_fill(~counted, torch.inf))
    wanted = logits.softmax(dim=1) * counted.unsqueeze(1) - onehot
    torch.testing.assert_close(torch.cat(halves, dim=1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_vocab_parallel_loss_equals_full_loss(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one after the other: first each tells its own numbers, then it hears both."""
    logits = (torch.randn(6, 100, generator=torch.Generator().manual_seed(0)) * 20).to(DEVICE, dtype)
    _, _, targets = drawn(6, 100, 1, dtype)
    wanted = logits.double().requires_grad_()
    whole = F.cross_entropy(wanted, targets, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(whole, wanted)
    told: list[Tensor] = []

    def exchange(own: Tensor, *_: object) -> Tensor:
        told.append(own.clone())
        return torch.cat(told[:2])

    monkeypatch.setattr(collectives, "all_gather", exchange)
    for graded, rank in ((False, 0), (False, 1), (True, 0), (True, 1)):
        loss = object.__new__(VocabParallelCrossEntropy)
        loss.group, loss.rank = None, rank
        half = logits[:, 50 * rank : 50 * (rank + 1)].contiguous()
        found = loss(half, targets, graded, implementation)
        if graded:
            assert float(found) == pytest.approx(float(whole.detach()), rel=1e-5)
            part = gradient[:, 50 * rank : 50 * (rank + 1)]
            torch.testing.assert_close(half.double(), part, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)


def test_chunk_sizes() -> None:
    assert chunk_rows(16_384, 128_256, "cuda", 2, in_place=True) == 2048
    assert chunk_rows(16_384, 128_256, "cuda", 2, in_place=False) == 1046
    assert chunk_rows(65_536, 50_304, "cuda", 2, in_place=True) == 20 * 256  # and the thirteenth has 16 · 256
    assert chunk_rows(5000, 50_304, "cuda", 2, in_place=True) == 5000
    assert chunk_rows(10, 2**40, "cuda", 2, in_place=True) == 1
    assert chunk_rows(0, 7, "cuda", 4, in_place=True) == 1


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_bf16_head_accumulates_many_chunks_in_fp32(kept: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chunks of one token each: a sum in bf16 would lose a part of each that comes late."""
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 16)
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.rand(64, 8, generator=generator) + 1).bfloat16()  # gradients of one sign: sums grow
    weight = torch.zeros(16, 8, dtype=kept).requires_grad_()
    targets = torch.zeros(64, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, targets).backward()
    exact = weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(hidden.double(), exact), targets, reduction="sum").backward()
    assert weight.grad is not None and exact.grad is not None and weight.grad.dtype == kept
    assert off(weight.grad, exact.grad) < 3e-3  # a sum in bf16: 2e-2


def test_few_chunks_accumulate_in_weight_dtype() -> None:
    half, wide = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    assert [sum_dtype(half, half, chunks, True) for chunks in (1, 8, 16, 17)] == [half.dtype] * 3 + [wide.dtype]
    assert sum_dtype(half, half, 2, False) == sum_dtype(wide, half, 2, True) == torch.float32
    assert sum_dtype(half, wide, 1, True) == torch.float32


@pytest.mark.parametrize(("drift", "bounds"), [(0.0, (1.9, 2.3)), (1.0, (1.4, 1.7))], ids=["anywhere", "one way"])
def test_rounding_error_of_eight_chunks(drift: float, bounds: tuple[float, float]) -> None:
    """Beside the whole product rounded once, against fp64: √(9/2) = 2.1 where chunks point anywhere, 1.6 where they
    agree. Products that are rounded before they are added would be at 2.4 and 1.74."""
    generator = torch.Generator().manual_seed(0)
    grads = (torch.randn(8, 64, 96, generator=generator) + drift).bfloat16()
    states = (torch.randn(8, 64, 80, generator=generator) + drift).bfloat16()
    total = WeightGradient(torch.empty(96, 80, dtype=torch.bfloat16), fused=False)
    for grad, hidden in zip(grads, states, strict=True):
        total.add(grad, hidden)
    exact = grads.flatten(0, 1).double().t() @ states.flatten(0, 1).double()
    low, high = bounds
    assert low < off(total.rows(96), exact) / off(exact.bfloat16(), exact) < high


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_under_no_grad(mode: type, monkeypatch: pytest.MonkeyPatch) -> None:
    graded: list[bool] = []

    def chunk(_logits: Tensor, _target: Tensor, gradient: bool, *_: object, **__: object) -> Tensor:
        graded.append(gradient)
        return torch.ones(())

    monkeypatch.setattr(cross_entropy, "chunk_loss", chunk)
    monkeypatch.setattr(WeightGradient, "add", lambda *_: pytest.fail("a gradient of the head"))
    weight = torch.zeros(6, 4).requires_grad_()
    with mode():
        assert linear_cross_entropy(torch.zeros(5, 4), weight, torch.zeros(5, dtype=torch.int64)) == 1
    assert graded == [False]


def test_second_derivative_is_rejected() -> None:
    hidden, weight, targets = drawn(5, 9, 4, torch.float32)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(LMWorksError, match=r"differentiated once; for more use .*cross_entropy\.reference"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_retained_graph_can_run_backward_again(implementation: str, dtype: torch.dtype) -> None:
    """As a pipeline's split backward pass does. Both gradients are scaled in place by whoever comes last."""
    hidden, weight, targets = drawn(9, 24, 16, dtype)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden * 1, weight, targets, implementation=implementation)
    first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    kept = [one.clone() for one in first]
    second, last = (torch.autograd.grad(3 * loss, leaves, retain_graph=again) for again in (True, False))
    for results in zip(kept, first, second, last, strict=True):
        assert all(torch.equal(result, results[0]) for result in results)


def test_zero_tokens_give_zero_gradient() -> None:
    hidden, weight = torch.zeros(0, 4).requires_grad_(), torch.ones(6, 4).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == 0
    assert weight.grad is not None and not weight.grad.any()


def test_first_chunk_overwrites_buffer() -> None:
    total = WeightGradient(torch.full((3, 2), torch.nan), fused=False)
    grad, hidden = torch.randn(5, 3), torch.randn(5, 2)
    total.add(grad, hidden)
    total.add(grad, hidden)
    torch.testing.assert_close(total.rows(2), 2 * (grad.t() @ hidden)[:2])


def test_fp8_logits_are_close_and_gradient_stays_bf16() -> None:
    hidden, weight, targets = (x.cpu() for x in drawn(32, 48, 32, torch.float32))
    hidden /= 4
    results = []
    for fp8 in (False, True):
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        loss = linear_cross_entropy(*leaves, targets, fp8=fp8)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    plain, small = results
    assert 0 < off(small[0], plain[0]) < 0.02
    for ours, theirs in zip(small[1:], plain[1:], strict=True):
        assert 0 < off(ours, theirs) < 0.2
    # The gradient of the hidden states is that of the rounded logits, times the weight as it is.
    from lmworks.kernels.training.float8 import fp8_linear

    p = fp8_linear(weight)(hidden).softmax(dim=1)
    counted = (targets != IGNORE).unsqueeze(1)
    exact = ((p - F.one_hot(targets.clamp(min=0), 48)) * counted) @ weight
    torch.testing.assert_close(small[1], exact, rtol=1e-5, atol=1e-5)
