"""The spec that `lmworks finetune` makes of a folder, a file and a method."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.align.finetune import finetune_spec
from lmworks.model import GPT
from lmworks.spec import ModelSpec
from post_training import MODEL, write_prompts


@pytest.mark.parametrize(("context", "longest"), [(64, 32), (2048, 256)])
def test_answers_leave_room_for_their_prompts(context: int, longest: int, tmp_path: Path) -> None:
    GPT(ModelSpec.from_dict({**MODEL, "context": context})).save_hf(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    given = ("optim.steps=1", "data.tokenizer=bytes", 'align.rewards=["exact"]')
    spec = finetune_spec(str(tmp_path / "model"), str(prompts), "grpo", overrides=given)
    assert spec.align.max_tokens == longest and spec.data.seq == min(context, 1024)
    chosen = finetune_spec(str(tmp_path / "model"), str(prompts), "grpo", overrides=(*given, "align.max_tokens=40"))
    assert chosen.align.max_tokens == 40
