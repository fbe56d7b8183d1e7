"""What log-probabilities and values of answers keep and need at most, against the tensors of real passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training import token_divergence
from lmworks.kernels.training.token_divergence import Teacher
from lmworks.model import GPT
from lmworks.plan import ops
from lmworks.plan.memory.peak_memory import Activations
from lmworks.plan.memory.rank_weights import Place
from lmworks.plan.memory.sheet import memory
from lmworks.plan.policies import run_case
from lmworks.spec import RunSpec
from lmworks.spec.load import dump_toml
from tracker import Steps


def make_run(method: str, dtype: str = "fp32", seq: int = 32, micro_batch: int = 1, **model: Any) -> RunSpec:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 96, "context": max(32, seq), **model}
    return RunSpec.from_dict(
        {
            "model": shape,
            "data": {"seq": seq, "micro_batch": micro_batch, "global_batch": micro_batch},
            "precision": {"dtype": dtype},
            "align": {"method": method},
        }
    )


class AnswerSteps(Steps):
    """Pairs in one micro-batch, and the sum of their log-probabilities or values as a loss."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.tokens = torch.cat([self.tokens, self.tokens])

    def answers(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.precision.dtype == "bf16"):
            if self.spec.model.scalar_head:
                return self.model(self.tokens)
            found = self.model(self.tokens, self.tokens, keep_logits=False, logprobs=True)
            self.entropies = found.entropies
            return found.logps

    def forward(self) -> Tensor:
        return self.answers().sum()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["simpo", "reward"])
def test_what_the_forward_pass_keeps_is_exact(method: str, dtype: str) -> None:
    spec = make_run(method, dtype)
    run = AnswerSteps(spec)
    with run.track() as tracker:
        values = run.answers()
        live = tracker.live
    kept = sum(row.bytes for row in Activations.of(run_case(spec, "cpu"), Place()).kept(0))
    assert values.requires_grad
    assert live == kept + (values.nbytes if method == "reward" else 0)


def allocated_peak(work: Callable[[], None]) -> int:
    """Largest sum of what PyTorch's allocator gives out, inside of operations too."""
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        work()
    assert profiler.kineto_results is not None
    events: list[Any] = profiler.kineto_results.events()
    live = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize(("vocab", "seq"), [(96, 32), (4096, 256)])
def test_the_peak_of_a_step(vocab: int, seq: int, accumulated: bool) -> None:
    """Where logits are most of it (a chunk has 8 MiB), and where they are little."""
    spec = make_run("simpo", "fp32", seq, vocab=vocab, tie_embeddings=False)
    if accumulated:
        spec = spec.replace(data=spec.data.replace(global_batch=2))
    run = AnswerSteps(spec)
    run.step()
    peak = allocated_peak(run.step)
    sheet = memory(spec)
    beside = ("parameters", "optimizer states", "batch", "allocator holes")
    predicted = sum(row.bytes for row in sheet.rows if row.name not in beside)
    assert peak == pytest.approx(predicted, rel=0.05), sheet


class DistillSteps(Steps):
    """A student beside a teacher of the same shape; the divergence as a loss."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.teacher = GPT(spec.model, seed=1).requires_grad_(False)

    def forward(self) -> Tensor:
        with torch.no_grad():
            states = self.teacher(self.tokens, self.tokens, final_states=True)
        teacher = Teacher(states, self.teacher.head_weight, kind="jsd")
        del states
        found = self.model(self.tokens, self.tokens, teacher=teacher)
        return found.loss


@pytest.mark.parametrize(("vocab", "seq"), [(96, 64), (4096, 512)])
def test_the_peak_of_a_step_of_distillation(vocab: int, seq: int, tmp_path: Path) -> None:
    """A chunk has 4 MiB a table, and five tables of it are there at once."""
    shape = {"layers": 2, "hidden": 64, "heads": 4, "vocab": vocab, "context": seq, "tie_embeddings": False}
    (tmp_path / "spec.toml").write_text(dump_toml({"model": shape, "data": {"seq": seq}}))
    data = {"seq": seq, "micro_batch": 1, "global_batch": 1, "packing": False}
    align = {"method": "distill", "teacher": str(tmp_path), "divergence": "jsd"}
    spec = RunSpec.from_dict({"model": shape, "data": data, "align": align})
    run = DistillSteps(spec)
    run.step()
    peak = allocated_peak(run.step)
    sheet = memory(spec)
    beside = ("parameters", "optimizer states", "batch", "allocator holes", "teacher: weights")
    predicted = sum(row.bytes for row in sheet.rows if row.name not in beside)
    assert peak == pytest.approx(predicted, rel=0.05), sheet


def test_chunks_of_a_divergence_are_those_of_the_kernel() -> None:
    for tokens, vocab, device in (
        (2**16, 50_257, "cpu"),
        (2**16, 128_256, "cuda"),
        (10**6, 7, "cpu"),
        (9, 2**40, "cuda"),
    ):
        assert min(tokens, token_divergence.divergence_rows(tokens, vocab, device)) == ops.divergence_rows(
            tokens, vocab, device
        )
