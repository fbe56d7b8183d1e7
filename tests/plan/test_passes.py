"""The models that a run holds: their specs are valid wherever that of the run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.plan.passes import CRITIC, REFERENCE, TEACHER, held_models
from lmworks.spec.elastic import fitted
from post_training import make_spec

DISTILL = ["align.on_policy=true", "align.prompts=3", "align.samples=1", "align.max_tokens=8", "data.global_batch=3"]
ROUND = ["align.prompts=3", "align.samples=2", "data.micro_batch=4"]


@pytest.mark.parametrize(
    ("method", "overrides", "models"),
    [
        ("grpo", ["align.beta=0.05", "align.prompts=4", "data.global_batch=4", "data.micro_batch=8"], [REFERENCE]),
        ("grpo", ["align.beta=0.05", *ROUND], [REFERENCE]),
        ("ppo", ROUND, [REFERENCE, CRITIC]),
        ("ppo", [*ROUND, "lora.rank=4"], [REFERENCE, CRITIC]),
        ("distill", DISTILL, [TEACHER]),
    ],
)
def test_a_round_need_not_be_whole_micro_batches(
    method: str, overrides: list[str], models: list[str], tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, method, "data.global_batch=0", *overrides)
    held = held_models(spec)
    assert list(held)[1:] == models
    assert all(held[name].run.accumulation == spec.accumulation for name in models)


@pytest.mark.parametrize(
    ("method", "overrides", "models"),
    [("grpo", ["align.beta=0.05"], [REFERENCE]), ("ppo", [], [REFERENCE, CRITIC])],
)
def test_a_round_goes_on_with_three_ranks(method: str, overrides: list[str], models: list[str], tmp_path: Path) -> None:
    sizes = ["parallel.dp=4", "fault.elastic=true", "data.global_batch=16", "data.micro_batch=2"]
    spec = fitted(make_spec(tmp_path, method, *sizes, "align.prompts=8", "align.samples=2", *overrides), 3)
    assert spec.parallel.world == 3 and list(held_models(spec))[1:] == models


@pytest.mark.parametrize(
    ("method", "overrides", "models"),
    [("grpo", ["align.beta=0.05"], [REFERENCE]), ("ppo", [], [REFERENCE, CRITIC])],
)
def test_a_cluster_counts_rollout_ranks(method: str, overrides: list[str], models: list[str], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, method, "align.rollout_ranks=1", "cluster.gpus_per_node=2", *overrides)
    assert list(held_models(spec))[1:] == models
