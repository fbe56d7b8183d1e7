"""The gradient of an embedding, against PyTorch's in fp64. The kernels run under Triton's interpreter (see
`test_interpreted`), on a GPU in tests/gpu."""

from __future__ import annotations

import importlib.util
import os
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.training import embedding as module
from lmworks.kernels.training.embedding import embedding, embedding_gradient, reference
from lmworks.model import GPT
from lmworks.spec import ModelSpec, SpecError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    from lmworks.kernels.training.embedding_triton import NARROW, Tiles, launch

    SMALL = Tiles(chunk=8, rows=4, block=16, parts=2, wide=16)
with_triton = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts off where a GPU rounds.
STEPS = {FP32: 1e-6, BF16: 2**-7, FP16: 2**-10}
ALIKE = [3] * 45  # from the first chunk to the last, which is not full
TWICE = [number // 2 for number in range(40)]
# Runs of one, of a chunk and of three; that end at an edge, before it and behind it
RUNS = [5] * 3 + [0] * 5 + [7] * 8 + [2] + [9] * 23 + [1] * 7 + [4] * 9


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(mine: Tensor, grad: Tensor, tokens: Tensor, vocab: int) -> None:
    exact = reference(grad.double(), tokens, vocab)
    assert (mine.dtype, mine.shape) == (grad.dtype, exact.shape)
    step = STEPS[mine.dtype]
    torch.testing.assert_close(mine.double(), exact, rtol=step, atol=4e-6)
    assert not mine[exact.abs().sum(dim=1) == 0].any()


# --- sums by token --------------------------------------------------------------------------------------


@with_triton
@pytest.mark.parametrize(
    ("ids", "dtype"),
    [(ALIKE, FP32), (TWICE, FP32), (RUNS, FP32), (RUNS, BF16), (RUNS, FP16), (RUNS[:16], FP32), ([2], FP32)],
    ids=["alike", "twice", "runs", "runs in bf16", "runs in fp16", "two", "one"],
)
def test_runs_over_the_edges_of_chunks(ids: list[int], dtype: torch.dtype) -> None:
    tokens, vocab = torch.tensor(ids), max(ids) + 3
    tokens = tokens[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    grad = random(len(ids), 12, seed=2, dtype=dtype)
    mine = launch(grad, tokens, vocab, SMALL)
    close(mine, grad, tokens, vocab)
    assert torch.equal(launch(grad, tokens, vocab, SMALL), mine)


@with_triton
def test_any_shape() -> None:
    rng = Random(0)
    for seed in range(6):
        batch, seq, hidden = rng.randint(1, 3), rng.randint(1, 25), rng.choice([1, 7, 16, 33])
        vocab = rng.choice([1, 4, 60])
        tokens = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
        grad = random(batch, seq, hidden, seed=seed)
        close(launch(grad, tokens, vocab, SMALL), grad, tokens, vocab)


@with_triton
@pytest.mark.parametrize("vocab", [2**15 + 9, 2**16, 2**16 + 5])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_numbers_of_tokens_that_16_bits_hold_and_others(vocab: int, dtype: torch.dtype) -> None:
    ids = [0, vocab - 1, vocab - NARROW, 2**15 - 1, 2**15, 2**15 + 8, 1, vocab - 1, 0]
    tokens = torch.tensor([max(0, number) for number in ids], dtype=dtype)
    grad = random(len(ids), 3, seed=3)
    close(launch(grad, tokens, vocab, SMALL), grad, tokens, vocab)


@with_triton
def test_gradients_that_do_not_lie_side_by_side() -> None:
    tokens = torch.tensor([[0, 1, 1], [2, 0, 1]])
    for grad in (random(2, 3, 40, seed=4)[..., 3:20], random(17, 2, 3, seed=5).permute(1, 2, 0),
                 random(1, 1, 17, seed=6).expand(2, 3, 17), random(3, 2, 17, seed=7).transpose(0, 1)):  # fmt: skip
        close(launch(grad, tokens, 4, SMALL), grad.contiguous(), tokens, 4)


@with_triton
def test_what_is_not_finite_stays_with_its_token() -> None:
    tokens = torch.tensor([1, 0, 1, 3, 0])
    grad = random(5, 4, seed=8)
    grad[0, 1], grad[3, 2] = torch.inf, torch.nan
    mine = launch(grad, tokens, 4, SMALL)
    assert mine.isfinite().logical_not().nonzero().tolist() == [[1, 1], [3, 2]]


@with_triton
@pytest.mark.parametrize(("tokens", "hidden"), [((0,), 5), ((2, 0), 5)])
def test_of_no_tokens_it_is_zero(tokens: tuple[int, ...], hidden: int) -> None:
    mine = launch(torch.zeros(*tokens, hidden), torch.zeros(tokens, dtype=torch.int64), 3)
    assert torch.equal(mine, torch.zeros(3, hidden))


# --- as an operation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
def test_forward_and_backward(implementation: str) -> None:
    tokens = torch.randint(0, 9, (3, 23), generator=torch.Generator().manual_seed(0))
    weight = random(11, 24, seed=9).requires_grad_()
    out = embedding(tokens, weight, implementation)
    assert torch.equal(out, F.embedding(tokens, weight))
    grad = random(3, 23, 24, seed=10)
    (mine,) = torch.autograd.grad(out, weight, grad)
    close(mine, grad, tokens, 11)
    assert torch.equal(embedding_gradient(grad, tokens, 11, implementation), mine)


@with_triton
def test_a_second_derivative_is_refused() -> None:
    weight = random(4, 8, seed=11).requires_grad_()
    out = embedding(torch.tensor([1, 3, 1]), weight, "triton")
    (first,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_needs_no_gradient_asks_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "fastest", lambda *_, **__: "triton")
    monkeypatch.setattr(module, "Embedding", None)
    tokens, weight = torch.tensor([1, 0]), random(2, 3, seed=12)
    assert torch.equal(embedding(tokens, weight), weight[[1, 0]])
    with torch.no_grad():
        assert torch.equal(embedding(tokens, weight.requires_grad_()), weight[[1, 0]])


def test_an_implementation_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="embedding_gradient has no implementation 'tritn'; did you mean 'triton'"):
        embedding(torch.tensor([0]), torch.zeros(1, 1, requires_grad=True), "tritn")


# --- in a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
def test_a_model_has_the_same_gradients(implementation: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the table's to the last bit; the table of positions stays with PyTorch."""
    spec = ModelSpec.from_preset("tiny", positions="learned", tie_embeddings=tied)
    tokens = torch.randint(0, spec.vocab, (2, 18), generator=torch.Generator().manual_seed(2))
    asked = []

    def fastest(op: str, _device: torch.device, **shape: int) -> str:
        if op != module.OP:
            return "torch"
        asked.append(shape)
        return implementation

    def gradients() -> dict[str, Tensor]:
        model = GPT(spec)
        _, loss = model(tokens[:, :-1], tokens[:, 1:], keep_logits=False)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    theirs = gradients()
    monkeypatch.setattr(dispatch, "fastest", fastest)
    mine = gradients()
    assert asked == [{"tokens": 34, "vocab": spec.vocab, "hidden": spec.hidden}]
    torch.testing.assert_close(mine.pop("embed.weight"), theirs.pop("embed.weight"), rtol=1e-6, atol=1e-8)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
