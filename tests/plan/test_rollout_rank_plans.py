"""Plans of runs with rollout ranks: the bytes of such a rank against its engine, rounds that overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.align.prompts import open_prompts
from lmworks.align.rollout_engine import RolloutEngine
from lmworks.plan.memory.phases import engine_memory, held_beside, rollout_rank
from lmworks.plan.memory.sheet import run_phases
from lmworks.plan.round_time import run_time
from lmworks.spec import RunSpec
from lmworks.train.rank_memory import storage_bytes
from post_training import make_spec

EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.balance_bias=0.01"]


@pytest.mark.parametrize("shape", [[], ["model.tie_embeddings=true"], EXPERTS], ids=["dense", "tied", "experts"])
def test_a_rollout_rank_holds_what_is_planned(
    shape: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=2", "align.prompts=6", *shape)
    engine = RolloutEngine(spec, open_prompts(spec)[0].tokenizer, [0], torch.device("cpu"))
    weights = sum(slot.tensor.nbytes for slots in engine.weights.slots.values() for slot in slots)
    cache = storage_bytes([engine.engine.runner.cache.store])
    planned, sheet = engine_memory(spec, (), None), rollout_rank(spec, None)
    assert planned is not None and sheet is not None
    assert (planned.weights, planned.shared, planned.cache) == (weights, 0, cache)
    assert sheet.resting == weights + cache


def test_a_rank_of_the_trainer_holds_no_engine(tmp_path: Path) -> None:
    gpu = ["cluster.gpu=h100", "precision.dtype=bf16"]
    colocated, apart = (
        make_spec(tmp_path, "grpo", f"align.rollout_ranks={count}", f"cluster.gpus_per_node={1 + count}", *gpu)
        for count in (0, 1)
    )
    models, engine = held_beside(apart, apart.cluster.accelerator, 0)
    assert engine is None and models == held_beside(colocated, colocated.cluster.accelerator, 0)[0]
    before, after = (run_phases(spec, spec.cluster.accelerator) for spec in (colocated, apart))
    assert before.engine is not None and before.rollout_rank is None and after.rollout_rank is not None
    assert [phase.phase for phase in before.phases] == ["generate", "score", "update"]
    assert [phase.phase for phase in after.phases] == ["hand over", "score", "update"]
    assert before.phases[2].resting - after.phases[2].resting == before.engine.weights


@pytest.mark.parametrize("staleness", [0, 1])
def test_generation_overlaps_with_updates_where_answers_may_be_stale(staleness: int, tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, "grpo", "align.rollout_ranks=1", f"align.max_staleness={staleness}", "cluster.gpu=h100",
        "cluster.gpus_per_node=2", "precision.dtype=bf16", "cluster.price_hour=2",
    )  # fmt: skip
    time = phases_of(spec)
    generate, hand_over = time["generate"], time["hand over"]
    rest = time["score"] + time["update"]
    assert min(generate, hand_over, rest) > 0
    whole = run_time(spec, spec.cluster.accelerator)  # type: ignore[arg-type]
    want = generate + rest if staleness == 0 else max(generate, rest)
    assert whole.seconds == pytest.approx(hand_over + want)
    assert whole.price_hour == 4  # the rollout rank costs as much


def phases_of(spec: RunSpec) -> dict[str, float]:
    assert spec.cluster.accelerator is not None
    return {one.phase: one.seconds for one in run_time(spec, spec.cluster.accelerator).phases}
