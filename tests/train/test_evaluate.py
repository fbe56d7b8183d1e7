"""Held-out loss is a mean over every held-out token, counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lmworks.data import TokenData
from lmworks.model import GPT
from lmworks.spec import CheckpointError, RunSpec
from lmworks.train.evaluate import evaluate, held_out
from lmworks.train.load_run import load_trained
from tiny import make_spec, train


def plainly(model: GPT, spec: RunSpec, windows: int | None = None) -> tuple[float, int]:
    """Window by window over the stored tokens, with whole logits, in float64 sums."""
    stored = TokenData.open(Path(spec.data.path), "val")
    tokens = torch.tensor(stored.read(0, len(stored)).astype("int64"))
    seq, total, count = spec.data.seq, 0.0, 0
    for start in range(0, len(tokens) - seq, seq)[:windows]:
        window = tokens[start : start + seq + 1]
        with torch.no_grad():
            logits = model(window[:-1].unsqueeze(0))
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
        count += seq
    return total / count, count


@pytest.mark.parametrize("micro_batch", [1, 3, 7, 1000])
def test_loss_equals_plain_loop_for_any_batch_size(dataset: Path, micro_batch: int) -> None:
    spec = make_spec(dataset, f"data.micro_batch={micro_batch}", "data.global_batch=0")
    model = GPT(spec.model, seed=1)
    batches = held_out(spec)
    assert batches.windows % 3 and batches.windows % 7, "the last batch should be a part of one"
    result = evaluate(model, batches, spec)
    loss, tokens = plainly(model, spec)
    assert result.tokens == tokens == batches.windows * 32
    assert result.loss == pytest.approx(loss, rel=1e-6)


def test_limit_uses_first_windows(dataset: Path) -> None:
    spec = make_spec(dataset)
    model = GPT(spec.model, seed=1)
    result = evaluate(model, held_out(spec), spec, limit=3)
    loss, tokens = plainly(model, spec, windows=3 * 2)
    assert (result.tokens, result.loss) == (tokens, pytest.approx(loss, rel=1e-6))
    whole = evaluate(model, held_out(spec), spec)
    assert evaluate(model, held_out(spec), spec, limit=10**6) == whole


def test_targets_in_next_document_are_ignored(dataset: Path) -> None:
    spec = make_spec(dataset, "data.document_mask=true")
    batches = held_out(spec)
    result = evaluate(GPT(spec.model, seed=1), batches, spec)
    val = TokenData.open(dataset, "val")
    ends = len(val.document_starts(1, batches.windows * 32 + 1))
    assert ends > 10 and result.tokens == batches.windows * 32 - ends


def test_evaluation_leaves_gradients_and_rng_unchanged(dataset: Path) -> None:
    spec = make_spec(dataset)
    model = GPT(spec.model, seed=1)
    state = torch.get_rng_state()
    evaluate(model, held_out(spec), spec, limit=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_load_trained_loads_requested_step(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "checkpoint.every=5", "checkpoint.keep=0", "log.eval_every=5", "log.eval_batches=0")
    trainer = train(spec, tmp_path / "run")
    recorded = {e["step"]: e["val_loss"] for e in trainer.folder.events() if e["kind"] == "eval"}
    assert sorted(recorded) == [5, 10, 12]
    for step, loss in recorded.items():
        trained = load_trained(tmp_path / "run", step)
        assert trained.step == step
        assert evaluate(trained.model, held_out(trained.spec), trained.spec).loss == loss
    assert load_trained(tmp_path / "run").step == 12
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; steps there: 12, 10, 5"):
        load_trained(tmp_path / "run", 7)
