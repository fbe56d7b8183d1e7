"""Flash attention on a GPU: against PyTorch's own attention and its autograd in fp64, at the tiles that are used."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.training.flash_attention import flash_attention
from lmworks.model import GPT
from lmworks.model.activation_checkpointing import SELECTIVE_POLICIES, checkpointed_forward
from lmworks.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# ‖difference‖ / ‖result‖: weights are rounded to 8 (bf16) or 11 bits before a product, results once more.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    seq: int
    head_dim: int
    heads: int = 4
    kv_heads: int = 4
    window: int = 0
    lengths: tuple[int, ...] = ()  # of the documents of the first sequence; the second is whole
    dtype: torch.dtype = BF16

    def documents(self) -> Tensor | None:
        if not self.lengths:
            return None
        first = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        return torch.stack((first, torch.zeros_like(first))).cuda()

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the result."""
        rng = torch.Generator(device="cuda").manual_seed(self.seq)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(2, self.seq, n, self.head_dim) for n in heads]
        return [torch.randn(shape, device="cuda", generator=rng).to(self.dtype) for shape in shapes]


CASES = {
    "64": Case(1024, 64),
    "128": Case(1024, 128),
    "64, odd, shared keys": Case(1001, 64, heads=8, kv_heads=2),
    "128, odd, shared keys": Case(777, 128, heads=8, kv_heads=2),
    "64, fp16": Case(640, 64, dtype=FP16),
    "128, window": Case(1500, 128, window=300),
    "64, documents": Case(1300, 64, lengths=(1, 200, 99, 600, 400)),
    "128, documents, window, shared keys": Case(900, 128, 4, 1, window=130, lengths=(100, 700, 100)),
    "32": Case(500, 32),
    "80": Case(500, 80),
    "100": Case(300, 100, heads=2, kv_heads=1),
    "256": Case(500, 256),
    "256, documents, window": Case(500, 256, window=100, lengths=(77, 423)),
    "fp32": Case(300, 64, dtype=torch.float32),
    "fp32, documents, window, shared keys": Case(301, 128, 4, 2, 50, (100, 201), dtype=torch.float32),
    "one": Case(1, 64),
}


def expected(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The result and the gradients of q, k and v, by SDPA in fp64."""
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (q, k, v))
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool, device="cuda").tril()
    if case.window:
        mask &= mask.triu(1 - case.window)
    mask = mask.expand(2, 1, -1, -1)
    if (documents := case.documents()) is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, (q, k, v), grad.double().transpose(1, 2)))]


def found(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, window=case.window, documents=case.documents(), implementation="triton")
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def compare(case: Case) -> None:
    given = case.inputs()
    least = 1e-3 * given[-1].double().norm()  # who sees one key has gradients of zero, and fp32 sums nearly so
    for name, want, got in zip(("out", "dq", "dk", "dv"), expected(case, *given), found(case, *given), strict=True):
        assert got.dtype == case.dtype
        off = ((got.double() - want).norm() / want.norm().clamp(min=least)).item()
        assert off < CLOSE[case.dtype], f"{name} is off by {off:.2g}"


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_equal_sdpa(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    seq, kv_heads = draw.randint(1, 1200), draw.choice((1, 2))
    cut = draw.randint(1, seq)
    compare(
        Case(
            seq,
            draw.choice((40, 64, 96, 128)),
            kv_heads * draw.choice((1, 3)),
            kv_heads,
            draw.choice((0, 0, draw.randint(1, seq))),
            (cut, seq - cut) if draw.random() < 0.5 and cut < seq else (),
            draw.choice((BF16, FP16)),
        )
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_deterministic(head_dim: int) -> None:
    case = Case(2048, head_dim, heads=8, kv_heads=2, lengths=(1000, 1048))
    given = case.inputs()
    for one, other in zip(found(case, *given), found(case, *given), strict=True):
        assert torch.equal(one, other)


def test_long_sequences_do_not_overflow_their_offsets() -> None:
    """Beyond 2³¹ bytes of q; the last queries see one document, which stands alone as well."""
    seq, tail = 131_072, 300
    q, k, v = (torch.randn(1, seq, 64, 128, device="cuda", dtype=BF16) for _ in range(3))
    documents = (torch.arange(seq, device="cuda") >= seq - tail).long().unsqueeze(0)
    out = flash_attention(q, k, v, documents=documents, implementation="triton")
    alone = flash_attention(q[:, -tail:], k[:, -tail:], v[:, -tail:], implementation="triton")
    torch.testing.assert_close(out[:, -tail:], alone, rtol=0, atol=2e-2)


def gradients_of(spec: ModelSpec, *, compiled: bool = False, recompute: str = "none") -> dict[str, Tensor]:
    model = GPT(spec, seed=1).cuda()
    for block in model.layers():
        block.recompute = recompute
        if compiled:
            if recompute in SELECTIVE_POLICIES:  # as parallelize does it
                block.forward = checkpointed_forward(block, recompute)
                block.recompute = "none"
            block.compile()
    tokens = torch.randint(0, 256, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()
    documents = (torch.arange(512) >= 200).long().expand(2, -1).cuda()
    with torch.autocast("cuda", dtype=BF16):
        _, loss = model(tokens, tokens.roll(-1, 1), documents=documents)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "mlp", "full"])
def test_model_trains_with_flash_attention(recompute: str, compiled: bool) -> None:
    def spec(attention: str) -> ModelSpec:
        return ModelSpec(vocab=256, hidden=256, layers=2, heads=4, kv_heads=2, context=512, attention=attention)

    want = gradients_of(spec("reference"))
    got = gradients_of(spec("flash"), compiled=compiled, recompute=recompute)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() < 0.03 * gradient.norm(), name
