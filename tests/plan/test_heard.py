"""Every key of a spec that changes a step is heard by its price."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine
from lmworks.plan.exact.shards import local_shapes
from lmworks.plan.network import network
from lmworks.plan.ops import Kernel, Workload
from lmworks.plan.search.candidates import cases, problem_of
from lmworks.plan.step.comm import Weights
from lmworks.plan.step.price import price
from lmworks.plan.step.uncalibrated import updated_params
from lmworks.plan.step.work import Pass
from lmworks.spec import RunSpec, SpecError, catalogue, load_run

H100 = catalogue()["H100-SXM-80GB"]
BASE = (
    "cluster.gpu=h100", "cluster.nodes=4", "cluster.gpus_per_node=8", "precision.dtype=bf16", "data.seq=4096",
    "data.micro_batch=1", "data.global_batch=64", "parallel.strategy=fsdp2", "parallel.tp=2", "parallel.sp=true",
    "parallel.cp=2", "parallel.dp_shard=8",
)  # fmt: skip


def run(*changes: str) -> RunSpec:
    return load_run("llama3-8b", [*BASE, *changes])


def seconds(*changes: str) -> float:
    return float(price(Case.of(run(*changes), H100)).seconds)


@pytest.mark.parametrize(
    "change",
    [
        "cluster.nic_gbs=5", "cluster.network=ethernet", "cluster.fabric=pcie", "parallel.cp_method=ulysses",
        "optim.optimizer=sgd", "precision.reduce=bf16", "precision.weights=bf16",
        "precision.states=bf16", "parallel.reshard=false", "parallel.recompute=full",
        "parallel.recompute=selective", "parallel.recompute=mlp", "parallel.compile=true", "parallel.sp=false",
        "data.micro_batch=2", "data.global_batch=128", "data.seq=8192", "parallel.offload=optimizer", "model.ffn=16384",
    ],
)  # fmt: skip
def test_a_key_changes_the_price(change: str) -> None:
    assert seconds(change) != pytest.approx(seconds(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_search_hears_what_is_kept(dtype: str) -> None:
    alone = ("parallel.tp=1", "parallel.sp=false", "parallel.dp_shard=16", f"precision.dtype={dtype}")
    question = problem_of(run(*alone, "precision.weights=bf16", "precision.states=bf16"), "8xh100")
    _, found = next(cases(question))
    assert (found.software.weights, found.software.low_bytes, found.optimizer) == (2, 2, "adamw-bf16")
    assert dtype == "bf16" or not any(np.any(case.tp > 1) for _, case in cases(question))


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_experts_are_not_in_8_bits(compiled: str) -> None:
    """The trainer has fp8 in linear layers; a stack of experts is none, and the router decides in 16 bits."""
    words = ["data.seq=4096", "data.micro_batch=2", "precision.dtype=fp8", f"parallel.compile={compiled}"]
    spec = load_run("mixtral-8x7b", words)
    m, machine = spec.model, Machine.of(H100)
    block = network(Workload.of_case(Case.of(spec, H100))).block
    products = [kernel for op in block for kernel in op.forward if kernel.kind == "gemm"]
    wide = [kernel for kernel in products if kernel.bf16_only]
    narrow = [kernel for kernel in products if not kernel.bf16_only]
    visited = m.hidden * m.experts + m.top_k * m.mlp_matrix(m.expert_ffn)
    assert sum(kernel.count * kernel.flops for kernel in wide) == pytest.approx(2 * 8192 * visited, rel=0.05)
    assert sum(kernel.count * kernel.flops for kernel in narrow) == 2 * 8192 * m.attention_matrix

    def seconds_in(kernels: list[Kernel], dtype: str) -> float:
        return float(Pass.of([("matmul", kernel) for kernel in kernels], machine, dtype).seconds({"gemm": 1.0}))

    assert seconds_in(wide, "fp8") == seconds_in(wide, "bf16")
    assert seconds_in(narrow, "fp8") < 0.7 * seconds_in(narrow, "bf16")


def test_overlapped_tensor_parallelism_is_faster() -> None:
    assert seconds("parallel.compile=true", "parallel.async_tp=true") < seconds("parallel.compile=true")


def test_a_budget_has_no_closed_form() -> None:
    with pytest.raises(SpecError, match="recompute = 'budget' has no closed form"):
        seconds("parallel.recompute=budget", "parallel.recompute_budget=20")


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3-8b", "parallel.strategy=fsdp2 parallel.dp_shard=8"),
        ("llama3-8b", "parallel.strategy=fsdp2 parallel.dp_shard=2 parallel.tp=16 parallel.sp=true"),
        ("llama3-8b", "parallel.strategy=zero parallel.zero=1 parallel.dp_shard=4 parallel.tp=2"),
        ("mixtral-8x7b", "parallel.strategy=fsdp2 parallel.dp_shard=8 parallel.ep=8"),
        ("mixtral-8x7b", "parallel.strategy=fsdp2 parallel.dp_shard=16 parallel.ep=4 parallel.tp=2"),
        ("mixtral-8x7b", "parallel.dp_replicate=4 parallel.strategy=ddp"),
    ],
)
def test_a_rank_updates_what_it_holds(model: str, layout: str) -> None:
    """The closed form that prices the optimizer, against the shapes that the trainer cuts."""
    spec = load_run(model, [*layout.split(), "data.seq=1024", "data.micro_batch=1", "precision.dtype=bf16"])
    case = Case.of(spec, H100)
    exact = 0
    for _, shape in local_shapes(spec, 0):
        size = 1
        for length in shape:
            size *= length
        exact += size
    assert float(updated_params(case, Weights.of(case))) == pytest.approx(exact, rel=0.02)
