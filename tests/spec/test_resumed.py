"""What a resumed run may change is a list, in the code and in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lmworks.spec import RunSpec
from lmworks.spec.load import apply_overrides
from lmworks.spec.resumed import MAY_CHANGE, flat, may_change, refused_changes

BASE = {"model": {"preset": "tiny"}, "data": {"path": "/data/a", "micro_batch": 2, "global_batch": 8}}
DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def spec(*overrides: str) -> RunSpec:
    return RunSpec.from_dict(apply_overrides(BASE, overrides))


def changes(*overrides: str) -> list[str]:
    saved = json.loads(json.dumps(spec().to_dict()))  # as a manifest holds it
    return refused_changes(saved, spec(*overrides))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", "seed = 1, was 0"),
        ("data.global_batch=16", "data.global_batch = 16, was 8"),
        ("data.seq=64", "data.seq = 64, was 128"),
        ("data.shuffle=false", "data.shuffle = false, was true"),
        ("data.document_mask=true", "data.document_mask = true, was false"),
        ("model.rope_theta=5e5", "model.rope_theta = 500000.0, was 10000.0"),
        ("model.sliding_window=64", "model.sliding_window = 64, was 0"),
        ("optim.optimizer=sgd", 'optim.optimizer = "sgd", was "adamw"'),
    ],
)
def test_what_the_state_or_the_order_of_the_data_follows_from_stays(override: str, said: str) -> None:
    found = changes(override)
    assert said in found and all(one.split(" = ")[0].startswith(override.split(".")[0].split("=")[0]) for one in found)


@pytest.mark.parametrize(
    "override",
    [
        "name=other", "optim.steps=9", "optim.lr=1e-5", "optim.schedule=constant", "optim.clip=0.5",
        "data.path=/data/b",
        "data.micro_batch=4", "data.workers=2", "parallel.dp=2", "parallel.tp=2", "checkpoint.every=7", "log.every=3",
        "health.nonfinite=skip", "fault.elastic=true", "watch.timeout_s=60", "precision.dtype=bf16",
        "model.attention=sdpa", "precision.states=bf16", "cluster.price_hour=2.0", "deterministic=true",
        "checkpoint.init=/weights", "align.engine_memory=0.3",
    ],
)  # fmt: skip
def test_how_and_where_and_how_long_it_goes_on_may_change(override: str) -> None:
    assert changes(override) == []


def test_another_number_of_engines_may_sample() -> None:
    online = ["align.method=grpo", 'align.rewards=["exact"]', "align.max_tokens=8", "data.path=/p.jsonl"]
    saved = spec(*online, "parallel.dp=2").to_dict()
    assert refused_changes(saved, spec(*online, "parallel.dp=2", "align.engine_tp=2", "align.offload=resting")) == []


def test_a_mixture_may_move_and_not_shift() -> None:
    old = spec("data.mix={'/a' = 1.0, '/b' = 2.0}").to_dict()
    assert refused_changes(old, spec("data.mix={'/elsewhere/a' = 1.0, '/b' = 2.0}")) == []
    assert refused_changes(old, spec("data.mix={'/a' = 2.0, '/b' = 2.0}")) == ["data.mix = [2.0, 2.0], was [1.0, 2.0]"]


def test_a_key_that_was_not_there_yet_had_its_default() -> None:
    old = spec().to_dict()
    del old["data"]["shuffle"]
    assert refused_changes(old, spec()) == []
    assert refused_changes(old, spec("data.shuffle=false")) == ["data.shuffle = false, was true"]
    assert refused_changes({**old, "later": 1}, spec()) == ["later = not there, was 1"]


def test_a_key_that_was_not_there_yet_and_follows_from_others() -> None:
    """An older version has no model.choice_bias; model.balance_bias implies it."""
    experts = ("model.experts=4", "model.top_k=2", "model.balance_bias=0.1")
    old = spec(*experts).to_dict()
    del old["model"]["choice_bias"]
    assert refused_changes(old, spec(*experts)) == []
    changed = refused_changes(old, spec("model.experts=4", "model.top_k=2", "model.choice_bias=false"))
    assert changed == ["model.balance_bias = 0.0, was 0.1", "model.choice_bias = false, was true"]


def test_the_list_names_keys_that_there_are() -> None:
    keys = flat(RunSpec().to_dict()).keys() | {key.partition(".")[0] for key in flat(RunSpec().to_dict())}
    assert not set(MAY_CHANGE) - keys
    assert not may_change("seed") and not may_change("data.seq") and may_change("parallel.dp_shard")


def test_the_docs_have_the_same_list() -> None:
    section = DOCS.read_text().partition("## What a resumed run may change")[2].partition("\n## ")[0]
    keys = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([a-z_0-9.]+)`", " ".join(keys))) == sorted(MAY_CHANGE)
