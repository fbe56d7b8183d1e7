"""The trainer of online methods: the policy samples answers with the engine, rewards judge them, steps follow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ..data import Batch, console_progress
from ..data.chat_template import TOKENIZER_FOLDER
from ..data.chat_tokenizer import end_token_ids
from ..data.example_batches import PromptBatches
from ..data.progress import silent
from ..parallel.adapter_model import AdapterModel
from ..parallel.parallel_model import ParallelModel
from ..parallel.world import run_on_all_ranks, run_on_rank_zero
from ..plan.passes import CRITIC, GENERATE, POLICY, REWARD, SAVE, SCORE, TEACHER, UPDATE, UPDATE_CRITIC
from ..record.jsonl import LineWriter
from ..record.samples import has_samples
from ..spec import RunSpec
from ..spec.errors import DataError
from ..spec.lora import REWARD_ADAPTER
from ..train.device import pick_device
from ..train.evaluate import Evaluation
from ..train.objective import Forward, Objective
from ..train.prefetcher import BatchStream
from .critic import Critic
from .distill_objective import DistillObjective
from .early_stop import EarlyStop
from .environments import EnvironmentFactory, load_environment
from .frozen_model import load_frozen
from .objectives import AnswerObjective
from .partial_rollouts import PartialSampler
from .policy_objective import PolicyObjective
from .post_trainer import PostTrainer
from .prompts import open_prompts, prompt_data
from .remote_sampler import RemoteSampler
from .residency import Residency
from .reward_scorer import RewardScorer
from .rewards import load_rewards
from .rollout_engine import ColocatedEngine
from .rollout_link import RolloutLink
from .rollouts import Rollout
from .rounds import Rounds, mean_reward
from .sampler import ColocatedSampler, Sampler
from .samples import samples_of
from .scalar_adapters import find_scalar_adapters

# Mean difference of a token's log-probability between trainer and engine from which an event says so, in nats.
SAMPLER_LIMIT = {"fp32": 1e-4, "bf16": 0.05}
ROLLOUTS = "rollouts"  # folder of a run: the answers of its last rounds


class OnlineTrainer(PostTrainer):
    batches: PromptBatches  # type: ignore[assignment]
    held_out: PromptBatches  # type: ignore[assignment]
    rounds: Rounds
    rollout_engine: ColocatedEngine  # without rollout ranks
    critic: Critic | None = None  # of PPO
    residency: Residency
    link: RolloutLink | None = None  # to rollout ranks

    def init_ranks(self, spec: RunSpec, quiet: bool) -> None:
        if ranks := spec.align.rollout_ranks:
            device = pick_device(spec.cluster)
            self.link = RolloutLink(spec.parallel.world, ranks, device, spec.watch.timeout_s)
        super().init_ranks(spec, quiet)

    def preflight(self, force: bool = False) -> None:
        super().preflight(force)
        found = run_on_all_ranks(lambda: find_scalar_adapters(self.spec, self.base))
        self.scalar_adapters, self.weights = found.adapters, found.source(self.spec, self.weights)

    def open_data(self) -> None:
        spec, align = self.spec, self.spec.align
        run_on_rank_zero(self.prepare_data)
        self.batches, self.held_out = run_on_all_ranks(lambda: open_prompts(spec))
        functions = align.rewards or None  # a reward model may be all there is
        self.rewards = run_on_all_ranks(lambda: functions and load_rewards(functions, align.reward_weights))
        self.environment = run_on_all_ranks(lambda: self.open_environment() if align.environment else None)

    def open_environment(self) -> EnvironmentFactory:
        name, record = self.spec.align.environment, self.batches.example(0)
        kind, factory = load_environment(name)
        missing = [column for column in kind.columns if column not in record.columns]
        if missing and not self.rewards and not self.spec.align.reward_model:
            raise DataError(f"{record.place}: align.environment = {name!r} needs the column {missing[0]!r}")
        return factory

    def prepare_data(self) -> None:
        with nullcontext(silent) if self.quiet else console_progress() as progress:
            PromptBatches(prompt_data(self.spec, 1), self.spec.checkpoint.init, seed=self.spec.seed, progress=progress)

    def make_objective(self) -> Objective:
        return super().make_objective() if self.spec.align.method == "distill" else PolicyObjective(self.spec.align)

    def build(self) -> None:
        super().build()
        self.early_stop = EarlyStop(self.spec.align.kl_stop, self.spec.align.held_out_stop)
        residency = self.residency = Residency(self.device, enabled=self.spec.align.offload == "resting")
        for name, model in self.frozen.items():
            residency.add_model(name, model, frozen=True)
        residency.add_optimizer(POLICY, self.optimizer)
        self.train_state.before_access.append(lambda: residency.enter(SAVE, POLICY))
        assert isinstance(self.objective, AnswerObjective)
        reference: Forward | None = self.objective.reference
        critic: Critic | None = None
        if self.spec.align.method == "ppo":
            critic = self.critic = Critic(self)
            self.train_state.others["critic"] = critic.state
            if not critic.spec.adapters:
                residency.add_model(CRITIC, critic.parallel_model, frozen=False)
            residency.add_optimizer(CRITIC, critic.optimizer)
        folder = self.spec.align.reward_model
        scorer = RewardScorer(self.reward_model(folder), folder) if folder else None
        self.rounds = Rounds(
            self.spec,
            self.parallel_model,
            self.make_sampler(),
            self.batches.tokenizer.eot,
            self.folder.path / ROLLOUTS,
            reference=reference,
            critic=None if critic is None else critic.parallel_model.forward,
            reward_model=scorer,
            residency=residency,
        )
        self.checkpoints.method_states = {"kl": self.rounds.adaptive_kl, "rounds": self.rounds}
        if critic is not None:
            self.checkpoints.method_states["critic"] = critic
        self.checkpoints.method_states["early_stop"] = self.early_stop
        if isinstance(self.rounds.sampler, RemoteSampler | PartialSampler):
            self.checkpoints.method_states["sampler"] = self.rounds.sampler

    def make_sampler(self) -> Sampler:
        spec = self.spec
        if self.link is not None:
            return RemoteSampler(spec, self.parallel_model, self.link, self.folder.path / ROLLOUTS)
        ends = end_token_ids(self.folder.path / TOKENIZER_FOLDER)
        engine = ColocatedEngine(spec, self.parallel_model, self.batches.tokenizer, ends, self.device)
        engine.sleep()  # until a round begins: a run that is resumed inside of one begins with an update
        self.rollout_engine = engine
        rank, ranks = (0, 1) if self.mesh is None else (self.mesh.rank("world"), self.mesh.size("world"))
        sources = (spec, engine, self.batches, self.held_out, self.rewards, rank, ranks)
        if spec.align.partial_rollouts:
            return PartialSampler(*sources, self.folder.path / ROLLOUTS)
        return ColocatedSampler(*sources, self.environment)

    def run(self) -> Evaluation:
        with nullcontext() if self.link is None else self.link.ending():
            return super().run()

    def reward_model(self, folder: str) -> ParallelModel:
        """An adapter over the policy's base, or a model of its own."""
        if any(adapter.name == REWARD_ADAPTER for adapter in self.scalar_adapters):
            return AdapterModel(self.parallel_model, REWARD_ADAPTER)
        model = self.frozen[REWARD] = load_frozen(self.spec, folder, "align.reward_model", self.mesh, self.device)
        self.residency.add_model(REWARD, model, frozen=True)
        return model

    @property
    def positions_per_step(self) -> int:
        return self.rounds.positions

    def batches_at(self, cursor: int) -> list[Batch]:
        return self.rounds.take(cursor, ahead=1)

    def save(self, wait: bool = True) -> float:
        self.rounds.sampler.finish_pending()
        return super().save(wait)

    def batch_stream(self) -> BatchStream:
        return self.rounds

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Any]:
        found = {}
        if self.critic is not None:
            self.residency.enter(UPDATE_CRITIC, CRITIC)
            found = self.critic.update(list(batches), self.step, self.cursor)
        self.residency.enter(UPDATE, POLICY)
        return super().train_step(batches) | found

    def next_step(self, prefetcher: BatchStream) -> dict[str, Any]:
        values = super().next_step(prefetcher) | self.rounds.metrics
        if self.rounds.metrics:
            self.write_samples()
        self.rounds.metrics = {}
        limit = SAMPLER_LIMIT["fp32" if self.spec.precision.dtype == "fp32" else "bf16"]
        stale = values.get("staleness/max", 0.0) > 0  # other weights, not other numerics
        if not stale and (difference := values.get("sampler_diff/mean", 0.0)) > limit:
            self.event("sampler_mismatch", difference=difference, limit=limit)
        if share := values.get("environment/failures"):
            error = next((rollout.failure for rollout in self.rounds.rollouts if rollout.failure), "")
            self.event("environment_failed", share=share, error=error)
        return values

    def write_samples(self) -> None:
        """A few answers of the round that begins with this step."""
        rounds = -(-self.spec.optim.steps // self.rounds.updates)
        if self.is_rank_zero and self.rounds.rollouts and has_samples(self.rounds.number, rounds):
            decode = self.batches.tokenizer.decode
            answers = samples_of(self.rounds.rollouts, self.spec.seed, self.rounds.number, decode)
            with LineWriter(self.folder.samples_path) as lines:
                lines.append({"round": self.rounds.number, "step": self.step, "answers": answers})

    @property
    def is_finished(self) -> bool:
        return super().is_finished or bool(self.early_stop.reason)

    def is_last_step(self, values: dict[str, Any]) -> bool:
        self.early_stop.record_step(values)
        return self.ends_early() or super().is_last_step(values)

    @property
    def may_stop_early(self) -> bool:  # type: ignore[override]
        return bool(self.spec.align.held_out_stop)

    def stops_early(self, evaluation: Evaluation) -> bool:
        self.early_stop.record_evaluation(evaluation.metrics["reward/mean"])
        return self.ends_early()

    def ends_early(self) -> bool:
        if self.early_stop.reason:
            self.event("early_stop", **self.early_stop.facts)
        return bool(self.early_stop.reason)

    def measure_held_out(self) -> Evaluation:
        """Mean reward of sampled answers to held-out prompts; the loss is its negative. Of distillation, their loss."""
        self.residency.enter(GENERATE, POLICY)
        rollouts = self.rounds.sampler.sample_held_out()
        if isinstance(self.objective, DistillObjective):
            self.residency.enter(SCORE, TEACHER)
            return self.loss_of_answers(rollouts)
        self.rounds.finish_rewards(rollouts)
        reward = mean_reward(rollouts)
        return HeldOutReward(-reward, len(rollouts), {"reward/mean": reward}, "answer")

    def loss_of_answers(self, rollouts: Sequence[Rollout]) -> Evaluation:
        model, objective = self.parallel_model, self.objective
        ranks, batches = model.size("dp"), [batch for batch, _ in self.rounds.batches(rollouts)]
        objective.reset_metrics()
        loss, units = model.evaluate(
            ranks * len(batches), lambda index: batches[index // ranks], objective.loss, objective.units
        )
        group = None if model.mesh is None else model.mesh.group("dp")
        return Evaluation(loss / max(1, units), units, objective.metrics(group), objective.unit)


class HeldOutReward(Evaluation):
    def __str__(self) -> str:
        return f"reward {-self.loss:.4f} over {self.tokens:,} answers to held-out prompts"
