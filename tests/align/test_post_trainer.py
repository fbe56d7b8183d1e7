"""A step of each method that learns from given answers: gradients against plain functions over whole logits, layouts
against one rank, a resumed run against one that never stopped."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.align import dpo_loss, ipo_loss, kto_loss, orpo_loss, reward_loss, simpo_loss
from lmworks.align.post_trainer import PostTrainer, trainer_class
from lmworks.data.loader import IGNORED, Batch
from lmworks.model import GPT
from lmworks.prove.parity import parity
from lmworks.record import read_metrics
from lmworks.spec import RunSpec, SpecError
from lmworks.spec.layouts import choose
from lmworks.spec.load import apply_overrides
from lmworks.train import Trainer
from lmworks.train.evaluate import evaluate, held_out
from lmworks.train.load_run import load_trained
from post_training import make_spec, table, write_pairs
from tiny import differences, saved
from variations import with_slow

METHODS = ("sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward")


def reference_folder(spec: RunSpec, folder: Path) -> Path:
    """Other weights than those the run starts from: else every ratio is 1 and its gradient hides mistakes."""
    GPT(spec.model.replace(scalar_head=False), seed=9).save_hf(folder)
    return folder


def built(spec: RunSpec, run: Path) -> PostTrainer:
    trainer = trainer_class(spec)(spec, run, quiet=True)
    assert isinstance(trainer, PostTrainer)
    trainer.build()
    return trainer


def gradients(trainer: PostTrainer) -> tuple[float, dict[str, Tensor]]:
    batches = trainer.batches.at(0)
    counts = trainer.count(batches)
    sums = trainer.forward_backward(batches, counts)
    leaves = {shard.name: shard.leaf for shard in trainer.parallel_model.shards}
    return float(sums[0]) / counts.units, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def plain_logps(model: GPT, batch: Batch) -> Tensor:
    """By torch's own cross-entropy over whole logits, row by row."""
    rows = []
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        logits = model(tokens.unsqueeze(0))
        rows.append(-F.cross_entropy(logits[0], targets, ignore_index=IGNORED, reduction="none"))
    return torch.stack(rows)


def answers(model: GPT, batch: Batch, average: bool = False) -> Tensor:
    logps, mask = plain_logps(model, batch), batch.targets != IGNORED
    sums = (logps * mask).sum(1)
    return sums / mask.sum(1) if average else sums


def plain_loss(spec: RunSpec, model: GPT, reference: GPT, batches: list[Batch]) -> Tensor:
    """Of the global batch at once, as its paper has it."""
    align, method = spec.align, spec.align.method
    average = method in ("ipo", "simpo", "orpo")
    if method == "reward":
        values = [model(batch.tokens) for batch in batches]
        ends = [(batch.tokens != 256).sum(1) for batch in batches]  # answers end with end-of-text, as padding is
        last = [value.gather(1, end.unsqueeze(1)).squeeze(1) for value, end in zip(values, ends, strict=True)]
        chosen, rejected = (torch.cat(half) for half in zip(*(one.chunk(2) for one in last), strict=True))
        return reward_loss(chosen, rejected)[0]
    own = [answers(model, batch, average).chunk(2) for batch in batches]
    chosen, rejected = (torch.cat(half) for half in zip(*own, strict=True))
    if method == "simpo":
        return simpo_loss(chosen, rejected, align.beta, align.simpo_margin)[0]
    if method == "orpo":
        logps = torch.cat([plain_logps(model, batch).chunk(2)[0].flatten() for batch in batches])
        mask = torch.cat([(batch.targets != IGNORED).chunk(2)[0].flatten() for batch in batches])
        return orpo_loss(chosen, rejected, -logps[mask].mean(), align.beta)[0]
    with torch.no_grad():
        theirs = [answers(reference, batch, average).chunk(2) for batch in batches]
        ref_chosen, ref_rejected = (torch.cat(half) for half in zip(*theirs, strict=True))
    if method == "kto":  # the second half are prompts with answers of others
        labels = torch.cat([batch.extras["label"] for batch in batches])
        kl = (rejected - ref_rejected).mean().clamp(min=0).detach()
        return kto_loss(chosen, ref_chosen, labels, kl, align.beta)[0]
    loss = ipo_loss if method == "ipo" else dpo_loss
    return loss(chosen, rejected, ref_chosen, ref_rejected, align.beta)[0]


@pytest.mark.parametrize("method", METHODS[1:])
def test_gradients_of_a_step_equal_those_of_the_whole_batch(method: str, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, method)
    folder = reference_folder(spec, tmp_path / "reference")
    spec = make_spec(tmp_path, method, f"align.reference={folder}")
    trainer = built(spec, tmp_path / "run")
    loss, grads = gradients(trainer)
    model, batches = GPT(spec.model, seed=spec.seed), trainer.batches.at(0)
    want = plain_loss(spec, model, GPT.from_hf(folder), batches)
    want.backward()
    assert loss == pytest.approx(float(want.detach()), rel=2e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_the_first_loss_of_dpo_is_log_2(tmp_path: Path) -> None:
    trainer = built(make_spec(tmp_path, "dpo"), tmp_path / "run")
    loss, _ = gradients(trainer)
    assert loss == pytest.approx(0.6931472, abs=1e-6)
    assert trainer.objective.metrics(None)["rewards/margins"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("sft", "tp2-sp,pp2-1f1b-fsdp2"),
        pytest.param("dpo", "fsdp2", marks=pytest.mark.slow),
        pytest.param("dpo", "tp2,zero-1", marks=pytest.mark.slow),
        pytest.param("reward", "tp2-sp", marks=pytest.mark.slow),  # as with adapters, below
    ],
)
def test_layouts_give_the_gradients_of_one_rank(method: str, names: str, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, method)
    given = table(tmp_path / f"{method}.jsonl", method)
    given["align"] |= {"reference": str(reference_folder(spec, tmp_path / "reference"))} if method == "dpo" else {}
    with parity({**given, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        results = [proof.prove(layout) for layout in choose(names)]
    assert [result.failure for result in results if not result.ok] == []
    assert all(result.tokens > 0 for result in results)


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("dpo", "fsdp2"),
        pytest.param("reward", "tp2-sp", marks=pytest.mark.slow),
        pytest.param("dpo", "tp2", marks=pytest.mark.slow),
        pytest.param("ipo", "ddp", marks=pytest.mark.slow),
        pytest.param("reward", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_adapters_over_layouts(method: str, layout: str, tmp_path: Path) -> None:
    """The reference is the base; the scalar head of a reward model is trained with the adapter."""
    make_spec(tmp_path, method)
    given = table(tmp_path / f"{method}.jsonl", method)
    with parity({**given, "lora": {"rank": 3}, "optim": {"optimizer": "sgd", "lr": 0.1}}, quick=True) as proof:
        (chosen,) = choose(layout)
        result = proof.prove(chosen)
    assert result.ok, result.failure


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "zero-1", "zero-2"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_under_every_strategy(method: str, layout: str, tmp_path: Path) -> None:
    test_layouts_give_the_gradients_of_one_rank(method, layout, tmp_path)


@pytest.mark.parametrize("method", with_slow(["dpo", "kto"], ["kto"]))
def test_the_reference_of_an_adapter_is_its_base(method: str, tmp_path: Path) -> None:
    """As if the base had been loaded a second time."""
    base = reference_folder(make_spec(tmp_path, method), tmp_path / "base")
    losses = []
    for name, reference in (("shared", ""), ("loaded", str(base))):
        changes = ["lora.rank=4", f"checkpoint.init={base}", f"align.reference={reference}", "data.tokenizer=bytes"]
        spec = make_spec(tmp_path, method, *changes)
        trainer_class(spec)(spec, tmp_path / name, quiet=True).run()
        losses.append([row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[0][-1] - losses[0][0]) > 5e-4


@pytest.mark.parametrize("method", with_slow(["dpo", "kto"], ["dpo"]))
def test_a_resumed_run_ends_as_one_that_never_stopped(method: str, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, method)
    whole = trainer_class(spec)(spec, tmp_path / "whole", quiet=True)
    whole.run()
    half = spec.replace(optim=spec.optim.replace(steps=2))
    trainer_class(half)(half, tmp_path / "half", quiet=True).run()
    (tmp_path / "half" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    PostTrainer.resume(tmp_path / "half", quiet=True).run()
    assert not differences(saved(tmp_path / "whole", 4), saved(tmp_path / "half", 4))
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "half")]
    assert losses[0][2:] == losses[1][2:]


def test_the_loss_of_kto_does_not_depend_on_the_micro_batch(tmp_path: Path) -> None:
    folder = reference_folder(make_spec(tmp_path, "kto"), tmp_path / "reference")
    losses = {}
    for size in (1, 2, 8):
        spec = make_spec(tmp_path, "kto", f"align.reference={folder}", f"data.micro_batch={size}")
        trainer = built(spec, tmp_path / f"run-{size}")
        losses[size], _ = gradients(trainer)
        assert trainer.objective.kl > 0.01  # the estimate counts  # type: ignore[attr-defined]
    assert losses[1] == pytest.approx(losses[2], rel=1e-6) == pytest.approx(losses[8], rel=1e-6)


def test_held_out_metrics_are_recorded(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "dpo", "optim.steps=2", "log.eval_every=1", "data.val_fraction=0.2")
    result = trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"rewards/accuracies", "val_rewards/accuracies", "val_rewards/margins"} <= rows[-1].keys()
    assert result.metrics["rewards/margins"] == rows[-1]["val_rewards/margins"]


def test_the_calibration_of_a_reward_model_is_that_of_its_held_out_pairs(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path,
        "reward",
        "optim.steps=3",
        "data.val_fraction=0.3",
        "log.eval_batches=0",
        "optim.lr=0.05",
        "data.micro_batch=4",
    )
    trainer = trainer_class(spec)(spec, tmp_path / "run", quiet=True)
    trainer.run()
    model, probabilities = load_trained(tmp_path / "run").model, []
    batches = held_out(spec)
    assert batches.windows % 4  # the last micro-batch is a smaller one
    for index in range(-(-batches.windows // 4)):
        batch = batches.held_out_batch(index)
        ends = (batch.tokens != 256).sum(1, keepdim=True)
        chosen, rejected = model(batch.tokens).gather(1, ends).squeeze(1).chunk(2)
        probabilities += (chosen - rejected).sigmoid().tolist()
    confidence = torch.tensor([max(one, 1 - one) for one in probabilities])
    right = torch.tensor([one > 0.5 for one in probabilities]).float()
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    edges = [0.5, 0.6, 0.7, 0.8, 0.9, 1.01]
    filled = 0
    for number, (low, high) in enumerate(pairwise(edges)):
        inside = (confidence >= low) & (confidence < high)
        assert row[f"val_calibration/share_{number}"] == pytest.approx(float(inside.float().mean()))
        if not inside.any():
            assert row[f"val_calibration/accuracy_{number}"] is None
            continue
        filled += 1
        assert row[f"val_calibration/confidence_{number}"] == pytest.approx(float(confidence[inside].mean()), rel=1e-5)
        assert row[f"val_calibration/accuracy_{number}"] == pytest.approx(float(right[inside].mean()))
    assert filled > 1 and not any(key.startswith("calibration/") for key in row)


def test_pretraining_has_the_plain_trainer(tmp_path: Path) -> None:
    assert trainer_class(RunSpec()) is Trainer


@pytest.mark.parametrize(
    ("method", "override", "message"),
    [
        ("grpo", "align.critic=folder", "align.critic is of ppo: align.method = 'grpo' does not use it"),
        ("grpo", "align.teacher=folder", "align.teacher is of distill: align.method = 'grpo' does not use it"),
        ("ppo", "align.on_policy=true", "align.on_policy is of distill: align.method = 'ppo' does not use it"),
        ("dpo", "align.rewards=['exact']", "distill with align.on_policy: align.method = 'dpo' does not use it"),
        ("sft", "align.environment=python", "align.method = 'sft' does not use it"),
        ("distill", "align.reward_model=folder", "align.method = 'distill' does not use it"),
        ("distill", "align.held_out_stop=2", "align.method = 'distill' does not use it"),
        ("kto", "align.kl_stop=1", "align.kl_stop is of grpo, dr_grpo, dapo, gspo, rloo, ppo: align.method = 'kto'"),
        ("dpo", "align.partial_rollouts=0.5", "align.method = 'dpo' does not use it"),
        ("", "align.engine_tp=2", "pretraining (align.method is empty) does not use it"),
    ],
)
def test_keys_of_other_methods_are_refused(method: str, override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        make_spec(tmp_path, method or "sft", f"align.method={method}", override)


@pytest.mark.parametrize("override", ["align.rollout_ranks=1", "align.offload=resting"])
def test_pretraining_has_no_rounds(override: str) -> None:
    with pytest.raises(SpecError, match=r"pretraining \(align\.method is empty\)"):
        RunSpec.from_dict(apply_overrides({}, [override]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pp=2", "data.micro_batch=2"], "use parallel.pp = 1"),
        (["data.kind=conversations"], "needs 'preferences'"),
        (["align.method=dpos"], "align.method = 'dpos' is not one of"),
        (["parallel.engine=deepspeed"], "parallel.engine = 'native'"),
        (["align.method=kto", "data.global_batch=1", "data.micro_batch=1"], "kto compares prompts with each other's"),
    ],
)
def test_wrong_combinations_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "dpo.jsonl")
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        make_spec(tmp_path, "dpo", *overrides)


def test_the_held_out_loss_of_a_finished_run_is_measured_again(tmp_path: Path) -> None:
    """What `lmworks eval RUN` does, on examples as on tokens."""
    spec = make_spec(tmp_path, "sft", "optim.steps=2", "data.val_fraction=0.3")
    result = trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    trained = load_trained(tmp_path / "run")
    again = evaluate(trained.model, held_out(trained.spec), trained.spec, spec.log.eval_batches)
    assert again.tokens == result.tokens and again.loss == pytest.approx(result.loss, rel=1e-6)
