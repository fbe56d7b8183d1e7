"""The course's own programs, complete: what they do beside the exercises."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.learn.answers import load
from lmworks.learn.course_files import COURSE
from lmworks.parallel.local_ranks import on_ranks


def make_trainer(folder: Path, **arguments: Any) -> Any:
    ddp = load(COURSE, "src/training/ddp_trainer.py")
    torch.set_num_threads(1)
    return ddp.DistributedTrainer(
        ddp.TrainingArguments(
            model_size="tiny", batch_size=2, seq_len=16, warmup_steps=2, output_dir=str(folder), **arguments
        )
    )


def test_fp16_scales_the_loss_and_leaves_out_what_overflows(tmp_path: Path) -> None:
    full, half = make_trainer(tmp_path), make_trainer(tmp_path, mixed_precision="fp16", grad_accum_steps=1)
    batches = full.micro_batches(0)
    expected, got = full.train_step(batches), half.train_step(batches)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-2)
    before = {name: one.clone() for name, one in half.model.state_dict().items()}
    half.loss_scale.factor = 2.0**60
    assert not torch.tensor(half.train_step(batches)["grad_norm"]).isfinite()
    assert half.loss_scale.factor == 2.0**59
    assert all(torch.equal(one, before[name]) for name, one in half.model.state_dict().items())


def test_without_a_scale_small_gradients_of_fp16_vanish(tmp_path: Path) -> None:
    """What the scale is for: a loss so small that its gradients lie below fp16's smallest number."""
    trainer = make_trainer(tmp_path, mixed_precision="fp16")
    (tokens,) = trainer.micro_batches(0)

    def largest() -> float:
        trainer.model.zero_grad()
        with trainer.autocast():
            loss = trainer.model(tokens, labels=tokens)[1]
        (1e-7 * loss).backward()
        return max(float(one.grad.abs().max()) for name, one in trainer.model.named_parameters() if "_proj" in name)

    scaled = largest()
    trainer.loss_scale.factor = 1.0
    assert largest() == 0 and scaled > 0


def printed(rank: int, file: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        load(COURSE, file).main()
    return output.getvalue()


@pytest.mark.parametrize("file", [pytest.param("sequence_parallel", marks=pytest.mark.slow), "expert_parallel"])
def test_ranks_over_gloo_compute_what_one_rank_does(file: str) -> None:
    """Results and gradients, each in a line that ends with its relative difference."""
    first, *others = on_ranks(2, printed, f"src/parallelism/{file}.py", group=False)
    apart = [float(number) for number in re.findall(r" ([0-9.e-]+)$", first, re.MULTILINE)]
    assert len(apart) == {"sequence_parallel": 5, "expert_parallel": 1}[file] and max(apart) < 1e-5, first
    assert others == [""]
