"""What only a GPU can show: the CUDA path computes what the CPU path does, resumes bitwise, and knows its peak."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lmworks import GPT, ModelSpec, Trainer
from lmworks.kernels.training.cross_entropy import linear_cross_entropy, reference
from lmworks.model import generate
from lmworks.plan.predict import predict
from lmworks.record import read_metrics
from lmworks.spec import RunSpec, load_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "gqa": {},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 4},
    "alibi": {"positions": "alibi"},
    "window": {"sliding_window": 9},
    "soft cap": {"attention_softcap": 0.05, "final_softcap": 0.5},
    "sinks": {"attention_sinks": True, "sliding_window": 9},
    "moe": {"experts": 4, "top_k": 2},
}


def tokens_for(spec: ModelSpec, seq: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, spec.vocab, (3, seq + 1), generator=torch.Generator().manual_seed(1))
    documents = torch.arange(seq).repeat(3, 1) // torch.tensor([[17], [40], [200]])
    return rows[:, :-1], rows[:, 1:], documents


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_gives_the_cpu_loss_and_gradients(shape: str, packed: bool) -> None:
    """On a GPU `auto` takes FlexAttention for packed documents and windows; the CPU's reference is plain torch."""
    spec = ModelSpec.from_preset("tiny", **SHAPES[shape])
    cpu, gpu = GPT(spec.replace(attention="reference")), GPT(spec).cuda()
    tokens, targets, documents = tokens_for(spec)
    for model, device in ((cpu, "cpu"), (gpu, "cuda")):
        given = documents.to(device) if packed else None
        _, loss = model(tokens.to(device), targets.to(device), documents=given, keep_logits=device == "cpu")
        loss.backward()
        model.loss = loss.detach().cpu()
    assert gpu.loss == pytest.approx(cpu.loss, rel=1e-5)
    # A key's bias shifts all scores of a query alike, so its gradient is zero but for rounding: hence the floor.
    floor = 1e-3 * torch.nn.utils.get_total_norm([p.grad for p in cpu.parameters()])
    for (name, mine), theirs in zip(gpu.named_parameters(), cpu.parameters(), strict=True):
        difference = (mine.grad.cpu() - theirs.grad).norm() / theirs.grad.norm().clamp(min=floor)
        assert difference < 1e-4, f"{name}: {difference:.2e}"


def test_chunked_bf16_loss_error() -> None:
    """Against an fp64 oracle: the error of the chunked gradient is at most twice that of torch's own."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3000, 64, generator=generator)
    weight = torch.randn(50_304, 64, generator=generator) * 0.2
    targets = torch.randint(0, 50_304, (3000,), generator=generator)
    targets[::7] = -100
    oracle_h, oracle_w = (x.double().cuda().requires_grad_() for x in (hidden, weight))
    logits = oracle_h @ oracle_w.t()
    torch.nn.functional.cross_entropy(logits, targets.cuda(), reduction="sum").backward()
    errors = {}
    for name, function in (("chunked", linear_cross_entropy), ("plain", reference)):
        h, w = (x.cuda().requires_grad_() for x in (hidden, weight))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            function(h.bfloat16() if name == "plain" else h, w, targets.cuda()).backward()
        errors[name] = [
            ((a.grad.double() - b.grad).norm() / b.grad.norm()).item() for a, b in ((h, oracle_h), (w, oracle_w))
        ]
    for chunked, plain in zip(errors["chunked"], errors["plain"], strict=True):
        assert chunked < max(2 * plain, 1e-2), errors


def test_generation_with_a_cache_equals_recomputation() -> None:
    model = GPT(ModelSpec.from_preset("tiny")).cuda()
    prompt = tokens_for(model.spec)[0][:, :8].cuda()
    fast = generate(model, prompt, 24)
    slow = prompt
    for _ in range(24):
        slow = torch.cat((slow, model(slow)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(fast, slow)


def run_spec(dataset: Path, *overrides: str) -> RunSpec:
    base = [f"data.path={dataset}", "data.seq=64", "data.micro_batch=4", "data.global_batch=8", "optim.steps=20"]
    base += ["optim.warmup=2", "optim.lr=3e-3", "checkpoint.every=10", "log.eval_every=0", "log.eval_batches=2"]
    return load_run("tiny", [*base, *overrides])


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_follows_fp32(dataset: Path, tmp_path: Path, dtype: str) -> None:
    for name in ("fp32", dtype):
        Trainer(run_spec(dataset, f"precision.dtype={name}"), tmp_path / name, quiet=True).run()
    exact, mixed = losses(tmp_path / "fp32"), losses(tmp_path / dtype)
    assert max(abs(a - b) for a, b in zip(exact, mixed, strict=True)) < 0.05
    assert mixed[-1] < mixed[0] - 0.5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_resume_is_bitwise_in_deterministic_mode(dataset: Path, tmp_path: Path, dtype: str) -> None:
    spec = run_spec(dataset, f"precision.dtype={dtype}", "deterministic=true")
    whole = Trainer(spec, tmp_path / "whole", quiet=True)
    whole.run()
    first = Trainer(spec, tmp_path / "parts", quiet=True)
    first.spec = spec.replace(optim=spec.optim.replace(steps=20))
    saved = first.save

    def save_and_stop(wait: bool = True) -> float:
        seconds = saved(wait)
        if first.step == 10:
            raise KeyboardInterrupt
        return seconds

    first.save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        first.run()
    rest = Trainer.resume(tmp_path / "parts", quiet=True)
    rest.run()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    mine, theirs = rest.train_state.state_dict(), whole.train_state.state_dict()
    for section in theirs:
        for name, value in theirs[section].items():
            assert torch.equal(mine[section][name], value), f"{section}: {name}"
    torch.use_deterministic_algorithms(False)


def test_mfu_uses_peak_of_known_gpu(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_spec(dataset, "precision.dtype=bf16"), tmp_path / "run", quiet=True)
    if trainer.peak_flops is None:
        pytest.skip("this GPU is not in the catalogue")
    trainer.run()
    line = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert line["mfu"] == pytest.approx(line["model_tflops"] * 1e12 / trainer.peak_flops)
    assert 0 < line["mfu"] < 1
    assert line["memory_bytes"] > 4 * 4 * trainer.spec.model.params


@pytest.mark.parametrize("recompute", ["none", "selective", "mlp", "full"])
def test_predicted_memory_equals_allocated(dataset: Path, tmp_path: Path, recompute: str) -> None:
    """GPT-2 small, bf16, 8 × 512: allocated bytes at the peak within 10% of the sheet."""
    changes = ["precision.dtype=bf16", "data.micro_batch=8", "data.global_batch=8", "data.seq=512", "optim.steps=3"]
    changes += [f"data.path={dataset}", f"parallel.recompute={recompute}", "optim.warmup=1", "cluster.device=cuda"]
    spec = load_run("gpt2-small", changes)
    others = torch.cuda.memory_allocated()  # what earlier tests still hold
    trainer = Trainer(spec, tmp_path / "run", quiet=True)
    trainer.run()
    measured = read_metrics(tmp_path / "run/metrics.jsonl")[1]["memory_bytes"] - others
    predicted = predict(spec).memory.total
    print(json.dumps({"recompute": recompute, "predicted": predicted, "measured": measured}))
    assert predicted == pytest.approx(measured, rel=0.10)


def test_compiled_blocks_give_the_eager_losses(dataset: Path, tmp_path: Path) -> None:
    for name in ("false", "true"):
        spec = run_spec(dataset, f"parallel.compile={name}", "optim.steps=6")
        Trainer(spec, tmp_path / name, quiet=True).run()
    for eager, compiled in zip(losses(tmp_path / "false"), losses(tmp_path / "true"), strict=True):
        assert math.isclose(eager, compiled, rel_tol=1e-4)
