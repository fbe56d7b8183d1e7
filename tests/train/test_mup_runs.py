"""Runs under μP: rates of the trainer's groups, resume, export, the engine, adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmworks import LLM, SamplingParams
from lmworks.model import GPT, Sampling, generate
from lmworks.spec import RunSpec
from lmworks.train import Trainer
from lmworks.train.export import export
from tiny import Crash, before_step, built, crash, curve, differences, make_spec, resume, saved, train

MUP = ("model.parametrization=mup", "model.mup_base_hidden=8", "model.mup_base_layers=1", "model.layers=2")


def spec_of(data: Path, *overrides: str) -> RunSpec:
    return make_spec(data, *MUP, "optim.steps=4", "checkpoint.every=2", *overrides)


def test_a_run_resumes_bitwise_and_is_served_as_it_is(dataset: Path, tmp_path: Path) -> None:
    """Rates follow from the spec, so a checkpoint needs no more than before; the exported model is the same network."""
    whole = train(spec_of(dataset), tmp_path / "whole")
    rates = {name: group["lr_scale"] for group in whole.optimizer.param_groups for name in names(whole, group)}
    assert rates["embed.weight"] == 1 and rates["norm.weight"] == 1 / 4
    assert (rates["blocks.1.mlp.up.weight"], rates["blocks.1.mlp.down.weight"]) == (1 / 4, 1 / 8)

    stopped = Trainer(spec_of(dataset), tmp_path / "stopped", quiet=True)
    before_step(stopped, 3, crash)
    with pytest.raises(Crash):
        stopped.run()
    resume(tmp_path / "stopped")
    assert curve(tmp_path / "stopped") == curve(tmp_path / "whole")
    assert differences(saved(tmp_path / "stopped"), saved(tmp_path / "whole")) == []

    export(tmp_path / "whole", tmp_path / "hf")
    tokens = torch.arange(1, 9)[None]
    model = GPT.from_hf(tmp_path / "hf")
    assert model.spec.parametrization == "mup" and model.spec.mup_base_hidden == 8
    torch.testing.assert_close(model(tokens), whole.model(tokens))
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for source in (tmp_path / "whole", tmp_path / "hf"):
        (answer,) = LLM(source, dtype="fp32").generate([tokens[0].tolist()], greedy, progress=False)
        assert answer.token_ids == generate(model, tokens, 6, Sampling(temperature=0))[0, 8:].tolist()


def names(trainer: Trainer, group: dict[str, object]) -> list[str]:
    leaves = group["params"]
    assert isinstance(leaves, list)
    return [shard.name for shard in trainer.parallel_model.shards if any(shard.leaf is leaf for leaf in leaves)]


def test_adapters_learn_at_the_rate_that_is_given(dataset: Path, tmp_path: Path) -> None:
    trainer = built(spec_of(dataset, "lora.rank=2"), tmp_path / "run")
    assert {group["lr_scale"] for group in trainer.optimizer.param_groups} == {1.0}
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.1}
