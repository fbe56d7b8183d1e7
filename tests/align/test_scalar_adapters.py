"""PPO with four models over one base: policy, critic and reward model are adapters, the reference is the base alone.
Compared with four whole networks that have the same weights, over layouts, and with a run that was resumed."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.align import ppo_policy_loss, ppo_value_loss
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollouts import Rollout
from lmworks.model import GPT
from lmworks.model.lora import merged_weight
from lmworks.model.reward_stats import read_stats
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import read_metrics
from lmworks.spec import RunSpec, SpecError
from lmworks.train.export import export
from lmworks.train.step import Stepper
from post_training import built_online, make_spec
from tiny import differences, saved
from variations import with_slow

EXPERTS = ["model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.shared_experts=1"]
SHAPES: dict[str, list[str]] = {"dense": [], "experts": EXPERTS}
REWARD = ("optim.steps=3", "lora.rank=2", 'lora.targets=["attention"]', "data.val_fraction=0.2")
PPO = ("lora.rank=3", "align.critic_head=normal", "align.value_clip=0.1", "data.global_batch=16", "optim.warmup=0")


trained: dict[tuple[str, ...], Path] = {}


def train_reward(folder: Path, *overrides: str, name: str = "reward") -> Path:
    """A reward model as an adapter of other options than the policy's."""
    if overrides not in trained:
        home = Path(tempfile.mkdtemp(dir=folder.parent))  # as long as the folders of all tests
        spec = make_spec(home, "reward", *REWARD, *overrides)
        trainer_class(spec)(spec, home / "reward", quiet=True).run()
        trained[overrides] = home / "reward"
    shutil.copytree(trained[overrides], folder / name)
    return folder / name


# --- against whole networks ---------------------------------------------------------------------------------


class PlainModel:
    """A whole network whose weights are those of the base with an adapter merged, W + scale · B·A, as functions of
    leaves: A, B and the scalar head."""

    def __init__(self, trainer: OnlineTrainer, adapter: str, scale: float) -> None:
        own = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        self.leaves = {name: p.requires_grad_() for name, p in own.items() if f".{adapter}." in name}
        self.model = GPT(trainer.spec.model.replace(scalar_head=adapter in ("critic", "reward")))
        self.own, self.adapter, self.scale = own, adapter, scale

    def __call__(self, *tokens: int) -> Tensor:
        weights = {name: self.weight(name) for name, _ in self.model.named_parameters()}
        found: Tensor = torch.func.functional_call(self.model, weights, (torch.tensor([tokens]),))[0]
        return found

    def weight(self, name: str) -> Tensor:
        if name == "score.weight":
            return self.leaves[f"scalar_heads.{self.adapter}.weight"]
        start = f"{name.removesuffix('.weight')}.adapters.{self.adapter}."
        if f"{start}lora_A" not in self.leaves:
            return self.own[name]
        return merged_weight(
            self.own[name], self.leaves[f"{start}lora_A"], self.leaves[f"{start}lora_B"], self.scale, None
        )

    def logps(self, one: Rollout) -> Tensor:
        ids = [*one.prompt_ids, *one.token_ids]
        logits = self(*ids[:-1])[-len(one.token_ids) :]
        return -F.cross_entropy(logits, torch.tensor(one.token_ids), reduction="none")

    def values(self, one: Rollout) -> Tensor:
        """Of the positions that predict the answer's tokens."""
        return self(*one.prompt_ids, *one.token_ids)[len(one.prompt_ids) - 1 : -1]

    def step(self, spec: RunSpec) -> None:
        """By torch's own clipping and AdamW; a head and matrices decay."""
        torch.nn.utils.clip_grad_norm_(self.leaves.values(), spec.optim.clip)
        optim = spec.optim
        betas = optim.beta1, optim.beta2
        torch.optim.AdamW(
            self.leaves.values(), optim.lr, betas, optim.eps, optim.weight_decay, foreach=False
        ).step()  # fmt: skip


def check_gradients(stepper: Stepper, batches: list[Any], plain: PlainModel, want: Tensor) -> None:
    counts = stepper.count(batches)
    sums = stepper.forward_backward(batches, counts)
    assert float(sums[0]) / counts.units == pytest.approx(float(want.detach()), abs=1e-6, rel=1e-7)  # fp32
    found = {shard.name: shard.leaf.grad for shard in stepper.parallel_model.shards}
    assert found.keys() == plain.leaves.keys()
    gradients = torch.autograd.grad(want, list(plain.leaves.values()), retain_graph=True)
    for (name, _), gradient in zip(plain.leaves.items(), gradients, strict=True):
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    stepper.parallel_model.zero_grad()


@pytest.mark.parametrize("shape", with_slow(SHAPES, ["experts"]))
def test_one_base_gives_the_numbers_of_four_models(shape: str, tmp_path: Path) -> None:
    reward = train_reward(tmp_path, *SHAPES[shape])
    spec = make_spec(tmp_path, "ppo", *PPO, *SHAPES[shape], "align.rewards=[]", f"align.reward_model={reward}")
    trainer = built_online(spec, tmp_path / "run")
    critic = trainer.critic
    assert critic is not None and not trainer.frozen
    trainer.next_step(trainer.rounds)  # now B is not zero any more
    batches = trainer.batches_at(1)
    base = PlainModel(trainer, "none", 0.0)
    policy = PlainModel(trainer, "default", spec.lora.scale)
    judge, value = (PlainModel(trainer, name, critic.spec.lora.scale) for name in ("reward", "critic"))
    stats = read_stats(reward)
    rollouts = trainer.rounds.rollouts
    for one in rollouts:
        ids = *one.prompt_ids, *one.token_ids
        assert one.old_logps == pytest.approx(policy.logps(one).tolist(), abs=1e-5)
        assert one.ref_logps == pytest.approx(base.logps(one).tolist(), abs=1e-5)
        assert one.values == pytest.approx(value.values(one).tolist(), abs=1e-6, rel=1e-5)
        assert one.reward == pytest.approx((float(judge(*ids)[-1].detach()) - stats.mean) / stats.std, abs=1e-5)
    assert rollouts[0].old_logps != pytest.approx(rollouts[0].ref_logps, abs=1e-3)
    tokens = sum(len(one.token_ids) for one in rollouts)

    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum() / tokens

    def row(values: list[float] | None) -> Tensor:
        return torch.tensor([values])

    value_loss = total(
        [
            ppo_value_loss(
                own := value.values(one).unsqueeze(0), row(one.values), row(one.returns), torch.ones_like(own), 0.1,
                denominator=1.0,
            )[0]
            for one in rollouts
        ]
    )  # fmt: skip
    policy_loss = total(
        [
            ppo_policy_loss(
                own := policy.logps(one).unsqueeze(0), row(one.old_logps), row(one.advantages), torch.ones_like(own),
                0.2, denominator=1.0, sampler_logps=row(one.sampler_logps), importance_cap=2.0,
            )[0]
            for one in rollouts
        ]
    )  # fmt: skip
    check_gradients(critic, batches, value, value_loss)
    check_gradients(trainer, batches, policy, policy_loss)


def test_updates_are_those_of_separate_optimizers(tmp_path: Path) -> None:
    """The first step of both, whose moments are zero before it; each model has its own learning rate."""
    reward = train_reward(tmp_path)
    spec = make_spec(tmp_path, "ppo", *PPO, f"align.reward_model={reward}", "align.critic_lr=0.003")
    trainer = built_online(spec, tmp_path / "run")
    critic = trainer.critic
    assert critic is not None
    batches = trainer.batches_at(0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    plain = {"default": PlainModel(trainer, "default", spec.lora.scale)}
    plain["critic"] = PlainModel(trainer, "critic", critic.spec.lora.scale)
    for stepper, one in ((trainer, plain["default"]), (critic, plain["critic"])):
        stepper.forward_backward(batches, stepper.count(batches))
        for shard in stepper.parallel_model.shards:
            assert shard.leaf.grad is not None
            one.leaves[shard.name].grad = shard.leaf.grad.clone()
        stepper.parallel_model.zero_grad()
    trainer.train_step(batches)
    plain["default"].step(spec)
    plain["critic"].step(critic.spec)
    wanted = plain["default"].leaves | plain["critic"].leaves
    for name, parameter in trainer.model.named_parameters():
        want = wanted.get(name, before[name])
        torch.testing.assert_close(parameter.detach(), want.detach(), atol=1e-6, rtol=1e-6, msg=name)
        assert (name in wanted) != torch.equal(parameter.detach(), before[name]), name


# --- over layouts -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "fsdp2": (2, ["parallel.dp=2", "parallel.strategy=fsdp2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "ddp": (2, ["parallel.dp=2"]),
    "zero-1": (2, ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"]),
    "zero-2": (2, ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"]),
    "tp2-sp": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "offloaded states": (2, ["parallel.dp=2", "parallel.strategy=fsdp2", "parallel.offload=optimizer"]),
    "ep2": (2, ["parallel.dp=2", "parallel.ep=2", *EXPERTS]),
    "fsdp2-tp2": (4, ["parallel.dp=2", "parallel.tp=2", "parallel.strategy=fsdp2"]),
}
QUICK = ("tp2",)
SGD = ("optim.optimizer=sgd", "optim.lr=0.1", "align.critic_lr=0.1", "align.epochs=3", "optim.schedule=constant")


def three_steps(_rank: int, specs: dict[str, RunSpec], folder: Path) -> dict[str, dict[str, Any]]:
    """What a round was scored with, the scalars of three steps, and all adapters after them, whole."""
    found: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        trainer = trainer_class(spec)(spec, folder / name, quiet=True, force=True)
        assert isinstance(trainer, OnlineTrainer)
        trainer.build()
        rows = [trainer.next_step(trainer.rounds) for _ in range(3)]
        keys = ("loss", "grad_norm", "value/loss", "value/grad_norm")
        own = {one for one in trainer.parallel_model.names() if ".adapters." in one or one.startswith("scalar_heads.")}
        found[name] = {
            "tokens": [one.token_ids for one in trainer.rounds.rollouts],
            "numbers": [
                torch.tensor([*(one.values or ()), *(one.ref_logps or ()), *(one.old_logps or ()), one.reward])
                for one in trainer.rounds.rollouts
            ],
            "steps": torch.tensor([[row[key] for key in keys] for row in rows]),
            "weights": {one: weight.clone() for one, weight in trainer.parallel_model.whole_weights(own)},
        }
    return found


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_layouts_compute_what_one_rank_computes(names: tuple[str, ...], tmp_path: Path) -> None:
    """Policy, critic and reward model over one base; the critic's gradients by its weights after steps of SGD."""
    rewards: dict[tuple[str, ...], Path] = {}
    specs: dict[str, RunSpec] = {}
    alone: dict[str, RunSpec] = {}
    for name in names:
        shape = tuple(key for key in LAYOUTS[name][1] if key.startswith("model."))
        if shape not in rewards:
            on_ranks(1, forked_reward, tmp_path, shape, f"reward-{len(rewards)}", launched=False)
            rewards[shape] = tmp_path / f"reward-{len(rewards)}"
        common = (*PPO, *SGD, f"align.reward_model={rewards[shape]}", "data.micro_batch=1")
        specs[name] = make_spec(tmp_path, "ppo", *common, *LAYOUTS[name][1])
        alone[f"{rewards[shape].name}-alone"] = make_spec(tmp_path, "ppo", *common, *shape)
    (one,) = on_ranks(1, three_steps, alone, tmp_path, launched=False)
    for ranks in (2, 4):
        mine = {name: spec for name, spec in specs.items() if LAYOUTS[name][0] == ranks}
        for found in on_ranks(ranks, three_steps, mine, tmp_path) if mine else ():
            for name, spec in mine.items():
                want = one[f"{Path(spec.align.reward_model).name}-alone"]
                assert found[name]["tokens"] == want["tokens"], name
                torch.testing.assert_close(found[name]["numbers"], want["numbers"], atol=1e-5, rtol=1e-5, msg=name)
                torch.testing.assert_close(found[name]["steps"], want["steps"], atol=2e-6, rtol=1e-4, msg=name)
                for key, weight in want["weights"].items():
                    torch.testing.assert_close(
                        found[name]["weights"][key], weight, atol=1e-6, rtol=1e-5, msg=f"{name}: {key}"
                    )


def forked_reward(_rank: int, folder: Path, shape: tuple[str, ...], name: str) -> None:
    train_reward(folder, *shape, name=name)


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/align/test_ppo.py resumes whole models, tests/train/test_lora_runs.py adapters
def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    """Policy's and critic's adapters, both optimizers; inside of a round of two steps."""
    reward = train_reward(tmp_path)
    spec = make_spec(
        tmp_path, "ppo", "lora.rank=3", f"align.reward_model={reward}", "checkpoint.every=1", "checkpoint.keep=0",
        "optim.steps=4", "optim.schedule=constant", "optim.warmup=0",
    )  # fmt: skip
    trainer_class(spec)(spec, tmp_path / "whole", quiet=True).run()
    short = spec.replace(optim=spec.optim.replace(steps=3))
    trainer_class(short)(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    states = [saved(tmp_path / name, 4, "critic", "critic_optim") for name in ("whole", "short")]
    assert not differences(*states)
    names = {name.partition(".")[0]: set[str]() for name in states[0]}
    for name in states[0]:
        names[name.partition(".")[0]].add(name)
    assert all(".adapters.default." in name for name in names["model"])
    assert "critic.scalar_heads.critic.weight" in names["critic"]
    assert all(".critic." in name for name in names["critic"] | names["critic_optim"])
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "short")]
    assert [row["value/loss"] for row in rows[0]] == [row["value/loss"] for row in rows[1]]


# --- where a reward model comes from ------------------------------------------------------------------------


def test_peft_folders_score_as_the_run_that_they_were_exported_from(tmp_path: Path) -> None:
    GPT(make_spec(tmp_path, "ppo").model, seed=4).save_hf(tmp_path / "base")
    init = (f"checkpoint.init={tmp_path / 'base'}", "data.tokenizer=bytes")
    reward = train_reward(tmp_path, *init)
    export(reward, tmp_path / "peft", adapter=True)
    scores = []
    for folder in (reward, tmp_path / "peft"):
        spec = make_spec(tmp_path, "ppo", *PPO, *init, "align.rewards=[]", f"align.reward_model={folder}")
        trainer = built_online(spec, tmp_path / f"run-{folder.name}")
        trainer.batches_at(0)
        assert trainer.critic is not None and trainer.critic.spec.lora.rank == 2  # it starts as the reward model
        scores.append([(one.reward, one.values) for one in trainer.rounds.rollouts])
    assert scores[0] == scores[1] and all(math.isfinite(reward) for reward, _ in scores[0])


def test_a_critic_of_another_folder(tmp_path: Path) -> None:
    """A whole model stays one of its own; an adapter starts as the one that is named."""
    GPT(make_spec(tmp_path, "ppo").model.replace(scalar_head=True), seed=4).save_hf(tmp_path / "whole")
    trainer = built_online(make_spec(tmp_path, "ppo", *PPO, f"align.critic={tmp_path / 'whole'}"), tmp_path / "one")
    assert trainer.critic is not None and not trainer.scalar_adapters
    assert trainer.critic.parallel_model.parts[0] is not trainer.model
    reward = train_reward(tmp_path)
    trainer = built_online(make_spec(tmp_path, "ppo", *PPO, f"align.critic={reward}"), tmp_path / "two")
    assert [(one.name, one.lora.rank, one.trained) for one in trainer.scalar_adapters] == [("critic", 2, True)]
    weights = saved(reward)
    own = dict(trainer.model.named_parameters())
    assert torch.equal(own["scalar_heads.critic.weight"], weights["model.score.weight"])
    name = "blocks.1.attention.q.adapters.{}.lora_B"
    assert torch.equal(own[name.format("critic")], weights["model." + name.format("default")])


def test_other_bases_are_refused(tmp_path: Path) -> None:
    reward = train_reward(tmp_path)
    model = GPT(make_spec(tmp_path, "ppo").model, seed=4)
    model.save_hf(tmp_path / "base")
    other = (f"checkpoint.init={tmp_path / 'base'}", "data.tokenizer=bytes")
    key = r"^align\.reward_model = '.*reward'"
    for overrides, message in (
        (("lora.rank=3", *other), "which are not the weights of the policy's base, checkpoint.init = "),
        (("lora.rank=3", "model.layers=3"), "layers = 2, but the policy has 3"),
        ((), "set lora.rank, or make a whole model of it with `lmworks checkpoint export`"),
    ):
        spec = make_spec(tmp_path, "ppo", f"align.reward_model={reward}", *overrides)
        with pytest.raises(SpecError, match=rf"{key}.*{message}"):
            trainer_class(spec)(spec, tmp_path / "run", quiet=True)
    sft = make_spec(tmp_path, "sft", "lora.rank=2", "optim.steps=1")
    trainer_class(sft)(sft, tmp_path / "sft", quiet=True).run()
    spec = make_spec(tmp_path, "ppo", "lora.rank=3", f"align.reward_model={tmp_path / 'sft'}")
    with pytest.raises(SpecError, match=r"^align\.reward_model = '.*sft' is no reward model"):
        trainer_class(spec)(spec, tmp_path / "run", quiet=True)
