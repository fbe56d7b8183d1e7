"""The gradient of an embedding on a GPU, against PyTorch's in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.training.embedding import OP, embedding, embedding_gradient, reference
from lmworks.model import GPT
from lmworks.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-11}  # of one rounding, of a sum in fp32
GPT2, LLAMA = (65_536, 50_257, 768), (16_384, 128_256, 2048)  # tokens, vocab, hidden


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def drawn(kind: str, tokens: int, vocab: int) -> Tensor:
    """Numbers of tokens: as often as in text (Zipf), evenly, one alone, or each once."""
    rng = torch.Generator("cuda").manual_seed(0)
    if kind == "alike":
        return torch.full((tokens,), vocab - 1, device="cuda")
    numbers = torch.randperm(vocab, generator=rng, device="cuda")
    if kind == "once":
        return numbers[:tokens]
    chances = torch.arange(1, vocab + 1, device="cuda").float().pow(-1 if kind == "zipf" else 0)
    return numbers[torch.multinomial(chances, tokens, replacement=True, generator=rng)]


def close(mine: Tensor, grad: Tensor, ids: Tensor, vocab: int) -> None:
    """A row sums up to n numbers of fp32: the last bits of the largest of them are off."""
    exact = reference(grad.double(), ids, vocab)
    most = reference(grad.double().abs(), ids, vocab).max().item()
    assert (mine.dtype, mine.shape) == (grad.dtype, exact.shape)
    torch.testing.assert_close(mine.double(), exact, rtol=STEPS[mine.dtype], atol=1e-6 * most)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", ["zipf", "evenly", "alike", "once"])
@pytest.mark.parametrize("shape", [GPT2, LLAMA, (777, 901, 1300), (100, 300, 7)], ids=str)
def test_as_pytorchs_in_fp64(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    tokens, vocab, hidden = shape
    ids = drawn(kind, tokens, vocab)
    grad = random(len(ids), hidden, seed=1, dtype=dtype)
    mine = embedding_gradient(grad, ids, vocab, "triton")
    close(mine, grad, ids, vocab)
    assert torch.equal(embedding_gradient(grad, ids, vocab, "triton"), mine)


def test_a_table_of_more_numbers_than_32_bits_count() -> None:
    vocab, hidden = 2**20 + 3, 2052
    ids = torch.tensor([vocab - 1, 5, vocab - 1, vocab - 2] * 40, device="cuda")
    grad = random(len(ids), hidden, seed=2, dtype=BF16)
    mine = embedding_gradient(grad, ids, vocab, "triton")
    close(mine[-2:], grad[ids > 5], ids[ids > 5] - (vocab - 2), 2)
    assert mine.any(dim=1).nonzero().flatten().tolist() == [5, vocab - 2, vocab - 1]


def test_the_host_waits_for_nothing() -> None:
    weight = random(50_257, 768, seed=3, dtype=BF16).requires_grad_()
    ids, grad = drawn("zipf", 4096, 50_257).view(4, 1024), random(4, 1024, 768, seed=4, dtype=BF16)
    torch.autograd.grad(embedding(ids, weight, "triton"), weight, grad)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(embedding(ids, weight, "triton"), weight, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_has_the_same_gradients(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.from_preset("tiny", tie_embeddings=tied)
    tokens = torch.randint(0, spec.vocab, (3, 65), generator=torch.Generator().manual_seed(1)).cuda()

    def gradients(implementation: str) -> dict[str, Tensor]:
        monkeypatch.setattr(dispatch, "fastest", lambda op, *_, **__: implementation if op == OP else "torch")
        model = GPT(spec).cuda()
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    theirs, mine = gradients("torch"), gradients("triton")
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())
