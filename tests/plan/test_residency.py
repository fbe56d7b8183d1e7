"""Bytes by arithmetic against live tensors and counted collectives, for every data-parallel strategy.

All other layouts are held against the trainer where parity runs them anyway: tests/prove/test_parity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmworks.bench.data_parallel import STRATEGIES as COMPARED
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.case import Case
from lmworks.plan.exact.collectives import collectives
from lmworks.plan.exact.exchanges import by_kind
from lmworks.plan.exact.shards import flat_parameter, units, weights
from lmworks.plan.memory.rank_weights import Resident, on_host, resident
from lmworks.plan.pipelines.stages import split_layers, stages_of_rank
from lmworks.spec import ModelSpec, RunSpec, SpecError
from lmworks.train.rank_memory import RankMemory, measure_rank_memory
from variations import with_slow

STRATEGIES = {**COMPARED, "ZeRO-0": {"strategy": "zero", "zero": 0}}
# Rows that neither 2 nor 3 divides (259, 50 by 3), and a width that is no multiple of FSDP1's alignment.
MODEL = {
    "preset": "tiny", "layers": 2, "hidden": 30, "heads": 3, "kv_heads": 1, "ffn": 50, "vocab": 259, "qk_norm": True,
}  # fmt: skip


def make_spec(
    data: Path, ranks: int, layout: dict[str, Any], accumulation: int = 1, tied: bool = False, **sections: Any
) -> RunSpec:
    table: dict[str, Any] = {
        "model": {**MODEL, "tie_embeddings": tied},
        "data": {"path": str(data), "seq": 16, "micro_batch": 1, "global_batch": ranks * accumulation},
        "parallel": {"dp": ranks, "bucket_mb": 0.01, **layout},
    }
    return RunSpec.from_dict({**table, **sections})


CASES = {  # ranks, micro-batches, tied
    "2 ranks": (2, 1, True),
    "3 ranks": (3, 1, True),
    "3 ranks, 2 micro-batches, untied": (3, 2, False),
}


OTHERS = ("FSDP1 grad-op", "FSDP2 keep", "ZeRO-0", "ZeRO-3")  # sizes and messages of the rest, put together otherwise
COVERED = ("2 ranks", "3 ranks")  # parity holds two ranks of every strategy to the same arithmetic, byte by byte


def observe_all(rank: int, specs: dict[str, RunSpec], folder: Path) -> dict[str, RankMemory]:
    return {name: measure_rank_memory(rank, spec, folder / name) for name, spec in specs.items()}


@pytest.fixture(
    scope="module",
    params=with_slow(CASES, COVERED),
)
def observed(request: Any, dataset: Path, tmp_path_factory: Any) -> tuple[dict[str, RunSpec], list[Any]]:
    ranks, accumulation, tied = CASES[request.param]
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    specs = {n: make_spec(dataset, ranks, STRATEGIES[n], accumulation, tied) for n in STRATEGIES if n in asked}
    return specs, on_ranks(ranks, observe_all, specs, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", with_slow(STRATEGIES, OTHERS))
def test_live_tensors_hold_what_the_arithmetic_says(observed: Any, name: str) -> None:
    specs, ranks = observed
    for rank, holdings in enumerate(ranks):
        assert holdings[name].resident == resident(specs[name], rank)


@pytest.mark.parametrize("name", with_slow(STRATEGIES, OTHERS))
def test_collectives_are_those_of_the_formula(observed: Any, name: str) -> None:
    specs, ranks = observed
    for holdings in ranks:
        assert by_kind(holdings[name].collectives) == by_kind(collectives(specs[name]))


def test_bf16_leaves_resident_bytes_alone_and_halves_gathers_of_blocks(dataset: Path, tmp_path: Path) -> None:
    half = {"dtype": "bf16", "reduce": "bf16"}
    specs = {
        name: make_spec(dataset, 2, STRATEGIES[name], precision=half)
        for name in ("FSDP1 full", "FSDP2 reshard", "ZeRO-2")
    }
    for rank, observed in enumerate(on_ranks(2, observe_all, specs, tmp_path)):
        for name, spec in specs.items():
            assert observed[name].resident == resident(spec, rank), name
            assert by_kind(observed[name].collectives) == by_kind(collectives(spec)), name
            assert observed[name].dtypes == dict.fromkeys(("parameters", "gradients", "optimizer"), "float32"), name


def test_bytes_of_a_small_example() -> None:
    model = {"layers": 1, "hidden": 2, "heads": 1, "ffn": 2, "vocab": 3, "context": 4, "tie_embeddings": True}
    data = {"seq": 4, "micro_batch": 1}

    def held(rank: int, **layout: Any) -> Resident:
        return resident(RunSpec.from_dict({"model": model, "data": data, "parallel": {"dp": 2, **layout}}), rank)

    psi = 3 * 2 + 4 * 2 * 2 + 3 * 2 * 2 + 3 * 2  # embedding, q k v out, gate up down, three norms
    count = 1 + 4 + 3 + 3
    assert held(0, strategy="ddp") == Resident(4 * psi, 4 * psi, 0, 8 * psi + 4 * count, 0, 0)
    # Two of the embedding's three rows go to rank 0; everything else has two rows.
    first, second = (psi - 6) // 2 + 4, (psi - 6) // 2 + 2
    assert held(0, strategy="zero", zero=1) == Resident(4 * psi, 4 * psi, 0, 8 * first + 4 * count, 0, 0)
    assert held(1, strategy="zero", zero=2) == Resident(4 * psi, 4 * second, 0, 8 * second + 4 * count, 0, 0)
    assert held(1, strategy="fsdp2") == Resident(4 * second, 4 * second, 0, 8 * second + 4 * count, 8, 8)


def test_bytes_of_deepspeed_as_they_were_read_from_its_tensors() -> None:
    """By DeepSpeed 0.19.8 on 3 ranks; `make test-deepspeed` reads them again."""
    model = {**MODEL, "hidden": 32, "heads": 4, "qk_norm": False}

    def held(stage: int) -> Resident:
        layout = {"dp": 3, "strategy": "zero", "zero": stage, "engine": "deepspeed"}
        return resident(RunSpec.from_dict({"model": model, "parallel": layout}), 0)

    assert held(1) == held(2) == Resident(125_824, 41_944, 41_944, 83_896, 8, 0)
    assert held(3) == Resident(41_988, 41_988, 41_988, 83_984, 0, 0)


def test_flat_parameters_begin_at_16_bytes_and_divide() -> None:
    spec = RunSpec.from_dict({"model": MODEL, "parallel": {"dp": 3, "strategy": "fsdp1"}})
    case = Case.of(spec)
    for unit in units(case, *stages_of_rank(spec, 0)):
        parallel_model = flat_parameter(case, unit)
        assert all(start % 4 == 0 for start, _ in parallel_model.spans)
        assert sum(sum(parallel_model.own(rank)) for rank in range(3)) == sum(size for _, size in parallel_model.spans)
        assert 0 <= 3 * parallel_model.length - sum(parallel_model.spans[-1]) < 3


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        {"preset": "gpt2-small", "layers": 2, "vocab": 100},
        {"preset": "tiny", "experts": 4, "shared_experts": 1, "tie_embeddings": False},
        {"preset": "tiny", "qkv_bias": True, "norm": "layer"},
    ],
)
def test_weights_are_those_of_the_network(model: dict[str, Any], stages: int) -> None:
    import torch

    spec = ModelSpec.from_dict(model)
    for stage in split_layers(spec, 16, stages):
        with torch.device("meta"):
            network = GPT(spec, layers=stage.layers, first=stage.first, last=stage.last)
        named = [(name, tuple(p.shape)) for name, p in network.named_parameters()]
        assert [(w.name, w.shape) for w in weights(spec, stage if stages > 1 else None)] == named


def test_offload_moves_bytes_to_the_host() -> None:
    def spec(**layout: Any) -> RunSpec:
        return RunSpec.from_dict({"model": MODEL, "parallel": {"dp": 3, **layout}})

    kept = spec(strategy="fsdp2")
    assert on_host(kept, 1) == Resident()
    full = spec(strategy="fsdp2", offload="full")
    assert resident(full, 1) == Resident() and on_host(full, 1) == resident(kept, 1)
    here = resident(kept, 1)
    half = spec(strategy="fsdp2", offload="optimizer")
    assert resident(half, 1).total == here.total - here.optimizer
    assert on_host(half, 1) == Resident(here.parameters, here.gradients, optimizer=here.optimizer)


def test_deepspeed_is_known_in_fp32_alone() -> None:
    table = {"model": MODEL, "precision": {"dtype": "bf16"}}
    layout = {"dp": 2, "strategy": "zero", "zero": 2, "engine": "deepspeed"}
    spec = RunSpec.from_dict({**table, "parallel": layout})
    with pytest.raises(SpecError, match=r"known for precision\.dtype = 'fp32'"):
        resident(spec, 0)
    with pytest.raises(SpecError, match=r"parallel\.engine = 'deepspeed' sends"):
        collectives(spec)
