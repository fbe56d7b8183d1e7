"""GRPO with its variants, RLOO and on-policy distillation against TRL's trainers: from samples to all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.trl
GROUP, LONGEST, TEMPERATURE = 4, 7, 0.8
PROMPTS = ["w1 w2 w3", "w9"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from trl_models import save_model

    root = tmp_path_factory.mktemp("models")
    return {"policy": save_model(root / "policy", 0), "reference": save_model(root / "reference", 1)}


def lengths(completions: list[str], **columns: Any) -> list[float | None]:
    """A reward that differs between answers; the second answer has none."""
    return [None if i == 1 else 0.1 * len(one) + 0.01 * (i % 3) for i, one in enumerate(completions)]


def make(method: str, folders: dict[str, Path], **options: Any) -> Any:
    """A trainer whose policy samples answers of up to 7 tokens."""
    import trl
    from datasets import Dataset
    from trl_models import ARGUMENTS, load, make_tokenizer

    config = getattr(trl, f"{method}Config")(
        output_dir=str(folders["policy"].parent / "runs"),
        per_device_train_batch_size=GROUP * len(PROMPTS),
        num_generations=GROUP,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        seed=5,
        **ARGUMENTS,
        **options,
    )
    trainer = getattr(trl, f"{method}Trainer")(
        model=str(folders["policy"]),
        reward_funcs=lengths,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=make_tokenizer(),
    )
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(load(folders["reference"]).state_dict())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def sample(trainer: Any) -> dict[str, Tensor]:
    torch.manual_seed(11)
    rows = [{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)]
    return trainer._generate_and_score_completions(rows)


def rewards_of(trainer: Any) -> Tensor:
    """What TRL's reward function returned for the batch; NaN for None."""
    (rewards,) = trainer._logs["rewards"].values()
    return torch.tensor(list(rewards))


def answer_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """At the positions that predict the answers' tokens."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    return model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]


def answer_logps(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the answers' tokens under the temperature that sampled them."""
    from lmworks.align import entropy, logprobs_from_logits

    logits = answer_logits(model, batch)
    return logprobs_from_logits(logits, batch["completion_ids"], TEMPERATURE), entropy(logits, TEMPERATURE)


def noise(like: Tensor, scale: float, seed: int) -> Tensor:
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [True, False])
def test_group_advantages(scale: bool, folders: dict[str, Path]) -> None:
    from lmworks.align import dynamic_sampling_mask, group_advantages

    trainer = make("GRPO", folders, scale_rewards="group" if scale else "none")
    batch = sample(trainer)
    rewards = rewards_of(trainer)
    assert rewards.isnan().sum() == 1 and len(set(rewards.tolist())) > 3
    torch.testing.assert_close(group_advantages(rewards, GROUP, scale), batch["advantages"], rtol=1e-5, atol=1e-5)
    assert dynamic_sampling_mask(rewards, GROUP).all()
    assert trainer._metrics["train"]["frac_reward_zero_std"][-1] == 0


def weights_from(old: Tensor, sampler: Tensor, cap: float) -> Tensor:
    return (old - sampler).exp().clamp(max=cap)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # TRL's options, ours
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "grpo"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "dapo", "clip_high": 0.28}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "dapo"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "dr_grpo", "max_length": LONGEST}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        {"ratio": "sequence", "clip": 3e-2, "clip_high": 4e-2},
    ),
    "kl": ({"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False}, {"beta": 0.2}),
    "unbiased_kl": ({"loss_type": "grpo", "beta": 0.2}, {"beta": 0.2, "kl_bias_correction": True}),
    "sampler": ({"loss_type": "dapo"}, {"aggregation": "dapo", "importance_cap": 1.1}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("off_policy", [False, True])
def test_grpo(name: str, off_policy: bool, folders: dict[str, Path]) -> None:
    from trl_models import assert_same, load

    from lmworks.align import grpo_loss

    trl_options, ours = VARIANTS[name]
    trainer = make("GRPO", folders, **({"beta": 0.0} | trl_options))
    batch = sample(trainer)
    policy, reference = load(folders["policy"]), load(folders["reference"])
    logps, entropies = answer_logps(policy, batch)
    mask, old = batch["completion_mask"], None
    if off_policy:
        old = batch["old_per_token_logps"] = logps.detach() + noise(logps, 0.3, 1)
    else:
        batch.pop("old_per_token_logps", None)
    options: dict[str, Any] = {"clip": 0.2, "entropies": entropies} | ours
    if "beta" in ours:
        options["ref_logps"] = answer_logps(reference, batch)[0]
    if name == "sampler":
        before = logps.detach() if old is None else old
        options["sampler_logps"] = before + noise(logps, 0.3, 2)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # as if it had sampled
        batch["importance_sampling_ratio"] = weights_from(before, options["sampler_logps"], 1.1)
    expected = trainer._compute_loss(trainer.model, batch)
    loss, metrics = grpo_loss(logps, old, batch["advantages"], mask, **options)
    assert_same(loss, policy, expected, trainer.model)
    logged = trainer._metrics["train"]
    seen = ["clip_ratio/low_mean", "clip_ratio/high_mean", "entropy", *(["kl"] if "beta" in ours else [])]
    if name == "gspo":  # TRL counts answers here, we count tokens
        seen = ["entropy"]
    for metric in seen:
        assert logged[metric][-1] == pytest.approx(metrics[metric].item(), rel=1e-4, abs=1e-6), metric
    assert off_policy == bool(metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"] > 0)


@pytest.mark.parametrize("off_policy", [False, True])
def test_rloo(off_policy: bool, folders: dict[str, Path]) -> None:
    """The KL penalty is part of the rewards, of whole answers."""
    from trl_models import assert_same, load

    from lmworks.align import kl_penalty, rloo_advantages, rloo_loss, sequence_logps

    trainer = make("RLOO", folders, beta=0.2)
    batch = sample(trainer)
    policy, reference = load(folders["policy"]), load(folders["reference"])
    logps, _ = answer_logps(policy, batch)
    mask = batch["completion_mask"]
    kl = sequence_logps(kl_penalty(logps, answer_logps(reference, batch)[0], "k1"), mask).detach()
    advantages = rloo_advantages(rewards_of(trainer) - 0.2 * kl, GROUP)
    torch.testing.assert_close(advantages, batch["advantages"], rtol=1e-4, atol=1e-5)
    old = logps.detach() + (noise(logps, 0.1, 1) if off_policy else 0)
    batch["old_logps"] = sequence_logps(old, mask)
    expected = trainer._compute_loss(trainer.model, batch)
    loss, metrics = rloo_loss(logps, old if off_policy else None, batch["advantages"], mask)
    assert_same(loss, policy, expected, trainer.model)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert trainer._metrics["train"][name][-1] == pytest.approx(metrics[name].item())


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)])
def test_on_policy_distillation(kind: Any, beta: float, folders: dict[str, Path]) -> None:
    """The student samples; its distributions and the teacher's are compared at the temperature of the samples."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer
    from trl_models import ARGUMENTS, assert_same, load, make_tokenizer

    from lmworks.align import distill_loss

    config = DistillationConfig(
        output_dir=str(folders["policy"].parent / "runs"),
        per_device_train_batch_size=len(PROMPTS),
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        beta=beta,
        **ARGUMENTS,
    )
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = DistillationTrainer(
        model=load(folders["policy"]),
        teacher_model=load(folders["reference"]),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )
    trainer.model.train()
    batch = trainer._prepare_inputs(rows)
    expected = trainer.compute_loss(trainer.model, batch)
    student, teacher = load(folders["policy"]), load(folders["reference"])
    logits = [answer_logits(model, batch) for model in (student, teacher)]
    loss, _ = distill_loss(*logits, batch["completion_mask"], kind, TEMPERATURE, beta)
    assert_same(loss, student, expected, trainer.model)


def test_overlong_punishment() -> None:
    from trl.rewards import get_soft_overlong_punishment

    from lmworks.align import overlong_penalty

    expected = get_soft_overlong_punishment(100, 20)([[1] * n for n in range(1, 130)])
    torch.testing.assert_close(overlong_penalty(torch.arange(1, 130), 100, 20), torch.tensor(expected))


def test_log_probabilities_and_entropies() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    from lmworks.align import entropy, logprobs_from_logits

    logits, tokens = noise(torch.zeros(2, 5, 50), 3.0, 3), torch.arange(10).view(2, 5)
    torch.testing.assert_close(logprobs_from_logits(logits, tokens, 0.7), selective_log_softmax(logits / 0.7, tokens))
    torch.testing.assert_close(entropy(logits), entropy_from_logits(logits))
