"""Two ranks that share every layer of a model on one GPU: the same answers as transformers.

All but the collectives (`one_card`) is as on two: processes, shares of the weights, Triton's kernels, steps that are
read one behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import one_card
from hf_reference import compare, random_prompts, reference_model
from test_engine_tp import COUNTS, LENGTHS, SMALL

from lmworks import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def one_card_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    one_card.arrange(monkeypatch.setattr)


@pytest.mark.usefixtures("one_card_for_two")
@pytest.mark.parametrize(("family", "speculate"), [("llama", "none"), ("qwen3", "ngram"), ("gpt2", "draft")])
def test_equal_to_transformers(family: str, speculate: str, tmp_path: Path) -> None:
    """Batching, prompts in chunks, prefix hits, preemption, several answers; with guesses of either kind."""
    reference_model(family).save_pretrained(tmp_path)
    draft = {"draft": str(tmp_path)} if speculate == "draft" else {}
    with LLM(tmp_path, tp=2, blocks=22, speculate=speculate, **draft, **{**SMALL, "device": "cuda"}) as llm:
        engine, prompts = llm.native, random_prompts(LENGTHS, seed=1, prefix=9)
        excused = compare(engine, family, prompts, COUNTS) + compare(engine, family, prompts, COUNTS)
        excused += compare(engine, family, prompts[:1], [12], n=3)
        assert excused <= 1
        assert engine.runner.device.type == "cuda"
        metrics = engine.metrics
        assert metrics.num_preemptions > 0
        assert metrics.prefix_cache_hits > 0
        assert (metrics.accepted_guesses > 0) == (speculate != "none")
