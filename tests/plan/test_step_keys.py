"""How keys of a spec change the predicted step: directions and ratios worked out by hand."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine
from lmworks.plan.exact.shards import local_shapes
from lmworks.plan.network import network
from lmworks.plan.ops import Kernel, Op, Workload
from lmworks.plan.search.candidates import cases, problem_of
from lmworks.plan.step.comm import Weights
from lmworks.plan.step.constants import constants
from lmworks.plan.step.micro_batch import Traffic, overlap
from lmworks.plan.step.price import price
from lmworks.plan.step.uncalibrated import Pass, updated_params
from lmworks.spec import RunSpec, SpecError, catalogue, load_run

H100 = catalogue()["H100-SXM-80GB"]
BASE = (
    "cluster.gpu=h100", "cluster.nodes=4", "cluster.gpus_per_node=8", "precision.dtype=bf16", "data.seq=4096",
    "data.micro_batch=1", "data.global_batch=64", "parallel.strategy=fsdp2", "parallel.tp=2", "parallel.sp=true",
    "parallel.cp=2", "parallel.dp_shard=8",
)  # fmt: skip


def run(*changes: str) -> RunSpec:
    return load_run("llama3-8b", [*BASE, *changes])


@cache
def parts(*changes: str) -> dict[str, float]:
    """Seconds of a step by part, of Llama 3 8B on 32 H100s: 8 micro-batches, FSDP over 16 ranks, TP 2."""
    return {name: float(seconds) for name, seconds in price(Case.of(run(*changes), H100)).parts.items()}


def ratio(part: str, *changes: str) -> float:
    return parts(*changes)[part] / parts()[part]


COMPUTE = ("matmul", "attention", "norms", "rotary", "residual", "activation", "embedding", "loss")


def test_twice_the_batch_is_twice_the_micro_batches() -> None:
    twice = {part: ratio(part, "data.global_batch=128") for part in (*COMPUTE, "tp", "cp")}
    assert twice == pytest.approx(dict.fromkeys(twice, 2.0))
    assert ratio("optimizer", "data.global_batch=128") == 1.0
    assert 1.5 < ratio("dp", "data.global_batch=128") < 2.0  # gathers twice as often, gradients reduced once a step


def test_optimizer_bytes_per_parameter() -> None:
    """AdamW reads and writes 8 bytes of states: 16; in bf16 half of that; SGD has none. The rest is the same."""
    adamw, half, none = (parts(*key)["optimizer"] for key in ((), ("precision.states=bf16",), ("optim.optimizer=sgd",)))
    assert (adamw - half) / (adamw - none) == pytest.approx(8 / 16, rel=0.01)


def test_optimizer_offload_by_hand() -> None:
    """Of params / 32: 4 B of gradient down and 4 of weight up at 0.8 × 64 GB/s, 28 B of the update at 30 GB/s."""
    change = "parallel.offload=optimizer"
    by_hand = run().model.params / 32 * (8 / (0.8 * 64e9) + 28 / 30e9) * constants().software["lmworks"]
    assert parts(change)["offload"] == pytest.approx(by_hand, rel=1e-3)
    assert ratio("optimizer", change) < 8 / 36  # only the two clipping passes of 4 B are left of 8 + 28


@pytest.mark.parametrize(
    ("change", "share"),
    [
        # Bytes copied per parameter and micro-batch: gathered weights 2 + 2, forward and backward, and gradients 4 + 4
        # once in 8 micro-batches: 4 + 4 + 1 = 9.
        ("parallel.reshard=false", 5 / 9),
        ("precision.reduce=bf16", 8.5 / 9),
        ("data.micro_batch=2", 4 * (4 + 4 + 2) / (8 * 9)),
    ],
)
def test_copies_of_gathered_weights_and_gradients(change: str, share: float) -> None:
    assert ratio("copies", change) == pytest.approx(share, rel=0.02)


def test_a_wider_mlp() -> None:
    """Matrices of a block: attention 2 · 4096² + 2 · 4096 · 1024, MLP 3 · 4096 · ffn."""
    attention, mlp = 2 * 4096**2 + 2 * 4096 * 1024, 3 * 4096 * 14336
    wider = (attention + mlp * 16384 / 14336) / (attention + mlp)
    assert ratio("matmul", "model.ffn=16384") == pytest.approx(wider, rel=0.02)
    assert ratio("activation", "model.ffn=16384") == pytest.approx(16384 / 14336, rel=0.02)
    assert ratio("attention", "model.ffn=16384") == 1.0


def test_twice_the_sequence() -> None:
    """Of as many sequences: tokens double, attention quadruples; passes over the tiles of a ring only double."""
    whole = "parallel.cp_method=ulysses"
    longer = parts(whole, "data.seq=8192")["attention"] / parts(whole)["attention"]
    assert 3.4 < longer <= 4.0  # larger tiles are more efficient
    assert 2.0 < ratio("attention", "data.seq=8192") < longer
    assert 1.5 < ratio("matmul", "data.seq=8192") <= 2.0
    assert ratio("optimizer", "data.seq=8192") == 1.0


def test_recompute_costs_a_forward_pass_without_its_last_gemm() -> None:
    """GEMMs: a third of forward and backward, without `down` (58.7 of 218.1 M weights); attention: 1 of 3.5."""
    down = 4096 * 14336 / (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    least = parts()["matmul"] / 3 * (1 - down) * 0.95 + parts()["attention"] / 3.5
    full, selective, mlp = (
        parts(f"parallel.recompute={policy}")["recompute"] for policy in ("full", "selective", "mlp")
    )
    assert least < full < sum(parts()[part] for part in COMPUTE) / 2
    assert 0 < selective < mlp < full
    # Forward 1, backward 1, and of the recomputed forward three of four collectives: all but the one after `down`.
    assert ratio("tp", "parallel.recompute=full") == pytest.approx(2.75 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("change", "slower"),
    [
        ("cluster.nic_gbs=5", ("dp",)),  # dp_shard × cp × tp = 32 ranks over four nodes
        ("cluster.network=ethernet", ("dp",)),
        ("cluster.fabric=pcie", ("tp", "cp", "dp")),
        ("parallel.cp_method=ulysses", ("cp",)),  # its all-to-alls do not overlap
    ],
)
def test_slower_links_lengthen_communication_only(change: str, slower: tuple[str, ...]) -> None:
    for part in ("tp", "cp", "dp"):
        assert (ratio(part, change) > 1.1) == (part in slower)
    without_ring = "ulysses" in change  # whose tiles are merged in passes of their own
    assert (ratio("attention", change) < 1.0) == without_ring
    same = [part for part in COMPUTE if part != "attention" or not without_ring]
    assert {part: ratio(part, change) for part in same} == dict.fromkeys(same, 1.0)


def test_sequence_parallelism_halves_what_lies_between_regions() -> None:
    for part in ("norms", "residual"):
        assert ratio(part, "parallel.sp=false") == pytest.approx(2.0, rel=0.07)  # less a kernel's start
    # As many bytes in one all-reduce as in an all-gather and a reduce-scatter, with half the calls.
    assert 0.5 < ratio("tp", "parallel.sp=false") < 1.0


def test_bf16_weights_have_no_casts() -> None:
    """The residual stream has 2 bytes instead of 4, and no layer casts its weights: each part falls or stays."""
    change = "precision.weights=bf16"
    assert all(ratio(part, change) <= 1.0 for part in COMPUTE)
    assert ratio("residual", change) < 0.5 and ratio("matmul", change) < 0.8 and ratio("attention", change) == 1.0


def test_compiled_blocks_fuse_passes_and_nothing_else() -> None:
    """What is not fused differs by the fitted factor of the code base alone."""
    other = constants().software["lmworks-compile"] / constants().software["lmworks"]
    for part in ("attention", "tp", "optimizer"):
        assert ratio(part, "parallel.compile=true") == pytest.approx(other)
    for part in ("norms", "rotary", "residual", "activation"):
        assert ratio(part, "parallel.compile=true") < 0.7


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_search_uses_the_formats_of_the_spec(dtype: str) -> None:
    alone = ("parallel.tp=1", "parallel.sp=false", "parallel.dp_shard=16", f"precision.dtype={dtype}")
    question = problem_of(run(*alone, "precision.weights=bf16", "precision.states=bf16"), "8xh100")
    _, found = next(cases(question))
    assert (found.software.weights, found.software.low_bytes, found.optimizer) == (2, 2, "adamw-bf16")
    assert dtype == "bf16" or not any(np.any(case.tp > 1) for _, case in cases(question))


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_experts_are_not_in_fp8(compiled: str) -> None:
    """The trainer has fp8 in linear layers; a stack of experts is none, and the router decides in 16 bits."""
    words = ["data.seq=4096", "data.micro_batch=2", "precision.dtype=fp8", f"parallel.compile={compiled}"]
    spec = load_run("mixtral-8x7b", words)
    m, machine = spec.model, Machine.of(H100)
    block = network(Workload.of_case(Case.of(spec, H100))).block
    products = [kernel for op in block for kernel in op.forward if kernel.kind == "gemm"]
    wide = [kernel for kernel in products if kernel.bf16_only]
    narrow = [kernel for kernel in products if not kernel.bf16_only]
    visited = m.hidden * m.experts + m.top_k * 3 * m.hidden * m.expert_ffn
    assert sum(kernel.count * kernel.flops for kernel in wide) == pytest.approx(2 * 8192 * visited, rel=0.05)
    assert sum(kernel.count * kernel.flops for kernel in narrow) == 2 * 8192 * 2 * m.hidden * (m.q_dim + m.kv_dim)

    def seconds_in(kernels: list[Kernel], dtype: str) -> float:
        product = Op("gemm", "matmul", tuple(kernels))
        return float(Pass.of([product], "forward", machine, dtype).parts({"gemm": 1.0})["matmul"])

    assert seconds_in(wide, "fp8") == seconds_in(wide, "bf16")
    assert seconds_in(narrow, "fp8") < 0.7 * seconds_in(narrow, "bf16")


def test_overlap_by_hand() -> None:
    """3 s behind 10 s of GEMMs: all hidden, which slows them by 0.4 × 3; 12 s: 2 exposed, and 0.4 × 10."""
    assert overlap(3.0, 10.0, 0.4) == Traffic(exposed=pytest.approx(1.2), hidden=3.0)
    assert overlap(12.0, 10.0, 0.4) == Traffic(exposed=pytest.approx(6.0), hidden=10.0)


def test_a_budget_has_no_closed_form() -> None:
    with pytest.raises(SpecError, match="recompute = 'budget' has no closed form"):
        parts("parallel.recompute=budget", "parallel.recompute_budget=20")


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
