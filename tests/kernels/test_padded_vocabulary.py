"""The loss over a vocabulary that is filled up for the GPU's products, against torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lmworks.kernels.training import cross_entropy
from lmworks.kernels.training.cross_entropy import IGNORE, linear_cross_entropy, padded_vocab, reference

TOKENS, VOCAB, WIDTH = 40, 67, 16


def losses(weight: Tensor, hidden: Tensor, targets: Tensor) -> dict[str, list[Tensor]]:
    """Loss and gradients of 3 · loss, both ways."""
    found = {}
    for name, loss_of in (("filled", linear_cross_entropy), ("reference", reference)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = loss_of(*leaves, targets)
        found[name] = [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]
    return found


@pytest.mark.parametrize("rows", [7, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padding_tokens_change_nothing(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits are negative: had the filling's (0, before it is masked) any weight, it would have most of it."""
    monkeypatch.setattr(cross_entropy, "padded_vocab", lambda vocab, hidden, fp8: 128)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", rows * 128)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.rand(TOKENS, WIDTH, generator=draw, dtype=dtype) + 0.5
    weight = -torch.rand(VOCAB, WIDTH, generator=draw, dtype=dtype)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    targets[::5] = IGNORE
    found = losses(weight, hidden, targets)
    for ours, theirs in zip(found["filled"], found["reference"], strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_unaligned_vocabularies_are_padded() -> None:
    with torch.device("meta"):
        narrow, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)
    assert padded_vocab(50257, narrow) == 50304
    assert padded_vocab(128256, narrow) == 128256
    assert padded_vocab(50264, narrow) == 50264
    assert padded_vocab(50264, narrow, fp8=True) == 50304
    assert padded_vocab(50257, wide) == 50257
    assert padded_vocab(50257, torch.empty(1, 1, dtype=torch.bfloat16)) == 50257  # on a CPU


@pytest.mark.parametrize("rows", [VOCAB, 128], ids=["as it is", "filled up"])
def test_a_tied_embeddings_gradient_is_added_in_place(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass makes one table, the embedding's; a sum in another would be the largest tensor of a step."""
    monkeypatch.setattr(cross_entropy, "padded_vocab", lambda vocab, hidden, fp8: rows)
    table = torch.randn(VOCAB, 1024).requires_grad_()
    tokens = torch.arange(TOKENS) % VOCAB
    loss = linear_cross_entropy(F.embedding(tokens, table), table, tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss.backward()
    assert seen.profiler is not None
    sizes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(size >= 4 * VOCAB * 1024 for size in sizes) == 1
    assert table.grad is not None and table.grad.shape == table.shape
