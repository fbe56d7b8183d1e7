"""Post-training on a GPU: log-probabilities by kernels, an engine over the trained weights, memory over rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.kernels.training.cross_entropy import IGNORE
from lmworks.kernels.training.token_logprobs import linear_logprobs, reference
from post_training import make_spec

pytestmark = pytest.mark.gpu

WIDE = [
    "model.hidden=256",
    "model.heads=4",
    "model.ffn=512",
    "model.context=256",
    "data.seq=256",
    "align.max_tokens=64",
]
BF16 = ["precision.dtype=bf16", "precision.weights=bf16", "align.engine_memory=0.1"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("vocab", [50257, 32000])  # one that is padded
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_log_probabilities_by_kernels(implementation: str, vocab: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3000, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, 128, device="cuda", dtype=torch.bfloat16) * 0.2).requires_grad_()
    targets = torch.randint(vocab, (3000,), device="cuda")
    targets[::7] = IGNORE
    factors = torch.randn(3000, device="cuda")
    options = {"temperature": 0.7, "with_entropy": True, "implementation": implementation}
    ours = linear_logprobs(hidden, weight, targets, **options)  # type: ignore[arg-type]
    grads = torch.autograd.grad((ours.logps * factors).sum(), (hidden, weight))
    wide = [one.detach().float().requires_grad_() for one in (hidden, weight)]
    theirs = reference(*wide, targets, 0.7)
    expected = torch.autograd.grad((theirs.logps * factors).sum(), wide)
    assert (ours.logps - theirs.logps).abs().max() < 0.1  # logits are rounded to bf16
    assert (ours.logps - theirs.logps).abs().mean() < 0.01
    assert (ours.entropies - theirs.entropies).abs().mean() < 0.02
    for got, want in zip(grads, expected, strict=True):
        assert (got.float() - want).norm() / want.norm() < 0.01


def built(tmp_path: Path, *overrides: str) -> OnlineTrainer:
    spec = make_spec(tmp_path, "grpo", *WIDE, *BF16, "data.global_batch=16", *overrides)
    trainer = OnlineTrainer(spec, tmp_path / "run", quiet=True, force=True)
    trainer.build()
    return trainer


MOE = ["model.experts=8", "model.top_k=2", "model.expert_ffn=128"]


@pytest.mark.parametrize("shape", [[], MOE], ids=["dense", "moe"])
def test_the_engine_samples_from_the_trained_weights(shape: list[str], tmp_path: Path) -> None:
    trainer = built(tmp_path, *shape)
    for _ in range(3):
        values = trainer.next_step(trainer.rounds)
        assert values["hand_over_bytes"] == 0
        # A token whose router is undecided goes to another expert when its logits are rounded otherwise.
        assert values["sampler_diff/mean"] < 0.03 and (shape == MOE or values["sampler_diff/max"] < 0.5)
        assert 0.95 < values["importance_weight/mean"] < 1.05
    assert trainer.rollout_engine.engine.metrics.graph_recaptures == 0


def test_memory_does_not_grow_over_a_hundred_rounds(tmp_path: Path) -> None:
    trainer = built(tmp_path)
    used = []
    for _ in range(100):
        trainer.next_step(trainer.rounds)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append((torch.cuda.memory_reserved(), total - free))
    assert used[-1][0] <= used[20][0] and used[-1][1] <= used[20][1]
    assert trainer.rollout_engine.engine.metrics.graph_recaptures == 0
