"""What flash attention does not take is told in one line, before any kernel is launched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training.flash_attention import flash_attention
from lmworks.spec import SpecError


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        (heads(1, 4, 4, 8), heads(1, 5, 2, 8), r"k, v of as many positions .* got q \(1, 4, 4, 8\), k \(1, 5, 2, 8\)"),
        (heads(1, 4, 4, 8), heads(1, 4, 3, 8), "a divisor of its heads"),
        (heads(1, 4, 4, 8), heads(1, 4, 2, 8, dtype=torch.bfloat16), "takes one of fp32, bf16 and fp16"),
        (heads(1, 4, 4, 8, dtype=torch.float64), heads(1, 4, 4, 8, dtype=torch.float64), "got torch.float64"),
        (heads(1, 4, 1, 264), heads(1, 4, 1, 264), "heads of at most 256; head_dim is 264"),
        (
            heads(16_384, 1, 4, 1),
            heads(16_384, 1, 4, 1),
            r"at most 65,535 heads .*16,384 × 4.* lower data\.micro_batch",
        ),
    ],
)
def test_unsupported_inputs_are_rejected(q: Tensor, k: Tensor, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        flash_attention(q, k, k, implementation="triton")


def test_documents_must_match_batch() -> None:
    q, documents = heads(2, 4, 1, 8), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(SpecError, match=r"documents must be \(batch, seq\) = \(2, 4\); they are \(1, 4\)"):
        flash_attention(q, q, q, documents=documents)


def test_no_kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = heads(1, 4, 1, 8)
    with pytest.raises(SpecError, match=r"these tensors are on cpu; use model\.attention = 'sdpa'"):
        flash_attention(q, q, q, implementation="triton")
    assert flash_attention(q, q, q).shape == q.shape
