"""Steps of a network of one layer, taken before the real one is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.engine import rehearsal
from lmworks.engine.runner import Runner
from lmworks.engine.scheduler import Step
from lmworks.loading import serve
from lmworks.spec import EngineSpec, ModelSpec

CPU = torch.device("cpu")
SPEC = EngineSpec(device="cpu", max_seqs=20, max_batch_tokens=64, context=64, speculate="ngram", rehearse=True)


@pytest.mark.parametrize("preset", ["tiny", "gpt2-small"])
def test_every_size_is_taken_once_and_the_largest_step(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts fill a step, and decoding steps have the sizes of graphs: what is left out is compiled too late."""
    sizes, launched = [], []
    work, launch = Runner.work, Runner.launch

    def noted_work(self: Runner, batch: object, wants: object) -> object:
        sizes.append(len(batch.rows))  # type: ignore[attr-defined]
        return work(self, batch, wants)  # type: ignore[arg-type]

    def noted_launch(self: Runner, step: Step) -> object:
        launched.append((len(step.chunks), step.tokens, self.model.spec.layers))
        return launch(self, step)

    monkeypatch.setattr(Runner, "work", noted_work)
    monkeypatch.setattr(Runner, "launch", noted_launch)
    rehearsal.rehearse(ModelSpec.from_preset(preset), SPEC, CPU)
    assert launched == [(20, 60, 1)]
    assert sizes == [1, 2, 4, 8, 16, 20]


def test_a_failure_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rehearsal, "rehearse", fail)
    monkeypatch.setattr(rehearsal, "pays", lambda *_: True)
    with rehearsal.rehearsal(ModelSpec.from_preset("tiny"), SPEC, CPU):
        pass


def test_a_cpu_rehearses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: pytest.fail("rehearsed"))
    _, engine = serve("tiny", SPEC, None, 0)
    assert engine.runner.model.spec.layers > 1
