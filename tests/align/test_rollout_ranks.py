"""Rollout ranks: the same run as with colocated engines, answers of the version that the rules say, runs that are
resumed while a round is sampled ahead, errors on either side."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollouts import load_round
from lmworks.model import GPT
from lmworks.parallel.local_ranks import RankFailed, on_ranks
from lmworks.plan.exact.hand_over import hand_over_bytes
from lmworks.plan.predict import predict
from lmworks.record import RunFolder, read_metrics
from lmworks.record import phase as phases
from lmworks.spec import LMWorksError, RunSpec, SpecError
from lmworks.train.load_run import load_trained
from post_training import make_spec
from tiny import differences, saved

STEPS = ["optim.steps=6", "optim.schedule=constant", "checkpoint.every=1", "checkpoint.keep=0"]  # two steps a round


def work(_rank: int, spec: RunSpec, run: Path, resumed: bool = False) -> None:
    kind = trainer_class(spec)
    (kind.resume(run, quiet=True) if resumed else kind(spec, run, quiet=True)).run()


def start(spec: RunSpec, run: Path, resumed: bool = False) -> Path:
    on_ranks(spec.ranks, work, spec, run, resumed, group=False, timeout=120)
    return run


def test_without_staleness_rollout_ranks_train_as_colocated_engines_do(tmp_path: Path) -> None:
    colocated = make_spec(tmp_path, "grpo", *STEPS)
    trainer_class(colocated)(colocated, tmp_path / "colocated", quiet=True).run()
    start(make_spec(tmp_path, "grpo", "align.rollout_ranks=1", "align.max_staleness=0", *STEPS), tmp_path / "remote")
    assert not differences(saved(tmp_path / "colocated", 6), saved(tmp_path / "remote", 6))


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_round_is_sampled_with_the_weights_of_its_version(staleness: int, tmp_path: Path) -> None:
    """Two trainer ranks and two rollout ranks; what round r trains on is `staleness` rounds old from the start on."""
    layout = ["parallel.dp=2", "parallel.strategy=fsdp2", "align.rollout_ranks=2", f"align.max_staleness={staleness}"]
    spec = make_spec(tmp_path, "grpo", *layout, "optim.steps=8", "align.beta=0.1", "log.eval_every=3")
    run = start(spec, tmp_path / "run")
    for number in range(4):
        answers = load_round(run / "rollouts" / f"round-{number:06d}.npz")
        assert {one.version for one in answers} == {max(0, number - staleness)}
        assert [one.prompt for one in answers] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "staleness/max" in row]
    assert rows[0]["rollout_wait_s"] >= rows[0]["generate_s"] > 0  # later rounds are sampled ahead
    assert [row["staleness/max"] for row in rows] == [min(number, staleness) for number in range(4)]
    assert [row["staleness/mean"] for row in rows] == [row["staleness/max"] for row in rows]
    for row in rows:
        assert row["generate_s"] > 0 and row["rollout_idle_s"] >= 0
        # Other weights, other log-probabilities; the same weights, the same ones on other ranks.
        assert (row["sampler_diff/max"] > 1e-4) == (row["staleness/max"] > 0)
    sent = [row["hand_over_bytes"] for row in rows]
    whole = hand_over_bytes(spec).broadcast
    assert whole == spec.model.params * 4
    assert sent == [whole] * 4 if staleness == 0 else sent[: 4 - staleness] == [whole] * (4 - staleness)
    received = hand_over_bytes(spec).received  # by rank 0 from FSDP2's other rank: about half of the weights
    assert predict(spec).to_dict()["hand_over_received_bytes"] == received < 0.6 * whole
    assert [row["hand_over_received_bytes"] for row in rows] == [received if one else 0 for one in sent]
    assert sum(sent) == whole * (4 if staleness == 0 else 4 - staleness)  # none for rounds after the last


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "dapo"])
def test_other_methods_without_staleness(method: str, tmp_path: Path) -> None:
    """PPO has old log-probabilities and values of the trainer; DAPO asks for further draws of a round."""
    colocated = make_spec(tmp_path, method, *STEPS)
    trainer_class(colocated)(colocated, tmp_path / "colocated", quiet=True).run()
    start(make_spec(tmp_path, method, "align.rollout_ranks=1", "align.max_staleness=0", *STEPS), tmp_path / "remote")
    assert not differences(saved(tmp_path / "colocated", 6), saved(tmp_path / "remote", 6))


@pytest.mark.slow
def test_further_draws_are_of_the_weights_at_hand(tmp_path: Path) -> None:
    """Untrained answers have no digits, mostly: groups of equal rewards are replaced."""
    small = ["align.samples=2", "align.overlong_buffer=0", "data.global_batch=8", "align.rollout_ranks=1"]
    run = start(make_spec(tmp_path, "dapo", *small, *STEPS), tmp_path / "run")
    versions = [{one.version for one in load_round(path)} for path in sorted((run / "rollouts").glob("round-*.npz"))]
    assert all(found <= {max(0, number - 1), number} for number, found in enumerate(versions))
    assert any(number in found for number, found in enumerate(versions) if number)


@pytest.mark.slow
def test_rollout_ranks_that_are_one_engine(tmp_path: Path) -> None:
    layout = ["align.rollout_ranks=2", "align.engine_tp=2", "align.max_staleness=0"]
    rows = read_metrics(start(make_spec(tmp_path, "grpo", *layout, *STEPS), tmp_path / "run") / "metrics.jsonl")
    assert max(row["sampler_diff/max"] for row in rows if "sampler_diff/max" in row) < 1e-5


@pytest.mark.parametrize(
    ("phase", "count"),
    [
        ("rollout_wait", 4),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("optimizer", 1), ("optimizer", 2), ("save.commit", 3), ("backward", 4))
        ),
    ],
)
def test_a_run_killed_while_a_round_is_sampled_ahead_ends_as_one_that_never_stopped(
    phase: str, count: int, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=1", *STEPS)
    start(spec, tmp_path / "whole")
    with pytest.raises(RankFailed, match="rank 0 died"):
        on_ranks(2, killed_in, phase, count, spec, tmp_path / "killed", group=False, timeout=120)
    start(spec, tmp_path / "killed", resumed=True)
    assert not differences(saved(tmp_path / "whole", 6), saved(tmp_path / "killed", 6))


def killed_in(rank: int, phase: str, count: int, spec: RunSpec, run: Path) -> None:
    """The trainer's rank ends when it enters a phase for the `count`-th time."""
    entered = []

    def listener(name: str, _step: int) -> None:
        entered.append(name)
        if entered.count(phase) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        phases.listeners.append(listener)
    work(rank, spec, run)


def test_the_loss_of_stale_answers_is_the_decoupled_objective(tmp_path: Path) -> None:
    """Hilton et al. 2022, as AReaL uses it: min(π_prox / π_sampler, cap) · clipped surrogate of π / π_prox, where
    π_prox is the policy before the first update of the round; at that update π = π_prox, and the ratio is 1."""
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=1", "data.global_batch=16", "optim.lr=0.05", *STEPS)
    run = start(spec, tmp_path / "run")
    rows = read_metrics(run / "metrics.jsonl")
    for number in (1, 3, 5):
        answers = load_round(run / "rollouts" / f"round-{number:06d}.npz")
        model = load_trained(run, number).model
        losses, weights = [], []
        for one in answers:
            ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
            size = len(one.token_ids)
            with torch.no_grad():
                proximal = -F.cross_entropy(model(ids[:, :-1])[0, -size:], ids[0, -size:], reduction="none")
            ratio = (proximal - torch.tensor(one.sampler_logps)).exp()
            weights += ratio.clamp(max=2.0).tolist()
            losses.append(float(-(ratio.clamp(max=2.0) * one.advantage).mean()))
        assert max(weights) - min(weights) > 0.01  # there is something to correct
        row = rows[number]
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-5)
        assert row["importance_weight/mean"] == pytest.approx(sum(weights) / len(weights), abs=1e-4)


def test_adapters_travel_as_products(tmp_path: Path) -> None:
    GPT(make_spec(tmp_path, "grpo").model, seed=3).save_hf(tmp_path / "base")
    spec = make_spec(
        tmp_path, "grpo", f"checkpoint.init={tmp_path / 'base'}", "lora.rank=4", "align.beta=0.1", "optim.lr=0.05",
        "data.global_batch=16", "align.rollout_ranks=1", "align.max_staleness=0",
    )  # fmt: skip
    rows = read_metrics(start(spec, tmp_path / "run") / "metrics.jsonl")
    assert all(row["sampler_diff/max"] < 1e-5 for row in rows)
    sent = [row["hand_over_bytes"] for row in rows]
    assert sent[:2] == [hand_over_bytes(spec, first=True).broadcast, hand_over_bytes(spec).broadcast]
    assert not any(row["hand_over_received_bytes"] for row in rows)  # the trainer is one rank
    assert sent[0] == spec.model.params * 4 and sent[1] == sent[2] < sent[0]


@pytest.mark.slow
def test_a_rewind_goes_on_with_the_answers_that_were_sampled_ahead(tmp_path: Path) -> None:
    """The first batch of round 2 is bad: the run goes back to step 3, inside of round 1, and on with round 2, whose
    answers the checkpoint has; those of round 3, which the rollout ranks have begun, are sampled again."""
    going_back = ["health.nonfinite=rewind", "health.rewind_steps=2", "align.rollout_ranks=1"]
    spec = make_spec(tmp_path, "grpo", *STEPS, *going_back)
    on_ranks(2, spoiled, spec, tmp_path / "run", group=False, timeout=120)
    kept = sorted((tmp_path / "run" / "rollouts").glob("round-*.npz"))
    assert [{one.version for one in load_round(path)} for path in kept] == [{0}, {0}, {1}, {2}]
    (event,) = [one for one in RunFolder(tmp_path / "run").events() if one["kind"] == "rewind"]
    assert (event["from_step"], event["to_step"]) == (4, 3)
    # Its checkpoint after the rewind is where a run that is resumed goes on, with the same answers.
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    for path in (tmp_path / "resumed" / "checkpoints").glob("step-00000[456]"):
        shutil.rmtree(path)
    start(spec, tmp_path / "resumed", resumed=True)
    assert not differences(saved(tmp_path / "run", 6), saved(tmp_path / "resumed", 6))


def spoiled(rank: int, spec: RunSpec, run: Path) -> None:
    trainer = trainer_class(spec)(spec, run, quiet=True)
    if rank == 0:
        update: Any = trainer.forward_backward

        def forward_backward(*given: Any) -> Any:
            sums = update(*given)
            if trainer.cursor == 4:
                sums[0] = float("nan")
            return sums

        trainer.forward_backward = forward_backward  # type: ignore[method-assign]
    trainer.run()


# --- errors -------------------------------------------------------------------------------------------------


def test_an_error_of_a_rollout_rank_ends_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(completions, **columns):\n    raise ValueError('no such file')\n")
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=1", f"align.rewards=['{tmp_path / 'bad.py'}:bad']")
    found = on_ranks(2, error_of, spec, tmp_path / "run", group=False, timeout=60)
    assert "no such file" in found[1][0] and not found[1][1]  # it says so itself
    assert found[0][0].startswith("rank 1: ") and "no such file" in found[0][0] and found[0][1]
    (event,) = [one for one in RunFolder(tmp_path / "run").events() if one["kind"] == "fail"]
    assert "no such file" in event["error"]


def error_of(rank: int, spec: RunSpec, run: Path) -> tuple[str, bool]:
    try:
        work(rank, spec, run)
    except LMWorksError as error:
        dist.destroy_process_group()
        return str(error), error.reported
    raise AssertionError("it ended well")


@pytest.mark.slow
def test_idle_rollout_ranks_are_no_hang(tmp_path: Path) -> None:
    """An update takes longer than watch.timeout_s: rollout ranks wait for the trainer, but in no collective."""
    layout = ["parallel.dp=2", "align.rollout_ranks=2", "watch.timeout_s=15", "data.global_batch=16", "optim.steps=2"]
    on_ranks(4, slow_update, make_spec(tmp_path, "grpo", *layout), tmp_path / "run", group=False, timeout=120)
    assert not [one for one in RunFolder(tmp_path / "run").events() if one["kind"] in ("hang", "fail")]
    assert not (tmp_path / "run" / "hangs").exists()


def slow_update(rank: int, spec: RunSpec, run: Path) -> None:
    phases.listeners.append(lambda name, step: time.sleep(20 * (rank < 2 and (name, step) == ("optimizer", 1))))
    work(rank, spec, run)


def test_a_lost_rollout_rank_is_noticed_by_the_trainer(tmp_path: Path) -> None:
    """Without an agent that would end it, and although it waits in no collective."""
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=1", *STEPS)
    with pytest.raises(RankFailed, match=r"rank 0: rollout rank 1 on .* has ended"):
        on_ranks(2, die_in_round, spec, tmp_path / "run", group=False, timeout=60)


def die_in_round(rank: int, spec: RunSpec, run: Path) -> None:
    def listener(entered: str, _step: int) -> None:
        if entered == "reward":  # the process ends, and its end of the test's pipe stays open in a child
            if os.fork() == 0:
                time.sleep(60)
            os._exit(1)

    if rank == 1:
        phases.listeners.append(listener)
    work(rank, spec, run)


@pytest.mark.parametrize(
    ("method", "overrides", "message"),
    [
        ("rloo", [], "use align.max_staleness=0"),
        ("grpo", ["align.importance_cap=0"], "or align.max_staleness=0"),
        ("grpo", ["fault.elastic=true"], "use fault.elastic=false"),
        ("grpo", ["align.engine_tp=2"], "does not divide the 1 align.rollout_ranks; use 1"),
        ("dpo", [], "samples no answers"),
        ("grpo", ["checkpoint.remote=file:///backup"], "checkpoint.remote does not copy .* use align.max_staleness=0"),
        ("grpo", ["cluster.nodes=2", "cluster.gpus_per_node=2"], "is 4 ranks, the layout has 2"),
    ],
)
def test_wrong_specs_are_refused(method: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, method, "align.rollout_ranks=1", *overrides)


def test_ranks_beyond_the_layout_sample_only_where_the_spec_has_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert trainer_class(make_spec(tmp_path, "grpo", "align.rollout_ranks=1")).__name__ == "RolloutWorker"
    assert trainer_class(make_spec(tmp_path, "grpo")).__name__ == "OnlineTrainer"
    make_spec(tmp_path, "grpo", "align.rollout_ranks=1", "align.max_staleness=0", "checkpoint.remote=file:///backup")


def test_a_single_process_says_what_to_start(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "grpo", "align.rollout_ranks=1")
    with pytest.raises(SpecError, match="are 2 ranks, and none was started"):
        trainer_class(spec)(spec, tmp_path / "run", quiet=True)
