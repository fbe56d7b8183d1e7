"""Adapters and judged guesses on a GPU: through graphs, and in the distribution of the model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hf_reference import FAMILIES, answers, make_engine, random_prompts
from test_lora import all_at_once, two_adapters
from test_speculative import fit_of_triples

from lmworks.engine.core.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_adapters_and_none(family: str, tmp_path: Path) -> None:
    """Added to an engine whose steps are recorded already: recordings without adapters are made anew."""
    engine = make_engine(family, "cuda", blocks=400)
    answers(engine, random_prompts([9] * 6), [SamplingParams(temperature=0, max_tokens=6)] * 6)
    adapters = two_adapters(family)
    for name, adapter in adapters.items():
        if name is not None and adapter is not None:
            engine.add_adapter(name, adapter.save(tmp_path / name))
    for _ in range(2):  # recorded, and replayed
        all_at_once(family, adapters, engine, 2e-4)


def test_draft_token_distribution() -> None:
    fit, engine = fit_of_triples("draft", "cuda")
    assert 0.1 < engine.metrics.acceptance_rate < 0.9
    assert fit > 1e-3
