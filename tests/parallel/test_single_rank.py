"""One rank has nobody to share with: whatever the strategy is called, it runs the plain loop."""

from __future__ import annotations

import torch

from lmworks.parallel.initial_weights import source_of
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.parallelize import parallelize
from lmworks.parallel.world import init_distributed
from lmworks.plan.case import Case
from lmworks.spec import RunSpec, load_run

STRATEGIES = (
    ["parallel.strategy=ddp"],
    ["parallel.strategy=fsdp1"],
    ["parallel.strategy=fsdp2"],
    ["parallel.strategy=zero", "parallel.zero=2"],
    ["parallel.strategy=fsdp2", "parallel.offload=full"],
)


def spec_of(words: list[str]) -> RunSpec:
    return load_run("tiny", ["cluster.device=cpu", *words])


def kinds(rank: int) -> list[str]:
    device = torch.device("cpu")
    found = []
    for words in STRATEGIES:
        spec = spec_of(words)
        parallel_model = parallelize(spec, init_distributed(spec.parallel, device), device, source_of(spec))
        found.append(type(parallel_model.strategies[0]).__name__)
    return found


def test_strategies_over_one_rank_are_the_plain_loop() -> None:
    """But for weights that live on the host, which FSDP2 brings. The planner says the same."""
    assert on_ranks(1, kinds) == [["SingleRank"] * 4 + ["FSDP2"]]
    assert [Case.of(spec_of(words)).sharding for words in STRATEGIES] == ["alone"] * 4 + ["fsdp2"]
