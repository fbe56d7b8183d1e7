"""The offline API on a GPU: weights arrive whole, and answers are those of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmworks import LLM, SamplingParams
from lmworks.bench.engine import bench_offline
from lmworks.bench.workload import Workload
from lmworks.engine.quantization.folder import save_quantized
from lmworks.engine.quantization.quantize import Calibration, quantize
from lmworks.engine.quantization.quantized_model import SCHEMES
from lmworks.loading import random_model
from lmworks.model import GPT
from lmworks.model.hf import load_hf
from lmworks.model.tensor_files import DoubleBuffer, save_tensors, spans
from lmworks.spec import ModelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    GPT(ModelSpec.from_preset("cpu-3m"), seed=2).save_hf(path)
    return path


def test_chunked_upload_is_exact(tmp_path: Path) -> None:
    buffer = DoubleBuffer(CUDA, piece=4096)  # pieces follow one another faster than they leave
    hosts = {str(seed): torch.randn(777, 333, generator=torch.Generator().manual_seed(seed)) for seed in range(4)}
    save_tensors(hosts, tmp_path / "some")
    with (tmp_path / "some").open("rb") as file:
        for name, span in spans(tmp_path / "some").items():
            assert torch.equal(buffer.fetch(file.fileno(), span).cpu(), hosts[name])


def test_weights_equal_files(folder: Path) -> None:
    there = load_hf(GPT, folder, dtype=torch.bfloat16, device=CUDA)
    here = load_hf(GPT, folder, dtype=torch.bfloat16)
    assert all(parameter.is_cuda for parameter in there.parameters())
    for (name, one), other in zip(there.named_parameters(), here.parameters(), strict=True):
        assert torch.equal(one.cpu(), other), name


def test_random_weights_are_drawn_on_the_device() -> None:
    model = random_model(ModelSpec.from_preset("cpu-3m"), CUDA, torch.bfloat16, seed=1)
    spread = model.head_weight.float().std().item()
    assert model.head_weight.is_cuda and spread == pytest.approx(model.spec.init_std, rel=0.05)
    again = random_model(ModelSpec.from_preset("cpu-3m"), CUDA, torch.bfloat16, seed=1)
    assert torch.equal(model.head_weight, again.head_weight)


def test_answers_equal_cpu(folder: Path) -> None:
    """Greedy, in fp32: a difference would need two logits that are closer than rounding."""
    prompts = [list(range(n, n + 20)) for n in range(12)]
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(folder, dtype="fp32", device="cpu") as cpu:
        expected = [result.token_ids for result in cpu.generate(prompts, params)]
    with LLM(folder, dtype="fp32", device="cuda", blocks=4096) as gpu:
        found = [result.token_ids for result in gpu.generate(prompts, params)]
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 11


def test_bench_runs(folder: Path) -> None:
    with LLM(folder, blocks=4096) as llm:
        facts = bench_offline(llm.native, Workload(32))
    assert facts["output_tokens_per_s"] > 0 and facts["bandwidth_gbs"] > 100
    assert all(0 < facts["floors_ms"][batch] < ms for batch, ms in facts["decode_ms"].items())


@pytest.mark.parametrize("scheme", ["", *SCHEMES])
def test_after_warm_up_no_kernel_is_left_to_compile(scheme: str, folder: Path, tmp_path: Path) -> None:
    """In a process of its own with an empty cache: an engine that follows adds no kernel to it."""
    if scheme:
        model = GPT.from_hf(folder)
        ids = torch.randint(0, model.spec.vocab, (4000,), generator=torch.Generator().manual_seed(0))
        report = quantize(model, scheme, Calibration.of(ids, 64, model.spec.vocab, "noise"), limit=1.0)
        folder = tmp_path / "quantized"
        save_quantized(model, folder, report)
    script = """
import sys
from pathlib import Path
from lmworks.engine.core.kernel_warmup import warm_up_kernels
from lmworks.loading import load, make_engine, pick_device, meta_model_of
from lmworks.spec import EngineSpec
spec = EngineSpec(blocks=512)
kernels = lambda: {path.name for path in Path(sys.argv[2]).rglob("*.cubin")}
with warm_up_kernels(meta_model_of(sys.argv[1]), spec, pick_device(spec)):
    loaded = load(sys.argv[1], spec, None, 0)
before = kernels()
make_engine(loaded, spec, 0)
print(len(before), *sorted(kernels() - before))
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, *late = done.stdout.split()
    assert int(count) > 3 and late == []
