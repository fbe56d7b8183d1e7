"""The vocabulary-parallel loss alone, against torch's cross-entropy, and what it never holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmworks.kernels.training import cross_entropy
from lmworks.parallel import collectives
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.tensor_parallel import VocabParallelCrossEntropy
from lmworks.spec import Grid


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


def vocabulary_loss(rank: int) -> dict[str, float]:
    tokens, vocab, width, rows = 48, 256, 8, 8
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, width, generator=generator), torch.randn(vocab, width, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[: 2 * rows] = cross_entropy.IGNORE  # whole chunks
    targets[::5] = cross_entropy.IGNORE
    hidden[::3] *= 50  # logits of a few hundred: exp would overflow
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    expected = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    expected_hidden, expected_weight = torch.autograd.grad(3 * expected, leaves)

    mesh = Mesh(Grid(tp=4), "cpu")
    part = weight.detach().chunk(4)[rank].clone().requires_grad_()
    cross_entropy.CHUNK_LOGITS = rows * part.shape[0]
    with Largest() as largest:
        loss = cross_entropy.linear_cross_entropy(hidden, part, targets, VocabParallelCrossEntropy(mesh))
        grad_hidden, grad_part = torch.autograd.grad(3 * loss, [hidden, part])
    grad_hidden = collectives.all_reduce(grad_hidden, mesh.group("tp"))
    return {
        "loss": loss.item(),
        "off": abs(loss.item() - expected.item()) / expected.item(),
        "hidden": float((grad_hidden - expected_hidden).norm() / expected_hidden.norm()),
        "weight": float((grad_part - expected_weight.chunk(4)[rank]).norm() / expected_weight.norm()),
        "largest": largest.elements / (rows * part.shape[0]),  # in chunks of one rank's logits
    }


def test_vocabulary_loss_without_a_tensor_of_all_logits() -> None:
    results = on_ranks(4, vocabulary_loss)
    assert len({found["loss"] for found in results}) == 1
    for found in results:
        assert found["off"] <= 1e-6
        assert max(found["hidden"], found["weight"]) <= 1e-5
        assert found["largest"] == 1
