"""Tensor and sequence parallelism against one rank: the loss and every gradient, on real gloo ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layouts import mesh_of
from lmworks.kernels.training import cross_entropy
from lmworks.model.attention import dense
from lmworks.model.gpt import GPT, initial_weight
from lmworks.parallel import collectives
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.sharding_plan import ShardingPlan
from lmworks.parallel.tensor_parallel import apply_tensor_parallel, local_heads
from lmworks.spec import Grid, ModelSpec, ParallelSpec, SpecError

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 64, "context": 16, "init_std": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {"heads": 8, "kv_heads": 4, "qk_norm": True, "tie_embeddings": True},
    "fewer kv heads than ranks": {"heads": 8, "kv_heads": 2, "qkv_bias": True},
    "one kv head": {"heads": 8, "kv_heads": 1, "qk_norm": True},
    "gpt-2": {"norm": "layer", "bias": True, "positions": "learned", "mlp": "gelu", "tie_embeddings": True},
    "alibi": {"positions": "alibi"},
    "partial rotary": {"rope_fraction": 0.5, "kv_heads": 2},
    "norms after": {"norm_placement": "post"},
    "norms before and after": {"norm_placement": "both"},
    "scales": {"attention_scale": 0.3, "embed_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.5},
    "biases of attention": {"out_bias": True, "mlp": "geglu"},
    "latent": {"heads": 8, "kv_lora_rank": 12, "q_lora_rank": 16, "head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6},
    "experts": {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "balance_loss": 0.3},
    "dense layers among experts": {"experts": 4, "expert_ffn": 16, "mlp_layers": ("dense", "experts")},
    "gated experts": {
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 16,
        "shared_experts": 1,
        "shared_gate": True,
        "norm_topk": False,
        "router": "sigmoid",
        "routed_scale": 2.0,
        "balance_loss": 0.3,
    },
}
LAYOUTS = [{"tp": tp, "dp": 4 // tp, "sp": sp} for tp in (2, 4) for sp in (False, True)]


def draw(spec: ModelSpec, name: str, shape: torch.Size) -> Tensor:
    """The initial weight; biases and norms, which start equal everywhere, with noise of their own."""
    weight = initial_weight(spec, 0, name, shape)
    if name.endswith("bias") or "norm" in name:
        weight += 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return weight


def make_part(spec: ModelSpec, parallel: ParallelSpec, mesh: Mesh, **part: Any) -> tuple[GPT, ShardingPlan]:
    """A network or a stage of it, cut on the meta device and then given this rank's part of the drawn weights."""
    sharding = ShardingPlan()
    with torch.device("meta"):
        model = GPT(spec, **part)
    apply_tensor_parallel(model, parallel, mesh, sharding)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = draw(spec, name, sharding.shape(name, parameter.shape))
            parameter.copy_(sharding.local_part(name, whole, mesh))
    return model, sharding


def make_whole(spec: ModelSpec) -> GPT:
    model = GPT(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(spec, name, parameter.shape))
    return model


def make_batch(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, spec.vocab, (2, 3, spec.context), generator=generator)
    targets[0, :5] = cross_entropy.IGNORE
    documents = torch.tensor([[0] * 16, [0] * 7 + [1] * 9, [0] * 3 + [1] * 8 + [2] * 5])
    return {"tokens": tokens, "targets": targets, "documents": documents}


def whole_gradients(model: GPT, sharding: ShardingPlan, mesh: Mesh) -> dict[str, Tensor]:
    """What the gradients of this rank's parts amount to: cut ones joined, partial ones summed."""
    group, found = mesh.group("tp"), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = parameter.grad
        if name in sharding.partial_grads:
            grad = collectives.all_reduce(grad, mesh.group(sharding.partial_grads[name]))
        for dim in sharding.axes(name).values():
            grad = collectives.all_gather(grad, dim, group)
        found[name] = grad
    return found


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


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
    prepare: Callable[[GPT], object] = lambda _: None,
) -> dict[str, dict[str, float]]:
    """For each layout: the relative difference of the loss and of every gradient from one rank's."""
    spec = ModelSpec(**(SHAPE | changes))
    batch = make_batch(spec)
    reference = make_whole(spec)
    _, expected_loss = reference(**batch, keep_logits=False)
    expected_loss.backward()
    expected = gradients(reference)
    outcome = {}
    for layout in layouts:
        parallel = ParallelSpec(**layout)
        mesh = mesh_of(Grid.of(parallel), "cpu")
        model, sharding = make_part(spec, parallel, mesh)
        model.recompute = parallel.recompute
        prepare(model)
        attend = dense(spec, torch.device("cpu"), batch["documents"], heads=local_heads(spec, mesh))
        _, loss = model(**batch, attend=attend, keep_logits=False)
        loss.backward()
        found = differences(whole_gradients(model, sharding, mesh), expected)
        outcome[str(layout)] = {"loss": abs(loss.item() / expected_loss.item() - 1), **found}
    return outcome


def assert_exact(results: list[dict[str, dict[str, float]]]) -> None:
    for layout in results[0]:
        assert len({layouts[layout]["loss"] for layouts in results}) == 1, f"{layout}: ranks have different losses"
    for rank, layouts in enumerate(results):
        for layout, found in layouts.items():
            assert found["loss"] <= 1e-6, (rank, layout)
            worst = max(found, key=lambda name: found[name])
            assert found[worst] <= 1e-5, (rank, layout, worst, found[worst])


def compare_models(rank: int) -> dict[str, dict[str, dict[str, float]]]:
    return {name: compare(rank, changes, LAYOUTS) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def compared() -> list[dict[str, dict[str, dict[str, float]]]]:
    """Of every rank, by model; all models by the same ranks."""
    return on_ranks(4, compare_models)


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_are_those_of_one_rank(
    compared: list[dict[str, dict[str, dict[str, float]]]], model: str
) -> None:
    assert_exact([models[model] for models in compared])


def test_recompute_changes_nothing() -> None:
    layouts = [{"tp": 2, "sp": True, "recompute": policy} for policy in ("full", "selective", "mlp")]
    assert_exact(on_ranks(2, compare, MODELS["gpt-2"] | {"qk_norm": True}, layouts))


def compile_blocks(model: GPT) -> None:
    for block in model.layers():
        block.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.slow  # compiles; tests/kernels/test_compiling.py compiles on one rank
def test_blocks_compile_whole() -> None:
    """Hooks and collectives are part of the graph of a block; aot_eager: traced forward and backward, not lowered."""
    changes = MODELS["fewer kv heads than ranks"] | {"kv_heads": 1, "heads": 4, "layers": 1}
    assert_exact(on_ranks(2, compare, changes, [{"tp": 2, "sp": True}], compile_blocks))


def errors_in_bf16(rank: int, changes: dict[str, Any], batches: int = 6) -> dict[str, tuple[float, float]]:
    """(error of one rank in bf16, error of two) of the loss and each gradient against one rank in fp32.

    A mean over batches: for a gradient of a few numbers (q_norm) one batch is a draw, with ratios from 0.25 to 3.5.
    """
    spec = ModelSpec(**(SHAPE | changes | {"layers": 1}))
    parallel = ParallelSpec(tp=2, sp=True)
    mesh = Mesh(Grid.of(parallel), "cpu")
    exact, alone = make_whole(spec), make_whole(spec)
    cut, sharding = make_part(spec, parallel, mesh)

    def step(model: GPT, seed: int, narrow: bool) -> float:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            _, loss = model(**make_batch(spec, seed), keep_logits=False)
        loss.backward()
        return loss.item()

    sums: dict[str, list[float]] = {}
    for seed in range(batches):
        truth, one, two = step(exact, seed, False), step(alone, seed, True), step(cut, seed, True)
        expected = gradients(exact)
        of_one = differences(gradients(alone), expected) | {"loss": abs(one / truth - 1)}
        of_two = differences(whole_gradients(cut, sharding, mesh), expected) | {"loss": abs(two / truth - 1)}
        for name in of_one:
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + of_one[name], before[1] + of_two[name]]
    return {name: (one / batches, two / batches) for name, (one, two) in sums.items()}


@pytest.mark.parametrize("model", ["grouped queries", "gpt-2"])
def test_bf16_is_as_close_to_fp32_as_on_one_rank(model: str) -> None:
    for name, (one, two) in on_ranks(2, errors_in_bf16, MODELS[model])[0].items():
        assert two <= 2 * one, (name, one, two)


def two_stages(rank: int, changes: dict[str, Any]) -> dict[str, float]:
    """A network as two parts, the hidden states between them cut by sequence."""
    spec = ModelSpec(**(SHAPE | changes))
    batch = make_batch(spec)
    parallel = ParallelSpec(tp=2, sp=True)
    mesh = Mesh(Grid.of(parallel), "cpu")
    reference = make_whole(spec)
    tokens, targets = batch["tokens"], batch["targets"]
    reference(tokens, targets, keep_logits=False)[1].backward()
    first, sharding = make_part(spec, parallel, mesh, layers=[0], last=False)
    last, last_splits = make_part(spec, parallel, mesh, layers=[1], first=False)
    hidden = first(tokens)
    assert hidden.shape == (3, spec.context // 2, spec.hidden)
    last(hidden, targets, positions=torch.arange(spec.context), keep_logits=False)[1].backward()
    found = whole_gradients(first, sharding, mesh)
    for name, grad in whole_gradients(last, last_splits, mesh).items():
        found[name] = found[name] + grad if name in found else grad  # a tied embedding is in both
    return differences(found, gradients(reference))


@pytest.mark.parametrize("model", ["gpt-2", "one kv head"])
def test_the_parts_of_a_pipeline_are_cut_alike(model: str) -> None:
    for found in on_ranks(2, two_stages, MODELS[model]):
        assert max(found.values()) <= 1e-5, found


def logits_of_a_shard(rank: int) -> str:
    spec, parallel = ModelSpec(**SHAPE), ParallelSpec(tp=2)
    model, _ = make_part(spec, parallel, Mesh(Grid.of(parallel), "cpu"))
    batch = make_batch(spec)
    assert model(batch["tokens"]).shape == (3, 16, spec.vocab // 2)
    with pytest.raises(SpecError) as error:
        model(**batch)
    return str(error.value)


def test_whole_logits_with_a_loss_are_refused() -> None:
    for said in on_ranks(2, logits_of_a_shard):
        assert "keep_logits=False" in said
