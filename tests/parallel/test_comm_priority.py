"""`parallel.comm_priority`: what process groups of NCCL are made with."""

from __future__ import annotations

import os

import pytest
import torch

from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.world import init_distributed
from lmworks.spec import ParallelSpec


def variable(rank: int, priority: str) -> str:
    init_distributed(ParallelSpec(dp=2, comm_priority=priority), torch.device("cpu"))
    return os.environ["TORCH_NCCL_HIGH_PRIORITY"]


@pytest.mark.parametrize(("priority", "expected"), [("high", "1"), ("normal", "0")])
def test_the_spec_decides(priority: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    assert on_ranks(2, variable, priority, group=False) == [expected] * 2
