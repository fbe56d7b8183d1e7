"""The spec that `lmworks finetune` makes of a folder, a file and a method."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lmworks.align.finetune import finetune_spec
from lmworks.data import open_batches
from lmworks.model import GPT
from lmworks.spec import ModelSpec
from post_training import MODEL, write_pairs, write_prompts


@pytest.mark.parametrize(("context", "longest"), [(64, 32), (2048, 256)])
def test_answers_leave_room_for_their_prompts(context: int, longest: int, tmp_path: Path) -> None:
    GPT(ModelSpec.from_dict({**MODEL, "context": context})).save_hf(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    given = ("optim.steps=1", "data.tokenizer=bytes", 'align.rewards=["exact"]')
    spec = finetune_spec(str(tmp_path / "model"), str(prompts), "grpo", overrides=given)
    assert spec.align.max_tokens == longest and spec.data.seq == min(context, 1024)
    chosen = finetune_spec(str(tmp_path / "model"), str(prompts), "grpo", overrides=(*given, "align.max_tokens=40"))
    assert chosen.align.max_tokens == 40


def test_steps_follow_from_the_examples_beside_a_given_warmup(tmp_path: Path) -> None:
    GPT(ModelSpec.from_dict(MODEL)).save_hf(tmp_path / "model")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 170)
    given = ("data.tokenizer=bytes", "optim.warmup=5", "data.global_batch=16")
    spec = finetune_spec(str(tmp_path / "model"), str(pairs), "dpo", epochs=2, overrides=given)
    rows = open_batches(spec.data, seed=spec.seed).windows
    assert (spec.optim.warmup, spec.optim.steps) == (5, math.ceil(2 * rows / 16))
