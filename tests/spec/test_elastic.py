"""Fewer ranks for the same run: data parallelism gives way, the global batch stays, and what cannot shrink says so."""

from __future__ import annotations

import pytest

from lmworks.spec import RunSpec, SpecError, load_run
from lmworks.spec.elastic import fitted, sizes

HSDP = ["parallel.strategy=fsdp2", "parallel.dp_replicate=2", "parallel.dp_shard=4"]
ELASTIC = ("fault.elastic=true", "data.micro_batch=2", "data.global_batch=16")


def run(*overrides: str) -> RunSpec:
    return load_run("tiny", [*ELASTIC, *overrides])


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        (["parallel.dp=4"], 2, {"dp": 2, "dp_replicate": 2, "dp_shard": 1, "accumulation": 4}),
        (["parallel.dp=4"], 1, {"dp": 1, "dp_replicate": 1, "dp_shard": 1, "accumulation": 8}),
        (["parallel.dp=8", "parallel.strategy=fsdp2"], 4, {"dp_replicate": 1, "dp_shard": 4, "accumulation": 2}),
        # Copies go before shards, which hold what did not fit into one rank's memory.
        (HSDP, 4, {"dp_replicate": 1, "dp_shard": 4}),
        (HSDP, 2, {"dp_replicate": 1, "dp_shard": 2}),
        (["parallel.dp=4", "parallel.tp=2", "model.vocab=258"], 4, {"dp": 2, "tp": 2, "accumulation": 4}),
        (["parallel.dp=2", "parallel.pp=2"], 2, {"dp": 1, "pp": 2, "accumulation": 8}),
        (["parallel.dp=4", "cluster.nodes=2", "cluster.gpus_per_node=2"], 2, {"dp": 2, "accumulation": 4}),
        (["parallel.dp=4", "log.profile=[1, 2]", "log.profile_ranks=[0, 3]"], 2, {"dp": 2}),
    ],
)  # fmt: skip
def test_the_layout_shrinks_and_the_batch_of_a_step_stays(
    layout: list[str], ranks: int, expected: dict[str, int]
) -> None:
    spec = run(*layout)
    smaller = fitted(spec, ranks)
    assert smaller.parallel.world == ranks and smaller.data.global_batch == 16
    found = {key: smaller.accumulation if key == "accumulation" else getattr(smaller.parallel, key) for key in expected}
    assert found == expected
    assert all(rank < ranks for rank in smaller.log.profile_ranks)


def test_a_batch_that_the_spec_left_open_is_that_of_all_ranks() -> None:
    spec = load_run("tiny", ["fault.elastic=true", "data.micro_batch=2", "parallel.dp=4"])
    assert spec.data.global_batch == 8 and fitted(spec, 2).data.global_batch == 8


@pytest.mark.parametrize(
    ("layout", "ranks", "says"),
    [
        (["parallel.dp=4"], 3, r"3 ranks do not fit: .* leave 4, 2, 1 ranks"),
        (["parallel.dp=2", "parallel.tp=2", "model.vocab=258"], 1, r"parallel\.tp = 2 .* leave 4, 2 ranks"),
        (["parallel.dp=2", "parallel.pp=2"], 3, r"parallel\.pp = 2 .* leave 4, 2 ranks"),
        (["parallel.dp=2"], 4, r"4 ranks do not fit"),
        (["parallel.dp=2"], 0, r"0 ranks do not fit"),
        (["parallel.dp=2", "fault.elastic=false"], 1, r"set fault\.elastic = true"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(layout: list[str], ranks: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        fitted(run(*layout), ranks)


def test_the_most_ranks_that_are_there_are_used() -> None:
    spec = run("parallel.dp=8")
    assert sizes(spec) == [8, 4, 2, 1] and sizes(spec, at_most=7) == [4, 2, 1]
    assert sizes(run("parallel.dp=8", "fault.elastic=false"), at_most=7) == []


def test_as_many_as_the_layout_has_need_no_leave() -> None:
    spec = run("parallel.dp=2", "fault.elastic=false")
    assert fitted(spec, 2) is spec
