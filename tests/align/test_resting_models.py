"""Models that rest in host memory: the same numbers as without, and memory that is really given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.residency import HostOffload
from lmworks.model import GPT
from lmworks.record import read_metrics
from lmworks.spec import SpecError
from lmworks.train.rank_memory import storage_bytes
from post_training import make_spec
from tiny import differences, saved


def test_memory_is_given_back_and_returns_with_its_numbers() -> None:
    whole = torch.arange(10.0)
    tensors = [whole, whole[2:5], torch.ones(3, dtype=torch.bfloat16), torch.zeros(())]
    expected = [tensor.clone() for tensor in tensors]
    rest = HostOffload(lambda: tensors, torch.device("cpu"), frozen=False)
    rest.release()
    rest.release()  # nothing is left to give back
    assert storage_bytes(tensors) == 0
    rest.restore()
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, expected, strict=True))
    whole += 1
    assert torch.equal(tensors[1], expected[1] + 1)  # still a view
    rest.release()
    rest.restore()
    assert torch.equal(whole, expected[0] + 1)


def four_models(folder: Path, *overrides: str) -> list[str]:
    judge = folder / "judge"
    if not judge.exists():
        GPT(make_spec(folder, "ppo").model.replace(scalar_head=True), seed=3).save_hf(judge)
    return [f"align.reward_model={judge}", *overrides]


RUNS = {"ppo": ["align.kl_horizon=20"], "ppo over one base": ["lora.rank=3"], "grpo": ["align.beta=0.1"]}


@pytest.mark.parametrize("run", ["ppo", *(pytest.param(run, marks=pytest.mark.slow) for run in list(RUNS)[1:])])
def test_runs_end_with_the_same_bits(run: str, tmp_path: Path) -> None:
    """And so does one that is resumed between the two steps of a round."""
    method = run.partition(" ")[0]
    options = [*RUNS[run], "checkpoint.every=1", "checkpoint.keep=0", "optim.warmup=0", "optim.schedule=constant"]
    options = four_models(tmp_path, *options, "log.eval_every=3", "data.val_fraction=0.2")
    ends = {}
    for offload in ("none", "resting"):
        spec = make_spec(tmp_path, method, *options, f"align.offload={offload}")
        trainer_class(spec)(spec, tmp_path / offload, quiet=True).run()
        ends[offload] = tmp_path / offload
    short = make_spec(tmp_path, method, *options, "align.offload=resting", "optim.steps=3")
    trainer_class(short)(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "resting" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    others = ("critic", "critic_optim") if method == "ppo" else ()
    expected = saved(ends["none"], 4, *others)
    for name in ("resting", "short"):
        assert not differences(expected, saved(tmp_path / name, 4, *others)), name
    keys = ("loss", "value/loss", "reward/mean", "val_loss")
    rows = [[[row.get(key) for key in keys] for row in read_metrics(ends[name] / "metrics.jsonl")] for name in ends]
    assert rows[0] == rows[1]


def test_what_cannot_rest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"align\.offload = 'resting': align\.method = 'dpo' has no phases to rest in"):
        make_spec(tmp_path, "dpo", "align.offload=resting")
    with pytest.raises(SpecError, match=r"does not combine with parallel\.offload = 'optimizer'"):
        make_spec(tmp_path, "ppo", "align.offload=resting", "parallel.offload=optimizer")
