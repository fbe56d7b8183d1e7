"""Tensor and sequence parallelism against one rank: the loss and every gradient, on real gloo ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmworks.kernels import cross_entropy
from lmworks.model.attention import dense
from lmworks.model.gpt import GPT, initial_weight
from lmworks.parallel import collectives
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.splits import Splits
from lmworks.parallel.tensor import apply_tensor_parallel, enable_async_tp, local_heads
from lmworks.parallel.vocab import VocabLoss
from lmworks.spec import Grid, ModelSpec, ParallelSpec, SpecError

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 16, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {"heads": 8, "kv_heads": 4},
    "fewer kv heads than ranks": {"heads": 8, "kv_heads": 2, "qkv_bias": True},
    "one kv head": {"heads": 8, "kv_heads": 1, "qk_norm": True},
    "gpt-2": {"norm": "layer", "bias": True, "positions": "learned", "mlp": "gelu", "tie_embeddings": True},
    "qk-norm": {"qk_norm": True, "tie_embeddings": True},
    "alibi": {"positions": "alibi"},
    "experts": {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1},
}
LAYOUTS = [{"tp": tp, "dp": 4 // tp, "sp": sp} for tp in (2, 4) for sp in (False, True)]


def draw(spec: ModelSpec, name: str, shape: torch.Size) -> Tensor:
    """The initial weight; biases and norms, which start equal everywhere, with noise of their own."""
    weight = initial_weight(spec, 0, name, shape)
    if name.endswith("bias") or "norm" in name:
        weight += 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return weight


def make_part(spec: ModelSpec, parallel: ParallelSpec, mesh: Mesh, **part: Any) -> tuple[GPT, Splits]:
    """A network or a stage of it, cut on the meta device and then given this rank's part of the drawn weights."""
    splits = Splits()
    with torch.device("meta"):
        model = GPT(spec, **part)
    apply_tensor_parallel(model, parallel, mesh, splits)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = draw(spec, name, splits.shape(name, parameter.shape))
            parameter.copy_(splits.part_of(name, whole, mesh))
    return model, splits


def make_whole(spec: ModelSpec) -> GPT:
    model = GPT(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(spec, name, parameter.shape))
    return model


def make_batch(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, spec.vocab, (2, 3, spec.context), generator=generator)
    targets[0, :5] = cross_entropy.IGNORE
    documents = torch.tensor([[0] * 16, [0] * 7 + [1] * 9, [0] * 3 + [1] * 8 + [2] * 5])
    return {"tokens": tokens, "targets": targets, "documents": documents}


def whole_gradients(model: GPT, splits: Splits, mesh: Mesh) -> dict[str, Tensor]:
    """What the gradients of this rank's parts amount to: cut ones joined, partial ones summed."""
    group, found = mesh.group("tp"), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = parameter.grad
        if name in splits.partial:
            grad = collectives.all_reduce(grad, mesh.group(splits.partial[name]))
        for dim in splits.axes(name).values():
            grad = collectives.all_gather(grad, dim, group)
        found[name] = grad
    return found


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """‖Δ‖/‖g‖ of each gradient.

    Without rotary positions a bias of the keys adds the same to all scores of a query, which softmax does not see:
    its gradient is 0 but for rounding, and is measured by that of the queries' bias.
    """
    assert found.keys() == expected.keys()
    unseen = "positions.weight" in expected
    scale = {name: name.replace(".k.bias", ".q.bias") if unseen else name for name in expected}
    return {name: float((found[name] - g).norm() / expected[scale[name]].norm()) for name, g in expected.items()}


def compare(
    rank: int,
    changes: dict[str, Any],
    layouts: list[dict[str, Any]],
    recompute: str = "none",
    prepare: Callable[[GPT], object] = lambda _: None,
) -> dict[str, dict[str, float]]:
    """For each layout: the relative difference of the loss and of every gradient from one rank's."""
    spec = ModelSpec(**(SHAPE | changes))
    batch = make_batch(spec)
    reference = make_whole(spec)
    _, expected_loss = reference(**batch, keep_logits=False)
    expected_loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    outcome = {}
    for layout in layouts:
        parallel = ParallelSpec(**layout)
        mesh = Mesh(Grid.of(parallel), "cpu")
        model, splits = make_part(spec, parallel, mesh)
        model.recompute = recompute
        prepare(model)
        attend = dense(spec, torch.device("cpu"), batch["documents"], heads=local_heads(spec, mesh))
        _, loss = model(**batch, attend=attend, keep_logits=False)
        loss.backward()
        found = differences(whole_gradients(model, splits, mesh), expected)
        outcome[str(layout)] = {"loss": float((loss - expected_loss).abs() / expected_loss), **found}
    return outcome


def assert_exact(results: list[dict[str, dict[str, float]]]) -> None:
    for rank, layouts in enumerate(results):
        for layout, found in layouts.items():
            assert found["loss"] <= 1e-6, (rank, layout)
            worst = max(found, key=lambda name: found[name])
            assert found[worst] <= 1e-5, (rank, layout, worst, found[worst])


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_are_those_of_one_rank(model: str) -> None:
    assert_exact(on_ranks(4, compare, MODELS[model], LAYOUTS))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_nothing(recompute: str) -> None:
    assert_exact(on_ranks(2, compare, MODELS["gpt-2"] | {"qk_norm": True}, [{"tp": 2, "sp": True}], recompute))
