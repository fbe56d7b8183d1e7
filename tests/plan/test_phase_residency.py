"""Bytes that every rank really holds on its device in every phase of PPO, against the planner's: four models, four over
one base, and both with models that rest in host memory; on one, two and four ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.checkpoint.save_plan import make_plan
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.memory.host_need import host_need
from lmworks.plan.memory.phases import Update, phase_sheet
from lmworks.plan.passes import (
    CRITIC,
    GENERATE,
    POLICY,
    REFERENCE,
    REWARD,
    SAVE,
    SCORE,
    UPDATE,
    UPDATE_CRITIC,
)
from lmworks.spec import RunSpec
from lmworks.train.rank_memory import held_parameters, storage_bytes, train_one_step
from lmworks.train.rng import rng_state
from post_training import make_spec

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "ddp": (2, ["parallel.dp=2"]),
    "fsdp2": (2, ["parallel.dp=2", "parallel.strategy=fsdp2"]),
    "zero-1": (2, ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"]),
    "tp": (2, ["parallel.tp=2"]),
    "tp-fsdp2": (4, ["parallel.tp=2", "parallel.dp=2", "parallel.strategy=fsdp2"]),
    "fsdp2 of 4": (4, ["parallel.dp=4", "parallel.strategy=fsdp2", "data.micro_batch=1"]),
}
VARIANTS: dict[str, list[str]] = {
    "four models": ["align.reward_model=judge"],
    "one base": ["lora.rank=3", "align.reward_model=adapter"],
    "four models, offloaded": ["align.reward_model=judge", "align.offload=resting"],
    "one base, offloaded": ["lora.rank=3", "align.reward_model=adapter", "align.offload=resting"],
}
QUICK = [*((variant, "one rank") for variant in list(VARIANTS)[:3]), ("one base, offloaded", "fsdp2")]
ALL = [(variant, layout) for variant in VARIANTS for layout in LAYOUTS]

HOST = "host"  # bytes in host memory, instead of a phase
Measured = dict[tuple[str, str], int]  # by phase and model


def prepare(_rank: int, folder: Path) -> None:
    """Reward models: a whole one, with fewer layers than the policy, and an adapter over the policy's base."""
    GPT(make_spec(folder, "ppo").model.replace(scalar_head=True, layers=1), seed=3).save_hf(folder / "judge")
    spec = make_spec(folder, "reward", "lora.rank=2", "optim.steps=1")
    trainer_class(spec)(spec, folder / "adapter", quiet=True).run()


def on_device(trainer: OnlineTrainer) -> int:
    """Storages of all models, optimizer states, and the engine."""
    critic, engine = trainer.critic, trainer.rollout_engine
    assert critic is not None
    models = [trainer.parallel_model, critic.parallel_model, *trainer.frozen.values()]
    states = [state for stepper in (trainer, critic) for state in stepper.optimizer.state.values()]
    tensors = [p for model in models for p in held_parameters(model)]
    tensors += [value for state in states for value in state.values()]
    own = sum(s.tensor.nbytes for n, slots in engine.weights.slots.items() if n not in engine.shared for s in slots)
    return storage_bytes(tensors) + storage_bytes([engine.runner.cache.store]) + own


def watch(trainer: OnlineTrainer, found: Measured) -> None:
    """Measure where each phase does its work."""
    rounds, critic = trainer.rounds, trainer.critic
    assert critic is not None and rounds.reward_model is not None

    def measured(phase: str, model: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            found[phase, model] = on_device(trainer)
            return call(*arguments)

        return wrapped

    scoring, compute = {"old_logps": POLICY, "ref_logps": REFERENCE, "values": CRITIC}, rounds.set_token_values

    def set_token_values(name: str, forward: Any) -> None:
        compute(name, measured(SCORE, scoring[name], forward))

    rounds.set_token_values = set_token_values  # type: ignore[method-assign]
    engine, judge = trainer.rollout_engine, rounds.reward_model
    engine.generate = measured(GENERATE, POLICY, engine.generate)  # type: ignore[method-assign]
    judge.model.forward = measured(GENERATE, REWARD, judge.model.forward)  # type: ignore[method-assign]
    trainer.optimizer.register_step_pre_hook(measured(UPDATE, POLICY, lambda *_: None))
    critic.optimizer.register_step_pre_hook(measured(UPDATE_CRITIC, CRITIC, lambda *_: None))


def measure(_rank: int, specs: dict[str, RunSpec], folder: Path) -> dict[str, Measured]:
    """Of the second round: optimizer states come with the first."""
    by_name: dict[str, Measured] = {}
    for name, spec in specs.items():
        trainer = trainer_class(spec)(spec, folder / name, quiet=True, force=True)
        assert isinstance(trainer, OnlineTrainer)
        trainer.build()
        train_one_step(trainer)
        watch(trainer, by_name.setdefault(name, {}))
        train_one_step(trainer)
        state = trainer.train_state.state_dict()
        if spec.align.offload == "resting":
            by_name[name][SAVE, POLICY] = on_device(trainer)
        buffers = [rest.buffer for rest in trainer.residency.parts.values()]
        by_name[name][HOST, "resting"] = sum(buffer.numel() for buffer in buffers if buffer is not None)
        by_name[name][HOST, "staging"] = make_plan({**state, "rng": rng_state()}).bytes
    return by_name


@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_rank_holds_in_every_phase_what_is_planned(
    cases: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    on_ranks(1, prepare, tmp_path, launched=False)
    specs: dict[str, RunSpec] = {}
    for variant, layout in cases:
        options = [option.replace("reward_model=", f"reward_model={tmp_path}/") for option in VARIANTS[variant]]
        more = [*options, *LAYOUTS[layout][1], "align.critic_head=normal", "data.global_batch=16"]
        specs[f"{variant}, {layout}"] = make_spec(tmp_path, "ppo", *more)
    highest: dict[str, int] = {}
    for ranks in (1, 2, 4):
        mine = {name: spec for name, spec in specs.items() if spec.parallel.world == ranks}
        records = on_ranks(ranks, measure, mine, tmp_path, launched=ranks > 1) if mine else []
        for name, spec in mine.items():
            for rank, record in enumerate(records):
                sheet = phase_sheet(spec, dict.fromkeys((POLICY, CRITIC), Update(0, 0)), None, rank)
                planned = {(row.phase, model): row.resting for row in sheet.phases for model in row.runs}
                real = record[name]
                asynchronous = spec.replace(checkpoint=spec.checkpoint.replace(asynchronous=True))
                away = host_need(asynchronous, rank, "cpu")
                assert real.pop((HOST, "resting")) == away.resting == sheet.host, name
                staged = real.pop((HOST, "staging"))  # of what several ranks hold, one writes all
                assert ranks > 1 or staged == away.staging, name
                assert real == {place: planned[place] for place in real}, (name, rank)
                assert real.keys() >= {(GENERATE, REWARD), (SCORE, REFERENCE), (UPDATE, POLICY)}, name
            highest[name] = max(records[0][name].values())
    # What it is for: four models over one base, or models that rest, take less.
    assert highest["one base, one rank"] < 0.6 * highest["four models, one rank"]
    assert highest["four models, offloaded, one rank"] < 0.7 * highest["four models, one rank"]
