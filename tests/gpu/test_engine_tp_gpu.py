"""Two ranks that share every layer of a model on one GPU: the same answers as transformers.

NCCL wants a card for each rank, so these meet over gloo, whose collectives go through the host's memory. All else is as
on two cards: processes, shares of the weights, Triton's kernels, steps that are read one behind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hf_reference import compare, random_prompts, reference_model
from test_engine_tp import COUNTS, LENGTHS, SMALL

from lmworks import LLM
from lmworks.engine import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OVER_HOST = {"cuda": "cpu:gloo,cuda:gloo"}
FOLLOWER = f"""
import os, sys, torch
from lmworks.engine import __main__, ranks
ranks.BACKENDS = {OVER_HOST}
ranks.on_rank = lambda device, rank: torch.device("cuda", 0)
os._exit(__main__.main())
"""


@pytest.fixture
def one_card_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def follower() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", FOLLOWER], stdin=pipe, stdout=pipe, start_new_session=True)

    monkeypatch.setattr(ranks, "BACKENDS", OVER_HOST)
    monkeypatch.setattr(ranks, "follower", follower)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


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
