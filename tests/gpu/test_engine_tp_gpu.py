"""Two ranks that share every layer of a model on one GPU: the same answers as transformers.

All but the collectives (`one_card`) is as on two: processes, shares of the weights, Triton's kernels, steps that are
read one behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import one_card
from test_engine_tp import compare_two_ranks, each_way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def one_card_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    one_card.arrange(monkeypatch.setattr)


@pytest.mark.usefixtures("one_card_for_two")
@each_way
def test_equal_to_transformers(family: str, speculate: str, tmp_path: Path) -> None:
    assert compare_two_ranks(family, speculate, tmp_path, "cuda") <= 1
