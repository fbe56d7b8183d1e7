"""Post-training teaches: every stage of benchmarks/post_training_cpu.py, some minutes on two cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "post_training_cpu.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("learning")
    subprocess.run([sys.executable, SCRIPT, "--work", work], check=True)
    found: dict[str, Any] = json.loads((work / "result.json").read_text())
    return found


def test_sft_teaches_the_format_and_not_the_sums(result: dict[str, Any]) -> None:
    scores = result["scores"]
    assert scores["pretrain"]["format"] < 0.05
    assert scores["sft"]["format"] > 0.9
    assert scores["sft"]["verified"] < 0.3


def test_a_reward_model_knows_right_from_wrong_on_held_out_pairs(result: dict[str, Any]) -> None:
    assert result["reward_accuracy"] > 0.8


def test_dpo_raises_the_margin_and_wins_under_the_reward(result: dict[str, Any]) -> None:
    margins = result["curves"]["dpo"]["rewards/margins"]
    assert sum(margins[-5:]) / 5 > margins[0] + 0.5
    assert result["win_rate"]["dpo"] > 0.6
    assert result["scores"]["dpo"]["verified"] > result["scores"]["sft"]["verified"] + 0.1


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_reinforcement_learning_raises_the_verified_reward(result: dict[str, Any], method: str) -> None:
    assert result["scores"][method]["verified"] > 0.8
    assert max(result["curves"][method]["kl_answer"]) < 4.0  # nats of an answer
