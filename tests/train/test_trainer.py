"""The trainer against plain PyTorch: same losses, same gradients, same weights, and metrics that mean what they say."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.data import Batches
from lmworks.model import GPT
from lmworks.plan.flops import model_flops_per_token
from lmworks.record import read_metrics
from lmworks.spec import RunSpec, SpecError
from lmworks.train import Trainer, device
from lmworks.train.health.bad_step import HealthIssue, StepRejected
from lmworks.train.optim import learning_rate
from tiny import before_step, built, curve, differences, events, live, make_spec, saved, steps_of, train
from variations import with_slow

LLAMA: tuple[str, ...] = ()
GPT2 = (
    "model.kv_heads=2", "model.norm=layer", "model.positions=learned", "model.mlp=gelu", "model.bias=true",
    "model.tie_embeddings=true",
)  # fmt: skip
UNEVEN = ("data.document_mask=true", "data.global_batch=4")  # documents end inside windows: those targets do not count


# --- against a loop written by hand --------------------------------------------------------------------


def plain_loop(model: Any, spec: RunSpec) -> list[float]:
    """What a careful person writes over a Hugging Face model: whole batch, whole logits, unfused AdamW."""
    optim = spec.optim
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, foreach=False, fused=False)
    whole = Batches(spec.data.replace(micro_batch=spec.data.global_batch), seed=spec.seed)
    losses = []
    for step in range(optim.steps):
        (batch,) = whole.at(step)
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optim, step)
        adamw.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_losses_and_weights_equal_hugging_face_loop(dataset: Path, tmp_path: Path, family: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    spec = make_spec(dataset, "model.layers=2", "optim.steps=8", "optim.clip=0.5", "seed=3", *family)
    GPT(spec.model, seed=3).save_hf(tmp_path / "start")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    expected = plain_loop(theirs, spec)

    ours = train(spec, tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(ours.folder.metrics_path)]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.5  # it did learn: the comparison is not one of two idle loops
    ours.model.save_hf(tmp_path / "end")
    ended = AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype=torch.float32).state_dict()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(
            ended[name], weight, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- accumulation --------------------------------------------------------------------------------------


def spy_on_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Filled with the gradients as the next optimizer step finds them."""
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.optimizer.register_step_pre_hook(look)
    return seen


def one_step(spec: RunSpec, run_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    trainer = built(spec, run_dir)
    gradients = spy_on_gradients(trainer)
    (values,) = steps_of(trainer, 1)
    return values, gradients


def used_by_adam(spec: RunSpec, run_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The gradients of a first step as the optimizer had them: its first moment is (1 - beta1) of each."""
    trainer = built(spec, run_dir)
    (values,) = steps_of(trainer, 1)
    moments = {s.name: trainer.optimizer.state[s.leaf]["exp_avg"] for s in trainer.parallel_model.shards}
    return values, {name: moment / (1 - spec.optim.beta1) for name, moment in moments.items()}


def whole_batch(spec: RunSpec) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Loss and gradients of the global batch as one mean over its tokens, and the tokens of each row."""
    model = GPT(spec.model, seed=spec.seed)
    (batch,) = Batches(spec.data.replace(micro_batch=spec.data.global_batch), seed=spec.seed).at(0)
    _, loss = model(batch.tokens, batch.targets, documents=batch.documents)
    loss.backward()
    counts = (batch.targets != -100).sum(dim=1).tolist()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, counts


def test_uneven_micro_batches_are_weighted_by_tokens(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "optim.clip=0", *UNEVEN)
    loss, gradients, counts = whole_batch(spec)
    assert len(set(counts)) > 1, "the rows must differ in tokens, or a mean of means would pass too"
    for micro_batch in (1, 2, 4):
        same = spec.replace(data=spec.data.replace(micro_batch=micro_batch))
        values, ours = one_step(same, tmp_path / f"by-{micro_batch}")
        assert values["tokens"] == sum(counts)
        assert values["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert ours.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (ours[name] - gradient).norm() / gradient.norm()
            assert error <= 1e-6, f"{name}, micro-batch {micro_batch}: {error:.1e}"


def test_mean_of_means_differs(dataset: Path) -> None:
    """The test above has the power to tell: on this batch, the classic mistake is off by far more than 1e-6."""
    spec = make_spec(dataset, *UNEVEN)
    loss, gradients, _ = whole_batch(spec)
    model = GPT(spec.model, seed=spec.seed)
    rows = Batches(spec.data.replace(micro_batch=1), seed=spec.seed).at(0)
    losses = [model(row.tokens, row.targets, documents=row.documents)[1] for row in rows]
    mistaken = torch.stack(losses).mean()
    mistaken.backward()
    wrong = model.blocks["0"].attention.q.weight.grad  # type: ignore[union-attr]
    right = gradients["blocks.0.attention.q.weight"]
    assert abs(mistaken - loss) / loss > 1e-5
    assert (wrong - right).norm() / right.norm() > 1e-3  # type: ignore[operator]


# --- clipping ------------------------------------------------------------------------------------------


def test_recorded_norm_is_before_clipping(dataset: Path, tmp_path: Path) -> None:
    free, raw = one_step(make_spec(dataset, "optim.clip=0"), tmp_path / "free")
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in raw.values()))
    assert free["grad_norm"] == pytest.approx(norm, rel=1e-6)

    limit = norm / 10
    bound, clipped = used_by_adam(make_spec(dataset, f"optim.clip={limit}"), tmp_path / "bound")
    assert bound["grad_norm"] == free["grad_norm"]
    for name, gradient in raw.items():
        torch.testing.assert_close(clipped[name], gradient * (limit / norm), rtol=1e-5, atol=1e-9)

    _, without = used_by_adam(make_spec(dataset, "optim.clip=0"), tmp_path / "none")
    _, untouched = used_by_adam(make_spec(dataset, f"optim.clip={norm * 10}"), tmp_path / "wide")
    assert differences(untouched, without) == []


# --- recompute, compile, workers: nothing but speed and memory may change -----------------------------


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_is_bitwise_equal(dataset: Path, tmp_path: Path, recompute: str) -> None:
    spec = make_spec(dataset, "model.layers=2", "optim.steps=4")
    kept = train(spec, tmp_path / "kept")
    again = train(spec.replace(parallel=spec.parallel.replace(recompute=recompute)), tmp_path / "again")
    assert curve(again.folder.path) == curve(kept.folder.path)
    assert differences(live(again), live(kept)) == []


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "optim.steps=3", "optim.lr=1e-3", "data.micro_batch=4", "log.eval_batches=0")
    eager = built(spec, tmp_path / "eager")
    compiled = built(spec.replace(parallel=spec.parallel.replace(compile=True)), tmp_path / "compiled")
    for ours, theirs in zip(steps_of(compiled, 3), steps_of(eager, 3), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for name, weight in live(eager).items():
        torch.testing.assert_close(live(compiled)[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", with_slow(["true", "false"], ["false"]))
def test_data_workers_are_bitwise_equal(dataset: Path, tmp_path: Path, mask: str) -> None:
    runs = {workers: tmp_path / f"by-{workers}" for workers in (0, 2)}
    for workers, run_dir in runs.items():
        train(make_spec(dataset, f"data.workers={workers}", f"data.document_mask={mask}"), run_dir)
    assert curve(runs[2]) == curve(runs[0])
    assert differences(saved(runs[2]), saved(runs[0])) == []


# --- precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_close_to_fp32(dataset: Path, tmp_path: Path, dtype: str) -> None:
    exact = train(make_spec(dataset, "optim.steps=6"), tmp_path / "fp32")
    half = train(make_spec(dataset, "optim.steps=6", f"precision.dtype={dtype}"), tmp_path / dtype)
    theirs, ours = ([line[1] for line in curve(t.folder.path)] for t in (exact, half))
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours != theirs
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


# --- what is written down ------------------------------------------------------------------------------


def test_expert_load_is_recorded_and_balanced_by_bias(dataset: Path, tmp_path: Path) -> None:
    moe = ("model.experts=4", "model.top_k=1", "optim.steps=40", "optim.lr=1e-5", "optim.warmup=0")
    loads = {}
    for rate in (0, 0.01):
        trainer = train(make_spec(dataset, *moe, f"model.balance_bias={rate}"), tmp_path / f"bias-{rate}")
        lines = [json.loads(line) for line in trainer.folder.metrics_path.read_text().splitlines()]
        loads[rate] = [line["expert_load"] for line in lines]
    assert loads[0][0] == loads[0.01][0] > 1  # 1 is even, 4 is one expert for all
    assert sum(loads[0.01][-5:]) < 0.9 * sum(loads[0][-5:])


def test_metrics_keys_of_every_step(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "log.eval_every=5", "checkpoint.every=4", "optim.schedule=wsd")
    trainer = train(spec, tmp_path / "run")
    lines = [json.loads(line) for line in trainer.folder.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    whole = {"step": int, "attempt": int, "tokens": int, "memory_bytes": int}
    real = ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_s", "forward_backward_s", "optimizer_s")
    for line in lines:
        assert {key: type(line[key]) for key in whole} == whole
        assert {key: type(line[key]) for key in real} == dict.fromkeys(real, float)
        assert line["mfu"] is None  # the peak of a CPU is not known, and none is made up
        assert line["lr"] == learning_rate(spec.optim, line["step"] - 1)
        assert line["tokens"] == 4 * 32
        assert line["tokens_per_s"] == pytest.approx(4 * 32 / line["step_s"])
        flops = model_flops_per_token(spec.model, 32) * line["tokens_per_s"]
        assert line["model_tflops"] == pytest.approx(flops / 1e12)
        parts = line["data_s"] + line["forward_backward_s"] + line["optimizer_s"]
        assert 0 < parts <= line["step_s"]
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 12]
    assert [line["step"] for line in lines if line["checkpoint_s"] > 0] == [5, 9]  # the step after a save
    assert [event["step"] for event in events(trainer.folder.path, "save")] == [4, 8, 12]
    first, *_, end = trainer.folder.events()
    assert (first["kind"], first["step"], first["attempt"]) == ("start", 0, 0) and "time" in first
    assert (end["kind"], end["step"]) == ("finish", 12)


def test_first_loss_is_log_vocab(dataset: Path, tmp_path: Path) -> None:
    trainer = train(make_spec(dataset, "optim.steps=2"), tmp_path / "run")
    assert curve(trainer.folder.path)[0][1] == pytest.approx(math.log(320), abs=0.05)


def test_targets_in_the_next_document_are_not_counted_as_tokens(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *UNEVEN)
    trainer = train(spec, tmp_path / "run")
    for line in read_metrics(trainer.folder.metrics_path):
        micro_batches = Batches(spec.data, seed=spec.seed).at(line["step"] - 1)
        assert line["tokens"] == sum(int((batch.targets != -100).sum()) for batch in micro_batches) < 128


def test_mfu_is_model_flops_over_peak(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_spec(dataset, "optim.steps=2"), tmp_path / "run", quiet=True)
    trainer.peak_flops = 1e12
    trainer.run()
    for line in read_metrics(trainer.folder.metrics_path):
        assert line["mfu"] == pytest.approx(line["model_tflops"])


def test_run_does_not_depend_on_earlier_process_state(dataset: Path, tmp_path: Path) -> None:
    import random

    import numpy as np

    spec = make_spec(dataset)
    train(spec, tmp_path / "first")
    random.random(), np.random.rand(), torch.rand(3)
    train(spec, tmp_path / "second")
    assert curve(tmp_path / "first") == curve(tmp_path / "second")
    assert differences(saved(tmp_path / "first"), saved(tmp_path / "second")) == []


def test_seed_changes_run(dataset: Path, tmp_path: Path) -> None:
    train(make_spec(dataset, "optim.steps=2"), tmp_path / "zero")
    train(make_spec(dataset, "optim.steps=2", "seed=1"), tmp_path / "one")
    assert {line[1] for line in curve(tmp_path / "zero")}.isdisjoint(line[1] for line in curve(tmp_path / "one"))


# --- what is refused before anything is made -----------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.vocab=128"], "model.vocab = 128 is less than the tokenizer's 257 tokens"),
        (["parallel.dp=2"], "this layout needs 2 ranks"),
        (["cluster.device=cuda"], "cluster.device = 'cuda'"),
    ],
)
def test_failed_start_leaves_no_folder(dataset: Path, tmp_path: Path, overrides: list[str], named: str) -> None:
    if torch.cuda.is_available() and "cuda" in named:
        pytest.skip("there is a CUDA device")
    with pytest.raises(Exception, match=named):
        Trainer(make_spec(dataset, *overrides), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_missing_prediction_is_reported(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise SpecError("memory of this layout is not predicted yet")

    monkeypatch.setattr("lmworks.train.trainer.predict", fail)
    Trainer(make_spec(dataset), tmp_path / "run")
    prediction = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert prediction["notes"] == ["memory of this layout is not predicted yet"]
    assert "memory_bytes" not in prediction


def test_unexpected_error_is_recorded_as_failure(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_spec(dataset), tmp_path / "run", quiet=True)

    def fail() -> None:
        raise RuntimeError("no kernel image is available")

    before_step(trainer, 3, fail)
    with pytest.raises(RuntimeError):
        trainer.run()
    (event,) = events(tmp_path / "run", "fail")
    assert event["step"] == 2 and event["error"] == "no kernel image is available"


@pytest.mark.parametrize(
    ("dtype", "supported", "lines"), [("bf16", False, 1), ("fp8", False, 1), ("bf16", True, 0), ("fp32", False, 0)]
)
def test_emulated_bf16_prints_one_line(
    dtype: str,
    supported: bool,
    lines: int,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """PyTorch's own warning is a C++ stack of 25 lines."""
    monkeypatch.setattr(device, "has_bf16", lambda: supported)
    trainer = Trainer(make_spec(dataset, f"precision.dtype={dtype}", "cluster.device=cpu"), tmp_path / "run")
    with warnings.catch_warnings(record=True) as seen:
        trainer.build()
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:\nframe #0", stacklevel=1)
    assert any("mkldnn_matmul" in str(each.message) for each in seen) == (not lines)
    said = capfd.readouterr().err
    assert said.count("\n") == lines, said
    assert not lines or said.startswith("this CPU has no bf16 instructions: ")


def test_a_rewind_at_the_last_step_is_trained_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(dataset, "optim.steps=4", "checkpoint.every=2", "health.rewind_steps=1", "optim.warmup=0")
    trainer = Trainer(spec, tmp_path / "run", quiet=True)
    rejected = []

    def check(*_: Any) -> None:
        if trainer.step == 4 and not rejected:
            rejected.append(trainer.step)
            raise StepRejected(HealthIssue("nonfinite", "rewind", "a weight is NaN", taken=True))

    monkeypatch.setattr("lmworks.train.trainer.check_state", check)
    trainer.run()
    assert rejected and trainer.step == 4
    assert 4 in [event["step"] for event in trainer.folder.events() if event["kind"] == "save"]


def test_a_run_resumed_with_fewer_steps_than_it_has_taken_ends(dataset: Path, tmp_path: Path) -> None:
    Trainer(make_spec(dataset, "optim.steps=4", "optim.warmup=0"), tmp_path / "run", quiet=True).run()
    path = tmp_path / "run" / "spec.toml"
    path.write_text(path.read_text().replace("steps = 4", "steps = 3"))
    trainer = Trainer.resume(tmp_path / "run", quiet=True)
    trainer.run()
    assert trainer.step == 4
