"""Distillation as a method of the trainer: gradients against `distill_loss` over whole logits, layouts against one
rank, answers of the student's own, a resumed run against one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.align import distill_loss
from lmworks.align.distill_objective import check_padding
from lmworks.align.frozen_model import load_frozen
from lmworks.align.model_folders import check_tokens
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import PostTrainer, trainer_class
from lmworks.data.chat_tokenizer import load_model_tokenizer
from lmworks.data.loader import IGNORED, Batch
from lmworks.data.tokenizer import train_bpe
from lmworks.model import GPT
from lmworks.prove.parity import parity
from lmworks.record import read_metrics
from lmworks.spec import RunSpec, SpecError
from lmworks.spec.layouts import choose
from post_training import make_spec, table, write_prompts, write_teacher
from tiny import differences, saved
from variations import with_slow

ONLINE = ["align.on_policy=true", "align.prompts=4", "align.samples=2", "align.max_tokens=8"]
EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=16"]


def built(spec: RunSpec, run: Path) -> PostTrainer:
    trainer = trainer_class(spec)(spec, run, quiet=True)
    assert isinstance(trainer, PostTrainer)
    trainer.build()
    return trainer


def online_spec(folder: Path, *overrides: str) -> RunSpec:
    write_prompts(folder / "distill.jsonl")
    return make_spec(folder, "distill", *ONLINE, *overrides)


def loss_and_gradients(trainer: PostTrainer, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    counts = trainer.count(batches)
    sums = trainer.forward_backward(batches, counts)
    leaves = {shard.name: shard.leaf for shard in trainer.parallel_model.shards}
    return float(sums[0]) / counts.units, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def whole_loss(spec: RunSpec, model: GPT, teacher: GPT, batches: list[Batch]) -> Tensor:
    """Of the global batch at once, over all logits."""
    logits, theirs, masks = [], [], []
    for batch in batches:
        logits.append(model(batch.tokens, documents=batch.documents))
        theirs.append(teacher(batch.tokens, documents=batch.documents))
        masks.append(batch.targets != IGNORED)
    align, kind = spec.align, spec.align.divergence
    tables = (torch.cat(logits), torch.cat(theirs), torch.cat(masks))
    return distill_loss(*tables, kind, align.temperature, align.jsd_beta)[0]  # type: ignore[arg-type]


def assert_equal_gradients(spec: RunSpec, trainer: PostTrainer, batches: list[Batch]) -> None:
    loss, grads = loss_and_gradients(trainer, batches)
    model, teacher = GPT(spec.model, seed=spec.seed), GPT.from_hf(Path(spec.align.teacher))
    want = whole_loss(spec, model, teacher, batches)
    want.backward()
    assert loss == pytest.approx(float(want.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ["align.divergence=forward"],
        ["align.divergence=reverse", "align.temperature=2.0"],
        ["align.divergence=jsd", "align.jsd_beta=0.3", "model.tie_embeddings=false"],
        ["align.divergence=reverse", *EXPERTS, "model.balance_loss=0.0"],
    ],
    ids=["forward", "reverse", "jsd", "experts"],
)
def test_gradients_of_a_step_equal_those_over_whole_logits(overrides: list[str], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "distill", *overrides)
    trainer = built(spec, tmp_path / "run")
    batches = trainer.batches.at(0)
    assert all(batch.documents is not None for batch in batches)  # packed, as for SFT
    assert_equal_gradients(spec, trainer, batches)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    GPT(make_spec(tmp_path, "sft").model, seed=0).save_hf(tmp_path / "teacher")
    trainer = built(make_spec(tmp_path, "distill"), tmp_path / "run")
    loss, grads = loss_and_gradients(trainer, trainer.batches.at(0))
    assert abs(loss) < 1e-6 and max(float(grad.abs().max()) for grad in grads.values()) < 1e-6
    assert trainer.objective.metrics(None)["top1_agreement"] == 1


def test_a_teacher_that_the_layout_cannot_shard_is_named(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher", heads=3, kv_heads=3)
    spec = make_spec(tmp_path, "distill", "parallel.tp=2")
    with pytest.raises(SpecError, match=r"align\.teacher = .*teacher': parallel\.tp = 2"):
        load_frozen(spec, spec.align.teacher, "align.teacher", None, torch.device("cpu"))


def prove(tmp_path: Path, layout: str, **sections: Any) -> None:
    """`sections` change the spec."""
    if not (tmp_path / "distill.jsonl").exists():
        make_spec(tmp_path, "distill")
    given = table(tmp_path / "distill.jsonl", "distill")
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    given["optim"] = {"optimizer": "sgd", "lr": 0.1}
    with parity(given, quick=True) as proof:
        (chosen,) = choose(layout)
        result = proof.prove(chosen)
    assert result.ok, result.failure
    assert result.tokens > 0


@pytest.mark.parametrize(
    "layout",
    with_slow(["fsdp2", "tp2", "ddp", "zero-1", "zero-2", "tp2-sp"], ["fsdp2", "ddp", "zero-1", "zero-2", "tp2-sp"]),
)
def test_layouts_give_the_gradients_of_one_rank(layout: str, tmp_path: Path) -> None:
    prove(tmp_path, layout, align={"divergence": "jsd"})


@pytest.mark.slow
def test_adapters_over_layouts(tmp_path: Path) -> None:
    prove(tmp_path, "fsdp2", lora={"rank": 3})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2-sp"])
def test_own_answers_over_layouts(layout: str, tmp_path: Path) -> None:
    """All steps are of one round, whose answers come from the same weights under every layout."""
    write_prompts(tmp_path / "distill.jsonl")
    online = {"on_policy": True, "prompts": 4, "samples": 2, "max_tokens": 8, "epochs": 5, "divergence": "reverse"}
    prove(tmp_path, layout, align=online)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "ep2-fsdp2"])
def test_experts_over_layouts(layout: str, tmp_path: Path) -> None:
    """Under expert parallelism too the teacher is dense."""
    prove(tmp_path, layout, model={"experts": 4, "top_k": 2, "expert_ffn": 16})


def test_answers_of_the_student(tmp_path: Path) -> None:
    """The divergence at the tokens of sampled answers, whose log-probabilities are those of the engine."""
    spec = online_spec(tmp_path, "data.val_fraction=0.2", "align.divergence=reverse")
    trainer = built(spec, tmp_path / "run")
    assert isinstance(trainer, OnlineTrainer)
    batches = trainer.rounds.take(0, 1)
    answers = [rollout.token_ids for rollout in trainer.rounds.rollouts]
    assert sum(batch.count() for batch in batches) == sum(map(len, answers))
    assert_equal_gradients(spec, trainer, batches)
    found = trainer.objective.metrics(None)
    assert found["sampler_diff/max"] < 1e-5
    held_out = trainer.measure_held_out()
    assert held_out.loss > 0 and held_out.unit == "token" and "divergence" in held_out.metrics


def test_only_tokens_of_the_weights_at_hand_are_compared_with_the_sampler(tmp_path: Path) -> None:
    """An answer that goes on in a later round began with older weights."""
    spec = online_spec(tmp_path, "align.partial_rollouts=4")
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4 and max(row["sampler_diff/max"] for row in rows) < 1e-5


def test_the_mean_distance_from_the_sampler_is_over_the_tokens_that_are_compared(tmp_path: Path) -> None:
    """One fresh token of the first micro-batch is a nat off; all tokens of the others are fresh, and equal."""
    trainer = built(online_spec(tmp_path, "align.samples=4", "data.global_batch=16"), tmp_path / "run")
    assert isinstance(trainer, OnlineTrainer)
    first, *others = trainer.rounds.take(0, 1)
    compared = 1 + sum(int(batch.extras["mask"].sum()) for batch in others)
    assert first.count() > 1 and compared > 1
    fresh = torch.zeros_like(first.extras["mask"], dtype=torch.bool)
    fresh[tuple(first.extras["mask"].nonzero()[0])] = True
    first.extras["fresh"] = fresh
    first.extras["sampler_logps"] += 1.0
    loss_and_gradients(trainer, [first, *others])
    assert trainer.objective.metrics(None)["sampler_diff/mean"] == pytest.approx(1 / compared, abs=1e-5)


@pytest.mark.parametrize("online", with_slow([False, True], [False]))
def test_a_resumed_run_ends_as_one_that_never_stopped(online: bool, tmp_path: Path) -> None:
    """The online run stops inside of a round of two steps."""
    options = ["optim.schedule=constant", "checkpoint.every=1"]
    spec = online_spec(tmp_path, "align.samples=4", *options) if online else make_spec(tmp_path, "distill", *options)
    whole = trainer_class(spec)(spec, tmp_path / "whole", quiet=True)
    whole.run()
    half = spec.replace(optim=spec.optim.replace(steps=2 + online))
    trainer_class(half)(half, tmp_path / "half", quiet=True).run()
    (tmp_path / "half" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    trainer_class(spec).resume(tmp_path / "half", quiet=True).run()
    assert not differences(saved(tmp_path / "whole", 4), saved(tmp_path / "half", 4))
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "half")]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_adapters_learn_from_a_teacher_and_nothing_else_changes(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "distill", "lora.rank=4", "align.divergence=reverse", "optim.steps=6")
    trainer = built(spec, tmp_path / "run")
    before = {name: weight.clone() for name, weight in trainer.parallel_model.parts[0].named_parameters()}
    trainer.run()
    after = dict(trainer.parallel_model.parts[0].named_parameters())
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed and all("lora" in name for name in changed)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    again = make_spec(tmp_path, "distill", f"align.teacher={tmp_path / 'run'}")
    with pytest.raises(SpecError, match="has adapters over another model; name what `lmworks checkpoint export"):
        trainer_class(again)(again, tmp_path / "again", quiet=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["align.teacher="], r"needs a teacher: align\.teacher=FOLDER"),
        (["parallel.pp=2", "data.micro_batch=2"], r"use parallel\.pp = 1"),
        (["data.kind=prompts"], "needs 'conversations'"),
        (["align.on_policy=true", "data.kind=conversations"], "needs 'prompts'"),
    ],
)
def test_wrong_combinations_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, "distill", *overrides)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"vocab": 300}, r"align\.teacher = .* has other tokens than the student \(vocabularies of 300 and 258\)"),
        ({"context": 32}, r"align\.teacher = .* has a context of 32 tokens, fewer than data\.seq = 64"),
        ({"scalar_head": True, "tie_embeddings": True}, r"align\.teacher = .* is a reward model"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(shape: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher", **shape)
    spec = make_spec(tmp_path, "distill")
    with pytest.raises(SpecError, match=message):
        trainer_class(spec)(spec, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def write_tokenizer(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(train_bpe([text], 300))
    return folder


@pytest.mark.parametrize(("padded", "tp"), [(258 + 64, 1), (258 + 64, 2), (258, 1)])
def test_tokens_are_compared_and_padding_is_not(padded: int, tp: int, tmp_path: Path) -> None:
    """Vocabularies that differ in padding are refused only where tensor parallelism would cut them differently."""
    teacher = write_teacher(tmp_path / "teacher", vocab=320)
    own = load_model_tokenizer(write_tokenizer(tmp_path / "own", "low lower lowest " * 9))
    spec = make_spec(tmp_path, "distill", f"model.vocab={padded}", f"parallel.tp={tp}")
    write_tokenizer(teacher, "new newer newest " * 9)
    with pytest.raises(SpecError, match="has other tokens than the student"):
        check_tokens(spec, own)
    write_tokenizer(teacher, "low lower lowest " * 9)
    assert 258 < own.vocab_size < 320
    if padded < own.vocab_size:
        with pytest.raises(SpecError, match="has other tokens than the student"):
            check_tokens(spec, own)
        return
    check_tokens(spec, own)
    if tp > 1:
        with pytest.raises(SpecError, match=r"pads its vocabulary to 320, the student to 322.*use parallel\.tp = 1"):
            check_padding(spec)
    else:
        check_padding(spec)
