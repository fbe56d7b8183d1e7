"""`--dial depth=N`: what follows from the depth, in numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lmworks.spec import RunSpec, SpecError, load_run
from lmworks.spec.dial import dial_overrides
from typed import lmworks

LARGE = ["model.vocab=32768", "model.context=2048", "data.seq=2048"]


def dialled(depth: int, *overrides: str) -> RunSpec:
    return load_run("configs/small.toml", dial_overrides("configs/small.toml", overrides, f"depth={depth}"))


def weights(depth: int, vocab: int) -> int:
    """4·h² of attention, 3·h·f of SwiGLU with f = 8/3·h rounded up to 64, and the head."""
    hidden = 64 * depth
    ffn = -(-8 * hidden // 192) * 64
    return depth * (4 * hidden**2 + 3 * hidden * ffn) + vocab * hidden


def test_reference_is_gpt3_small() -> None:
    """Depth 12: 768 wide, 12 heads, 0.5M tokens a batch at 6e-4 (GPT-3, table 2.1), and 20 tokens a weight."""
    run = dialled(12, *LARGE)
    assert (run.model.layers, run.model.hidden, run.model.heads, run.model.kv_heads, run.model.head_dim) == (
        12, 768, 12, 12, 64,
    )  # fmt: skip
    assert run.tokens_per_step == 2**19 and run.data.global_batch == 256
    assert (run.optim.lr, run.optim.weight_decay) == (6e-4, 0.1)
    assert run.optim.steps == round(20 * weights(12, 32768) / 2**19) == 4200
    assert (run.model.parametrization, run.model.mup_base_hidden, run.model.mup_base_layers) == ("mup", 768, 12)


@pytest.mark.parametrize(
    ("depth", "batch", "steps", "lr", "decay"),
    [
        (4, 2**18, 885, 4.243e-4, 0.6712),
        (20, 2**20, 8362, 8.485e-4, 0.03551),
        (32, 2**21, 16080, 1.2e-3, 0.01306),
    ],
)
def test_other_depths(depth: int, batch: int, steps: int, lr: float, decay: float) -> None:
    run = dialled(depth, *LARGE)
    assert run.model.hidden == 64 * depth and run.model.heads == depth
    ratio = weights(depth, 32768) / weights(12, 32768)
    assert run.tokens_per_step == batch == 2 ** round(math.log2(2**19 * ratio**0.383))
    assert run.optim.steps == steps == round(20 * weights(depth, 32768) / batch)
    assert run.optim.lr == lr == pytest.approx(6e-4 * math.sqrt(batch / 2**19), rel=1e-3)
    # B / (η·λ·D), the timescale of decay over the length of the run, is that of the reference.
    timescale = batch / (run.optim.lr * run.optim.weight_decay * ratio)
    assert timescale == pytest.approx(2**19 / (6e-4 * 0.1), rel=1e-3)
    assert run.optim.weight_decay == decay


def test_keys_that_are_given_win() -> None:
    run = dialled(4, *LARGE, "optim.lr=1e-3", "data.global_batch=96", "model.kv_heads=2")
    assert (run.optim.lr, run.data.global_batch, run.model.kv_heads) == (1e-3, 96, 2)
    assert run.optim.steps == round(20 * run.model.matmul_params / (96 * 2048))  # of the batch that was given
    assert 96 % run.data.micro_batch == 0


def test_every_rank_has_a_part_of_the_batch() -> None:
    run = dialled(1, *LARGE, "parallel.dp=6", "parallel.strategy=fsdp2")
    assert run.data.global_batch % (6 * run.data.micro_batch) == 0


@pytest.mark.parametrize("dial", ["depth", "depth=0", "depth=x", "width=12", "depth=1000", "12"])
def test_wrong_dials(dial: str) -> None:
    with pytest.raises(SpecError, match=r"the dial is depth=N with N from 1 to 512, e\.g\. --dial depth=12"):
        dial_overrides("configs/tiny.toml", [], dial)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = lmworks(capsys, "plan", "configs/tiny.toml", "--dial", "depth=12", "--no-probe")
    assert code == 0, err
    assert "85,445,376 parameters" in out and err.startswith("--dial depth=12: model.layers=12 model.hidden=768 ")
    run = tmp_path / "run"
    small = ["data.seq=16", "data.global_batch=2", "optim.steps=1", "log.eval_batches=1"]
    code, out, err = lmworks(capsys, "train", "configs/tiny.toml", "--dial", "depth=1", *small, "--run-dir", str(run))
    assert code == 0, err
    kept = load_run(run)
    assert (kept.model.hidden, kept.model.mup_base_layers, kept.optim.steps) == (64, 12, 1)
