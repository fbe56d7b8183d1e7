"""Losses over preferences against TRL's trainers: the loss of a batch, and the gradient of every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.trl
ROWS = [
    {"prompt": "w1 w2 w3", "chosen": " w4 w5 w6 w7", "rejected": " w8"},
    {"prompt": "w9", "chosen": " w10 w11", "rejected": " w12 w13 w14 w15 w16"},
    {"prompt": "w17 w18", "chosen": " w19", "rejected": " w20 w21"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import AutoModelForSequenceClassification
    from trl_models import save_model

    root = tmp_path_factory.mktemp("models")
    scorer = save_model(root / "scorer", 2, AutoModelForSequenceClassification)
    return {"policy": save_model(root / "policy", 0), "reference": save_model(root / "reference", 1), "scorer": scorer}


def make(trainer: type, config: type, folders: dict[str, Path], rows: list[dict[str, Any]], **options: Any) -> Any:
    from datasets import Dataset
    from trl_models import ARGUMENTS, load, load_scorer, make_tokenizer

    models: dict[str, Any] = {"model": load_scorer(folders["scorer"]) if "Reward" in trainer.__name__ else None}
    models["model"] = models["model"] or load(folders["policy"])
    if trainer.__name__ in ("DPOTrainer", "KTOTrainer"):
        models["ref_model"] = load(folders["reference"])
    arguments = config(
        output_dir=str(folders["policy"].parent / "runs"), per_device_train_batch_size=len(rows), **ARGUMENTS, **options
    )
    return trainer(**models, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer())


def first_batch(trainer: Any) -> dict[str, Tensor]:
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def answers(folder: Path, ids: Tensor, attention: Tensor, mask: Tensor, average: bool = False) -> tuple[Any, Tensor]:
    """The model, and the log-probability of each answer under it."""
    from trl_models import load, token_logps

    from lmworks.align import sequence_logps

    model = load(folder)
    return model, sequence_logps(token_logps(model, ids, attention), mask[:, 1:], average)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_and_ipo(loss_type: str, folders: dict[str, Path]) -> None:
    from trl import DPOConfig, DPOTrainer
    from trl_models import assert_same

    from lmworks.align import dpo_loss, ipo_loss

    trainer = make(DPOTrainer, DPOConfig, folders, ROWS, beta=0.3, loss_type=[loss_type])
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    inputs = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    policy, logps = answers(folders["policy"], *inputs, average=loss_type == "ipo")
    reference = answers(folders["reference"], *inputs, average=loss_type == "ipo")[1].detach()
    method = ipo_loss if loss_type == "ipo" else dpo_loss
    loss, metrics = method(*logps.chunk(2), *reference.chunk(2), 0.3)
    assert_same(loss, policy, expected, trainer.model)
    if loss_type == "sigmoid":
        for name, value in metrics.items():
            assert trainer._metrics["train"][name][-1] == pytest.approx(value.item(), rel=1e-4), name


def test_kto(folders: dict[str, Path]) -> None:
    from trl import KTOConfig, KTOTrainer
    from trl_models import assert_same

    from lmworks.align import kto_kl, kto_loss

    rows = [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row in ROWS
        for key in ("chosen", "rejected")
    ]
    trainer = make(KTOTrainer, KTOConfig, folders, rows, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    inputs = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    mismatched = batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"]
    policy, logps = answers(folders["policy"], *inputs)
    kl = kto_kl(answers(folders["policy"], *mismatched)[1], answers(folders["reference"], *mismatched)[1])
    reference = answers(folders["reference"], *inputs)[1].detach()
    loss, metrics = kto_loss(logps, reference, torch.as_tensor(batch["label"]), kl, 0.3, 1.3, 0.7)
    assert_same(loss, policy, expected, trainer.model)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl"):
        assert trainer._metrics["train"][name][-1] == pytest.approx(metrics[name].item(), rel=1e-4), name


def pair_batch(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and answer mask of TRL's CPO and ORPO batches: chosen answers, then rejected ones."""
    from torch.nn.functional import pad
    from trl_models import PAD

    width = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])

    def both(name: str, value: int) -> Tensor:
        tensors = [batch[f"{side}_{name}"] for side in ("chosen", "rejected")]
        return torch.cat([pad(one, (0, width - one.shape[1]), value=value) for one in tensors])

    return both("input_ids", PAD), both("attention_mask", 0), (both("labels", -100) != -100).long()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_simpo(label_smoothing: float, folders: dict[str, Path]) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl_models import assert_same

    from lmworks.align import simpo_loss

    options = {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.4, "cpo_alpha": 0.0, "max_length": 32}
    trainer = make(CPOTrainer, CPOConfig, folders, ROWS, label_smoothing=label_smoothing, **options)
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    policy, logps = answers(folders["policy"], *pair_batch(batch), average=True)
    loss, metrics = simpo_loss(*logps.chunk(2), 2.5, 1.4, label_smoothing)
    assert_same(loss, policy, expected, trainer.model)
    for name, value in metrics.items():
        assert trainer._stored_metrics["train"][name][-1] == pytest.approx(value.item(), rel=1e-4), name


def test_orpo(folders: dict[str, Path]) -> None:
    """TRL takes the likelihood of the chosen answers over prompt and answer."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    from trl_models import assert_same, load, token_logps

    from lmworks.align import orpo_loss, sequence_logps, sft_loss

    trainer = make(ORPOTrainer, ORPOConfig, folders, ROWS, beta=0.4, max_length=32)
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    ids, attention, mask = pair_batch(batch)
    policy = load(folders["policy"])
    tokens = token_logps(policy, ids, attention)
    nll, _ = sft_loss(tokens[: len(ROWS)], attention[: len(ROWS), 1:])
    loss, metrics = orpo_loss(*sequence_logps(tokens, mask[:, 1:], average=True).chunk(2), nll, 0.4)
    assert_same(loss, policy, expected, trainer.model)
    for name in ("rewards/chosen", "rewards/margins", "log_odds_chosen"):
        assert trainer._stored_metrics["train"][name][-1] == pytest.approx(metrics[name].item(), rel=1e-4), name


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_reward_model(center: float | None, with_margin: bool, folders: dict[str, Path]) -> None:
    from trl import RewardConfig, RewardTrainer
    from trl_models import assert_same, load_scorer

    from lmworks.align import reward_loss

    rows = [row | ({"margin": 0.5 * i} if with_margin else {}) for i, row in enumerate(ROWS)]
    trainer = make(RewardTrainer, RewardConfig, folders, rows, center_rewards_coefficient=center)
    batch = first_batch(trainer)
    margin = batch["margin"] if with_margin else 0.0
    expected = trainer.compute_loss(trainer.model, dict(batch))
    scorer = load_scorer(folders["scorer"])
    rewards = scorer(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    loss, metrics = reward_loss(*rewards.chunk(2), margin, center or 0.0)
    assert_same(loss, scorer, expected, trainer.model)
    assert trainer._metrics["train"]["accuracy"][-1] == pytest.approx(metrics["rewards/accuracies"].item())
    assert trainer._metrics["train"]["margin"][-1] == pytest.approx(metrics["rewards/margins"].item(), rel=1e-4)


def test_supervised(folders: dict[str, Path]) -> None:
    from trl import SFTConfig, SFTTrainer
    from trl_models import assert_same, load, token_logps

    from lmworks.align import sft_loss

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    trainer = make(SFTTrainer, SFTConfig, folders, rows)
    batch = first_batch(trainer)
    ids, labels = batch["input_ids"], batch["labels"]
    expected = trainer.compute_loss(trainer.model, dict(batch))
    policy = load(folders["policy"])
    logps = token_logps(policy, ids, batch.get("attention_mask", torch.ones_like(ids)))
    assert_same(sft_loss(logps, labels[:, 1:] != -100)[0], policy, expected, trainer.model)


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)])
def test_distillation(kind: Any, beta: float, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl_models import ARGUMENTS, assert_same, load, make_tokenizer

    from lmworks.align import distill_loss
    from lmworks.kernels.training import cross_entropy
    from lmworks.kernels.training.token_divergence import Teacher, linear_divergence

    turns = [[("user", row["prompt"]), ("assistant", row["chosen"])] for row in ROWS]
    rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in turns]
    from datasets import Dataset

    config = GKDConfig(
        output_dir=str(folders["policy"].parent / "runs"), beta=beta, per_device_train_batch_size=3, **ARGUMENTS
    )
    trainer = GKDTrainer(
        model=load(folders["policy"]),
        teacher_model=load(folders["reference"]),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )
    batch = first_batch(trainer)
    expected = trainer.compute_loss(trainer.model, batch)
    policy, teacher = load(folders["policy"]), load(folders["reference"])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    mask, student_logits = batch["labels"][:, 1:] != -100, policy(**inputs).logits[:, :-1]
    teacher_logits = teacher(**inputs).logits[:, :-1].detach()
    loss, _ = distill_loss(student_logits, teacher_logits, mask, kind, jsd_beta=beta)
    assert_same(loss, policy, expected, trainer.model)
    # As the trainer computes it, from hidden states and heads, a few tokens at a time.
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 4 * 5 * student_logits.shape[-1])
    own, states = load(folders["policy"]), teacher.model(**inputs).last_hidden_state[:, :-1].detach()
    head = Teacher(states, teacher.lm_head.weight.detach(), kind=kind, jsd_beta=beta)
    hidden = own.model(**inputs).last_hidden_state[:, :-1]
    found = linear_divergence(hidden, own.lm_head.weight, batch["labels"][:, 1:], head)
    trainer.model.zero_grad()
    assert_same(found.loss / mask.sum(), own, trainer.compute_loss(trainer.model, batch), trainer.model)
    warm = trainer.generalized_jsd_loss(student_logits, teacher_logits, batch["labels"][:, 1:], beta, temperature=2.0)
    again = distill_loss(student_logits, teacher_logits, mask, kind, 2.0, beta)[0]
    assert again.item() == pytest.approx(warm.item(), rel=1e-5)
