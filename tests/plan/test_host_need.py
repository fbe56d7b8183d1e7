"""Host memory as it is predicted, against the tensors that ranks really hold there."""

from __future__ import annotations

from typing import Any

import torch

from lmworks.checkpoint.async_save import Staging
from lmworks.checkpoint.save_plan import make_plan
from lmworks.parallel.initial_weights import source_of
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.optimizer_offload import HostOptimizer
from lmworks.parallel.parallelize import parallelize
from lmworks.parallel.state_dict import training_state
from lmworks.parallel.world import init_distributed
from lmworks.plan.exact.shards import local_shapes
from lmworks.plan.memory.host_need import HostNeed, host_need, machine_need
from lmworks.plan.memory.rank_weights import on_host, pinned_size
from lmworks.plan.memory.sheet import memory
from lmworks.plan.predict import predict
from lmworks.spec import RunSpec, load_run
from lmworks.train.optim import make_optimizer
from lmworks.train.rng import rng_state

CPU = torch.device("cpu")
BF16 = ("precision.dtype=bf16", "precision.weights=bf16")
BOTH = ("parallel.offload=optimizer", "checkpoint.asynchronous=true")


def run_of(*words: str) -> RunSpec:
    """Rows that two ranks do not share evenly: 259 of the embedding, 51 inside the MLP."""
    shape = ("model.hidden=32", "model.heads=4", "model.ffn=51", "model.vocab=259", "model.layers=3")
    return load_run("tiny", ["cluster.device=cpu", *shape, *BOTH, *words])


def measured(_rank: int, specs: list[RunSpec]) -> list[HostNeed]:
    """Bytes of tensors in a rank's host memory when it has taken a step, and of the memory that saves are copied to."""
    found = []
    for spec in specs:
        mesh = init_distributed(spec.parallel, CPU)
        parallel_model = parallelize(spec, mesh, CPU, source_of(spec))
        optimizer = make_optimizer(parallel_model.shards, spec.model, spec.optim, spec.precision, spec.seed)
        state: dict[str, Any] = training_state(optimizer, parallel_model.shards, parallel_model.sharding, mesh)
        state["model"] |= parallel_model.buffers()
        staging = Staging(make_plan({**state, "rng": rng_state()}), CPU)
        copied = staging.buffer.numel()
        staging.close()
        tensors = [
            value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)
        ]
        for strategy in parallel_model.strategies.values():
            assert isinstance(strategy, HostOptimizer)
            tensors += [*(shard.leaf for shard in strategy.shards()), *strategy.gradients]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        found.append(HostNeed(sum(storages.values()), 0, copied))
    return found


ALONE = [
    (),
    BF16,
    (*BF16, "precision.states=bf16"),
    ("optim.optimizer=sgd",),
    ("model.experts=4", "model.top_k=2", "model.balance_bias=0.01"),
    ("lora.rank=3",),
]


def test_one_rank_holds_what_is_predicted_to_the_byte() -> None:
    specs = [run_of(*words) for words in ALONE]
    assert measured(0, specs) == [host_need(spec, 0, "cpu") for spec in specs]


TWO = {
    "ddp": ["parallel.dp=2"],
    "zero1": ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"],
    "fsdp2": ["parallel.dp=2", "parallel.strategy=fsdp2", *BF16],
    "fsdp1": ["parallel.dp=2", "parallel.strategy=fsdp1"],
    "tp": ["parallel.tp=2", "model.ffn=52", "model.vocab=260"],
    "pp": ["parallel.pp=2", "data.global_batch=16", "model.tie_embeddings=false"],
}


def test_two_ranks_hold_what_is_predicted() -> None:
    """States of each to the byte. What both could write is written by one: of each it is known to a tensor, and to a
    byte of both together."""
    specs = {name: run_of(*words) for name, words in TWO.items()}
    ranks = on_ranks(2, measured, list(specs.values()))
    for index, (name, spec) in enumerate(specs.items()):
        held = [rank[index] for rank in ranks]
        said = [host_need(spec, rank, "cpu") for rank in range(2)]
        assert [one.states for one in held] == [one.states for one in said], name
        assert sum(one.staging for one in said) - sum(one.staging for one in held) in (0, 1), name
        largest = 4 * spec.model.vocab * spec.model.hidden
        for one, other in zip(held, said, strict=True):
            assert abs(one.staging - other.staging) <= largest, name
        assert machine_need(spec, range(2), "cpu").total == sum(one.total for one in said)


def test_what_is_pinned_comes_in_powers_of_two() -> None:
    """Copies of weights and gradients on their way to a GPU and back; moments stay on the host."""
    assert [pinned_size(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    spec = run_of()
    here = on_host(spec, 0)
    assert host_need(spec, 0, "cpu").states == here.total
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in local_shapes(spec, 0)]
    assert host_need(spec, 0, "cuda").states == here.optimizer + 2 * sum(pinned_size(4 * size) for size in sizes)
    half = run_of(*BF16)
    pinned = sum(3 * pinned_size(2 * size) for size in sizes)
    assert host_need(half, 0, "cuda").states == on_host(half, 0).optimizer + pinned


def test_nothing_is_kept_where_nothing_is_asked_for() -> None:
    spec = run_of("parallel.offload=none", "checkpoint.asynchronous=false")
    assert host_need(spec, 0, "cuda") == HostNeed()
    assert predict(spec).to_dict()["host_parts"] == {"states": 0, "activations": 0, "staging": 0, "resting": 0}


def test_on_a_cpu_a_copy_for_a_save_is_memory_of_the_device() -> None:
    spec = run_of("parallel.offload=none")
    here, there = (memory(one) for one in (spec.replace(checkpoint=spec.checkpoint.replace(asynchronous=False)), spec))
    assert there.total - here.total == there.host == there.host_parts.staging > 0
    assert there.tensors == here.tensors
