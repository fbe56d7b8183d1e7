"""What cannot run is refused by one line, before a rank is started or a run folder is made."""

from __future__ import annotations

import pytest
import torch

from lmworks.parallel.precision import LossScale
from lmworks.parallel.world import join
from lmworks.spec import Cluster, ParallelSpec, PrecisionSpec, SpecError, TrainingError
from lmworks.train.device import pick_device


def test_too_few_ranks_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="needs 4 ranks, but 2 were started") as error:
        join(ParallelSpec(tp=4), torch.device("cpu"))
    assert error.value.agreed


def test_a_rank_without_gpu_is_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(Cluster()) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(TrainingError, match=r"there are 2; .* cluster\.device=cpu"):
        pick_device(Cluster())


def test_a_run_that_is_changed_to_fp16_starts_its_scale_anew() -> None:
    scale = LossScale(PrecisionSpec(dtype="fp16", loss_scale=512.0))
    scale.load_state_dict(LossScale(PrecisionSpec(dtype="bf16")).state_dict())
    assert scale.scale == 512
    scale.load_state_dict({"scale": 64.0, "good": 3})
    assert (scale.scale, scale.good) == (64, 3)
