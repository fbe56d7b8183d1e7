"""Steps of a network of one layer, taken before the real one is there."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from lmworks.engine.core import kernel_warmup
from lmworks.engine.core.cuda_graphs import capture_sizes
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.scheduler import Step
from lmworks.engine.core.step_input import Packer
from lmworks.engine.quantization.quantized_model import SCHEMES, MetaModel, apply_quantization, quantized_layers
from lmworks.kernels.inference.paged_attention import AttentionMetadata, LayerCache
from lmworks.loading import load_engine
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

CPU = torch.device("cpu")
SPEC = EngineSpec(device="cpu", max_seqs=20, max_batch_tokens=64, context=64, speculate="ngram")


@pytest.mark.parametrize("preset", ["tiny", "gpt2-small"])
def test_warmup_covers_every_size(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts fill a step, and decoding steps have the sizes of graphs: what is left out is compiled too late."""
    sizes, launched = [], []
    work, launch = ModelRunner.forward_and_sample, ModelRunner.launch

    def noted_work(self: ModelRunner, batch: object, sampling_metadata: object) -> object:
        sizes.append(len(batch.rows))  # type: ignore[attr-defined]
        return work(self, batch, sampling_metadata)  # type: ignore[arg-type]

    def noted_launch(self: ModelRunner, step: Step) -> object:
        launched.append((len(step.chunks), step.tokens, self.model.spec.layers))
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "forward_and_sample", noted_work)
    monkeypatch.setattr(ModelRunner, "launch", noted_launch)
    monkeypatch.setattr(kernel_warmup, "is_worthwhile", lambda *_: True)
    with kernel_warmup.warm_up_kernels(MetaModel(ModelSpec.from_preset(preset)), SPEC, CPU):
        pass
    assert launched == [(20, 60, 1), *((1, count, 1) for count in (2, 4, 8, 16, 32, 63))]
    assert sizes == [1, 2, 4, 8, 16, 20]


KINDS = {  # heads, those of keys, and their width
    "qwen3-0.6b": (16, 8, 128),
    "llama3-8b": (32, 8, 128),
    "gpt2-small": (12, 12, 64),
    "multi-query": (16, 1, 128),
    "wide": (16, 16, 256),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [200, 512, 2048, 32_768])
def test_attention_of_all_batch_sizes_uses_warmed_up_kernels(
    kind: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU like an H200: by what a prompt of any length, after any prefix, and steps that decode would launch."""
    module = pytest.importorskip("lmworks.kernels.inference.paged_attention_triton")
    monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    heads, kv_heads, width = KINDS[kind]
    spec = EngineSpec(device="cpu", max_seqs=256, max_batch_tokens=8192, context=context)
    cache, packer = LayerCache(*torch.empty(2, 1, kv_heads, spec.block, width)), Packer(spec, 100, pinned=False)
    q = torch.empty(1, heads, width, dtype=torch.bfloat16)

    def kernel(seqs: int, longest: int, blocks: int) -> tuple[object, ...]:
        """What a launch is compiled for."""
        tables, numbers = torch.empty(seqs, packer.width(blocks)), torch.empty(seqs)
        found = module.choose_config(q, cache, AttentionMetadata(tables, numbers, numbers, longest), invariant=False)
        return found.rows, found.tile, found.warps, found.stages, found.splits > 1

    warmed_up = {kernel(1, count, 1) for count in kernel_warmup.prompt_lengths(spec, experts=False)}
    warmed_up |= {kernel(size, 1, 1) for size in capture_sizes(spec.max_seqs)}
    draw = random.Random(0)
    for _ in range(300):
        longest = min(draw.choice((2, 16, draw.randint(1, 300), 8192)), context - 1)
        blocks = -(-draw.randint(longest, context) // spec.block)
        assert kernel(1, longest, blocks) in warmed_up, (longest, blocks)
        assert kernel(draw.randint(1, 256), 1, blocks) in warmed_up, blocks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_warm_up_of_quantized_networks_uses_quantized_layers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = apply_quantization(GPT(ModelSpec.from_preset("tiny").replace(tie_embeddings=False)), scheme)
    narrow = [layer for layer in quantized_layers(served) if layer.scheme.name == "int4"]
    groups = {layer.label: layer.in_features // layer.scale.shape[1] for layer in narrow}
    found: list[ModelRunner] = []
    steps = kernel_warmup.run_steps
    monkeypatch.setattr(kernel_warmup, "run_steps", lambda runner: (found.append(runner), steps(runner)))
    kernel_warmup.compile_kernels(MetaModel(served.spec, scheme, groups), SPEC, CPU)
    made = ModelRunner(served, SPEC, CPU, served.spec.vocab)
    told = [
        [(layer.scheme.name, layer.weight.shape, layer.scale.shape) for layer in quantized_layers(runner.model)]
        for runner in (*found, made)
    ]
    assert told[0][:-1] == told[1][: len(told[0]) - 1] and told[0][-1] == told[1][-1]  # one layer, and the head
    assert len(told[1]) > len(told[0]) > 2


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_warm_up_is_logged_and_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(kernel_warmup, "compile_kernels", fail)
    monkeypatch.setattr(kernel_warmup, "is_worthwhile", lambda *_: True)
    with kernel_warmup.warm_up_kernels(MetaModel(ModelSpec.from_preset("tiny")), SPEC, CPU):
        pass
    assert "kernels were not compiled ahead: RuntimeError: no memory" in caplog.text


def test_failed_load_does_not_wait_for_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_warmup, "is_worthwhile", lambda *_: True)
    over, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(kernel_warmup, "warm_up_or_log", lambda *_: waited.append(over.wait(20)))
    with (
        pytest.raises(ValueError, match="no weights"),
        kernel_warmup.warm_up_kernels(MetaModel(ModelSpec.from_preset("tiny")), SPEC, CPU),
    ):
        raise ValueError("no weights")
    assert not waited
    over.set()


@pytest.mark.parametrize("paid", [False, True])
def test_no_warm_up_on_a_cpu(paid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(kernel_warmup, "compile_kernels", lambda *given: done.append(given))
    if paid:  # what would be done on a GPU
        monkeypatch.setattr(kernel_warmup, "is_worthwhile", lambda *_: True)
    _, engine = load_engine("tiny", SPEC, None, 0)
    assert engine.runner.model.spec.layers > 1
    assert bool(done) == paid
