"""Answers of several turns: what counts of them, token by token, in every place that reads an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.align import gae
from lmworks.align.post_trainer import trainer_class
from lmworks.align.ppo import set_token_advantages
from lmworks.align.reward_scorer import RewardScorer
from lmworks.align.rollouts import Rollout, by_answer, load_round, packed_batch, save_round
from lmworks.align.rounds import sampler_mismatch
from lmworks.data import Batch
from lmworks.data.loader import IGNORED
from lmworks.model.reward_stats import RewardStats
from lmworks.spec import AlignSpec
from post_training import make_spec, write_lines


def two_turns() -> Rollout:
    """Prompt 1 2 3; the policy writes 50 51, the environment 52 53, the policy 54."""
    return Rollout(0, [1, 2, 3], [50, 51, 52, 53, 54], [-1.0, -2.0, 0.0, 0.0, -3.0], "", True, mask=[1, 1, 0, 0, 1])


def test_observations_are_read_and_not_trained() -> None:
    one_turn = Rollout(1, [7], [60, 61], [-1.0, -1.0], "", True)
    batch = packed_batch([[two_turns(), one_turn]], seq=12, pad=9)
    assert batch.tokens[0].tolist() == [1, 2, 3, 50, 51, 52, 53, 54, 7, 60, 61, 9]
    targets = [IGNORED, IGNORED, 50, 51, IGNORED, IGNORED, 54, IGNORED, 60, 61, IGNORED, IGNORED]
    assert batch.targets[0].tolist() == targets
    assert batch.extras["mask"].tolist() == [[True, True, False, False, True], [True, True, False, False, False]]
    assert batch.count() == 5
    numbers = torch.arange(100, 112).float()[None]  # of every position, as a model's log-probabilities
    assert by_answer(numbers, batch).tolist() == [[102, 103, 0, 0, 106], [108, 109, 0, 0, 0]]


def test_the_mask_is_kept_with_the_round(tmp_path: Path) -> None:
    one = two_turns()
    one.reward = 0.5
    one.messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    save_round(tmp_path / "round.npz", 3, [one, Rollout(1, [7], [60], [-1.0], "", True)])
    back, plain = load_round(tmp_path / "round.npz")
    assert back == one and plain.mask == [1]


def test_advantages_pass_over_observations() -> None:
    """Those of the sampled tokens are the same as without the observation."""
    spec = AlignSpec(method="ppo", whiten_advantages=False)
    one = two_turns()
    one.old_logps, one.ref_logps = [-1.0, -2.0, 0.0, 0.0, -3.0], [-1.5, -2.5, 0.0, 0.0, -2.0]
    one.values, one.reward = [0.1, 0.2, 0.0, 0.0, 0.3], 1.0
    set_token_advantages([one], spec, kl_coef=0.1)
    rewards = torch.tensor([[-0.05, -0.05, 0.1 + 1.0]])
    want, returns = gae(rewards, torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3), spec.gamma, spec.lam)
    assert one.advantages is not None and one.returns is not None
    kept = [0, 1, 4]
    torch.testing.assert_close(torch.tensor(one.advantages)[kept], want[0])
    torch.testing.assert_close(torch.tensor(one.returns)[kept], returns[0])
    assert one.advantages[2:4] == one.returns[2:4] == [0.0, 0.0]


def test_a_reward_model_reads_the_last_token_that_was_sampled() -> None:
    class Positions:  # gives every position its own number
        mesh = None

        def forward(self, batch: Batch) -> torch.Tensor:
            return torch.arange(batch.tokens.numel()).view(batch.tokens.shape).float()

    scorer = RewardScorer.__new__(RewardScorer)
    scorer.model, scorer.stats = Positions(), RewardStats(0.0, 1.0)  # type: ignore[assignment]
    rollouts = [Rollout(1, [7], [60, 61], [-1.0, -1.0], "", True), two_turns()]
    assert scorer.score(rollouts, lambda them: [(packed_batch([them], 12, 9), [0, 1])]) == [2.0, 10.0]


def test_differences_to_the_sampler_are_of_sampled_tokens() -> None:
    one = two_turns()
    one.old_logps = [-1.0, -2.0, 9.0, 9.0, -3.3]
    found = sampler_mismatch([one])
    assert found["sampler_diff/max"] == pytest.approx(0.3) and found["sampler_diff/mean"] == pytest.approx(0.1)


def test_rewards_get_messages_where_the_prompt_is_messages(tmp_path: Path) -> None:
    """As TRL passes them: a conversational prompt has a list of messages as its completion, a text a text."""
    prompts = [[{"role": "user", "content": "2+2="}], "2+2=", [{"role": "user", "content": "3+3="}], "3+3="]
    path = write_lines(tmp_path / "grpo.jsonl", [{"prompt": one} for one in prompts])
    (tmp_path / "seen.py").write_text(SEEN)
    spec = make_spec(tmp_path, "grpo", f"align.rewards=['{tmp_path / 'seen.py'}:seen']", f"data.val_path={path}")
    trainer = trainer_class(spec)(spec, tmp_path / "run", quiet=True)
    trainer.build()
    trainer.batches_at(0)
    for rollout in trainer.rounds.rollouts:  # type: ignore[attr-defined]
        assert rollout.reward == 1.0


SEEN = """
def seen(prompt, completion):
    if isinstance(prompt, str):
        return float(isinstance(completion, str))
    (message,) = completion
    return float(message["role"] == "assistant" and isinstance(message["content"], str))
"""
