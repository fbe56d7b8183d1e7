"""Steps of a network of one layer, taken before the real one is there."""

from __future__ import annotations

import time

import pytest
import torch

from lmworks.engine import rehearsal
from lmworks.engine.outline import Outline
from lmworks.engine.quantized_model import SCHEMES, apply_quantization, quantized_layers
from lmworks.engine.runner import Runner
from lmworks.engine.scheduler import Step
from lmworks.loading import serve
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

CPU = torch.device("cpu")
SPEC = EngineSpec(device="cpu", max_seqs=20, max_batch_tokens=64, context=64, speculate="ngram")


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
    monkeypatch.setattr(rehearsal, "pays", lambda *_: True)
    with rehearsal.rehearsal(Outline(ModelSpec.from_preset(preset)), SPEC, CPU):
        pass
    assert launched == [(20, 60, 1)]
    assert sizes == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_networks_rehearse_with_the_layers_that_they_have(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = apply_quantization(GPT(ModelSpec.from_preset("tiny").replace(tie_embeddings=False)), scheme)
    narrow = [layer for layer in quantized_layers(served) if layer.scheme.name == "int4"]
    groups = {layer.label: layer.in_features // layer.scale.shape[1] for layer in narrow}
    found: list[Runner] = []
    steps = rehearsal.take_steps
    monkeypatch.setattr(rehearsal, "take_steps", lambda runner: (found.append(runner), steps(runner)))
    rehearsal.rehearse(Outline(served.spec, scheme, groups), SPEC, CPU)
    made = Runner(served, SPEC, CPU, served.spec.vocab)
    told = [
        [(layer.scheme.name, layer.weight.shape, layer.scale.shape) for layer in quantized_layers(runner.model)]
        for runner in (*found, made)
    ]
    assert told[0][:-1] == told[1][: len(told[0]) - 1] and told[0][-1] == told[1][-1]  # one layer, and the head
    assert len(told[1]) > len(told[0]) > 2


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told_and_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rehearsal, "rehearse", fail)
    monkeypatch.setattr(rehearsal, "pays", lambda *_: True)
    with rehearsal.rehearsal(Outline(ModelSpec.from_preset("tiny")), SPEC, CPU):
        pass
    assert "kernels were not compiled ahead: RuntimeError: no memory" in caplog.text


def test_a_load_that_fails_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "pays", lambda *_: True)
    monkeypatch.setattr(rehearsal, "tried", lambda *_: time.sleep(5))
    began = time.monotonic()
    with (
        pytest.raises(ValueError, match="no weights"),
        rehearsal.rehearsal(Outline(ModelSpec.from_preset("tiny")), SPEC, CPU),
    ):
        raise ValueError("no weights")
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("paid", [False, True])
def test_a_cpu_rehearses_nothing(paid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(rehearsal, "rehearse", lambda *given: done.append(given))
    if paid:  # what would be done on a GPU
        monkeypatch.setattr(rehearsal, "pays", lambda *_: True)
    _, engine = serve("tiny", SPEC, None, 0)
    assert engine.runner.model.spec.layers > 1
    assert bool(done) == paid
