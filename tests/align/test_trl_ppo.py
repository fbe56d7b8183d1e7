"""PPO against TRL 1.12's trainer, the last with one: its `train` runs, and we compare at each of its backward passes.

TRL's arithmetic is inside `train`, so its tensors are read from there when it calls the backward pass: scores, rewards,
advantages, returns, both losses, and the gradients of policy and critic.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.trl
BATCH, TEMPERATURE, KL_COEF, VALUE_COEF = 8, 0.7, 0.2, 0.1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A vocabulary of 16, so that about half of the answers end by themselves."""
    from transformers import AutoModelForSequenceClassification as Scorer
    from trl_models import save_model

    root = tmp_path_factory.mktemp("models")
    heads = {"policy": None, "reference": None, "reward": Scorer, "critic": Scorer}
    return {
        name: save_model(root / name, seed, *([head] if head else []), vocab=16)
        for seed, (name, head) in enumerate(heads.items())
    }


class Comparison:
    """Called by TRL in place of its backward pass, with the loss; it compares, and then does the backward pass."""

    def __init__(self, trainer: Any, whiten: bool, kind: str) -> None:
        self.trainer, self.whiten, self.kind = trainer, whiten, kind
        self.backward = trainer.accelerator.backward
        self.clip_fractions: list[float] = []
        self.value_clip_fractions: list[float] = []
        trainer.accelerator.backward = self

    def __call__(self, loss: Tensor) -> None:
        from trl_models import assert_same_gradients, gradients

        trl = sys._getframe(1).f_locals
        if not self.clip_fractions:  # no update yet: the models are those that sampled and scored
            self.estimate(trl)
        rows = trl["micro_batch_inds"]
        ours = self.losses(trl, rows)
        assert ours["policy"].item() == pytest.approx(trl["pg_loss"].item(), rel=1e-5, abs=1e-6)
        assert ours["value"].item() == pytest.approx(trl["vf_loss"].item(), rel=1e-5)
        model = self.trainer.model
        found = gradients(ours["policy"] + VALUE_COEF * ours["value"], model)
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        assert_same_gradients(
            found, {name: grad for name, grad in zip(names, expected, strict=True) if grad is not None}
        )
        self.backward(loss)

    def forward(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the answers, and the critic's values before each of their tokens."""
        from trl.experimental.utils import get_reward
        from trl_models import PAD

        values, _, _ = get_reward(self.trainer.model.value_model, ids, PAD, start)
        return self.logps(self.trainer.model.policy, ids, start), values[:, start - 1 : -1].squeeze(-1)

    def logps(self, model: Any, ids: Tensor, start: int) -> Tensor:
        """Positions count from the first token that is no padding, on the left too."""
        from trl_models import PAD

        from lmworks.align import logprobs_from_logits

        attention = ids != PAD
        positions = attention.cumsum(1) - attention.long()
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        return logprobs_from_logits(logits[:, start - 1 : -1], ids[:, start:], TEMPERATURE)

    @torch.no_grad()
    def estimate(self, trl: dict[str, Any]) -> None:
        """TRL scores an answer at the position after its last token, so rewards and values have a mask of their own."""
        from trl.experimental.utils import get_reward
        from trl_models import EOS, PAD

        from lmworks.align import gae, masked_whiten, missing_eos_penalty, token_rewards

        ids, start = trl["query_responses"], trl["context_length"]
        self.mask, self.value_mask = ~trl["padding_mask"], ~trl["padding_mask_p1"]
        self.old_logps, self.old_values = self.forward(ids, start)
        ref_logps = self.logps(self.trainer.ref_model, ids, start)
        answers = trl["postprocessed_responses"]
        assert 0 < (answers == EOS).any(1).sum() < BATCH
        _, scores, _ = get_reward(self.trainer.reward_model, torch.cat([ids[:, :start], answers], 1), PAD, start)
        scores = missing_eos_penalty(scores, (answers == EOS).any(1), penalty=1.5)
        torch.testing.assert_close(scores, trl["scores"], rtol=1e-5, atol=1e-5)
        equal = [torch.where(self.mask, one, 0.0) for one in (self.old_logps, ref_logps)]
        rewards = token_rewards(scores, *equal, self.value_mask, KL_COEF, self.kind)  # type: ignore[arg-type]
        if self.whiten:
            rewards = masked_whiten(rewards, self.value_mask, shift_mean=False)
        torch.testing.assert_close(rewards, trl["rewards"], rtol=1e-5, atol=1e-5)
        advantages, self.returns = gae(rewards, self.old_values, self.value_mask, gamma=0.98, lam=0.95)
        self.advantages = masked_whiten(advantages, self.mask)
        torch.testing.assert_close(self.advantages, trl["advantages"], rtol=1e-5, atol=1e-5)
        expected = torch.where(self.value_mask, trl["returns"], 0.0)
        torch.testing.assert_close(self.returns, expected, rtol=1e-5, atol=1e-5)

    def losses(self, trl: dict[str, Any], rows: Any) -> dict[str, Tensor]:
        from lmworks.align import ppo_policy_loss, ppo_value_loss

        logps, values = self.forward(trl["query_responses"][rows], trl["context_length"])
        policy, seen = ppo_policy_loss(logps, self.old_logps[rows], self.advantages[rows], self.mask[rows], 0.2)
        value, seen_value = ppo_value_loss(
            values, self.old_values[rows], self.returns[rows], self.value_mask[rows], 0.2
        )
        self.clip_fractions.append((seen["clip_ratio/low_mean"] + seen["clip_ratio/high_mean"]).item())
        self.value_clip_fractions.append(seen_value["value/clip_ratio"].item())
        return {"policy": policy, "value": value}


@pytest.mark.parametrize(("whiten", "kind"), [(False, "k1"), (True, "k1"), (False, "k3")])
def test_ppo(whiten: bool, kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    from trl_models import ARGUMENTS, load, load_scorer, make_tokenizer

    config = PPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        total_episodes=BATCH,
        num_ppo_epochs=4,
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=9,
        stop_token="eos",
        temperature=TEMPERATURE,
        missing_eos_penalty=1.5,
        whiten_rewards=whiten,
        kl_coef=KL_COEF,
        kl_estimator=kind,
        vf_coef=VALUE_COEF,
        gamma=0.98,
        learning_rate=2e-3,
        save_strategy="no",
        **ARGUMENTS,
    )
    rows = [{"input_ids": [3 + (i + j) % 13 for j in range(2 + i % 3)]} for i in range(BATCH)]
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load(folders["policy"]),
        ref_model=load(folders["reference"]),
        reward_model=load_scorer(folders["reward"]),
        value_model=load_scorer(folders["critic"]),
        train_dataset=Dataset.from_list(rows),
    )
    logged: dict[str, float] = {}
    trainer.log = lambda metrics, *rest: logged.update(metrics)
    comparison = Comparison(trainer, whiten, kind)
    trainer.train()
    assert len(comparison.clip_fractions) == 4
    assert comparison.clip_fractions[0] == 0 < max(comparison.clip_fractions) and max(comparison.value_clip_fractions)
    assert logged["policy/clipfrac_avg"] == pytest.approx(sum(comparison.clip_fractions) / 4, rel=1e-5)
    assert logged["val/clipfrac_avg"] == pytest.approx(sum(comparison.value_clip_fractions) / 4, rel=1e-5)


def test_masked_statistics() -> None:
    from trl.experimental.ppo import ppo_trainer

    from lmworks.align import masked_mean, masked_var, masked_whiten

    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    torch.testing.assert_close(masked_mean(values, mask), ppo_trainer.masked_mean(values, mask))
    torch.testing.assert_close(masked_mean(values, mask, dim=1), ppo_trainer.masked_mean(values, mask, axis=1))
    for unbiased in (True, False):
        torch.testing.assert_close(masked_var(values, mask, unbiased), ppo_trainer.masked_var(values, mask, unbiased))
    for shift in (True, False):
        expected = ppo_trainer.masked_whiten(values, mask, shift_mean=shift)
        torch.testing.assert_close(masked_whiten(values, mask, shift)[mask], expected[mask])
