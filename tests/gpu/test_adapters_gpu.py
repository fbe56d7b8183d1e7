"""Adapters and judged guesses on a GPU: through graphs, and in the distribution of the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hf_reference import FAMILIES, answers, make_engine, random_prompts
from test_lora import all_at_once, two_adapters
from test_sleep_gpu import SHAPES, SMALL
from test_speculative import fit_of_triples

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec
from tiny import write_adapter

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


def test_adapters_of_a_store_take_turns_below_graphs(tmp_path: Path) -> None:
    """Six adapters in two slots: columns are written anew, graphs are kept, answers are those of preloaded ones."""
    model = ModelSpec(**{**SMALL, **SHAPES["dense"]})
    names = [f"adapter-{number}" for number in range(6)]
    for number, name in enumerate(names):
        write_adapter(tmp_path / name, model, seed=number)

    def make(**store: Any) -> Engine:
        spec = EngineSpec(device="cuda", dtype="fp32", blocks=200, max_seqs=4, batch_invariant=True, **store)
        return Engine(ModelRunner(GPT(model, seed=1), spec, "cuda", model.vocab))

    def answered(engine: Engine, name: str | None) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, adapter=name)
        engine.add(request := Request(list(range(40)), params))
        return next(d.result.token_ids for d in engine.run() if d.request is request and d.result)

    preloaded, engine = make(), make(adapter_store=str(tmp_path), warm_adapters=2)
    for name in names:
        preloaded.add_adapter(name, tmp_path / name)
    want = {name: answered(preloaded, name) for name in (*names, None)}
    assert len(set(map(tuple, want.values()))) > 3
    assert isinstance(engine.runner, ModelRunner) and engine.runner.graphs is not None
    answered(engine, names[0])
    captured = set(engine.runner.graphs.captured)
    assert captured
    for name in (*names, None, *reversed(names)):
        assert answered(engine, name) == want[name]
    assert captured <= set(engine.runner.graphs.captured) and engine.metrics.adapter_loads > len(names)
