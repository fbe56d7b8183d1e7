"""Episodes of several turns: which tokens they have, what counts, how they end; and runs that train on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_online import plain_policy_loss

from lmworks.align import episodes
from lmworks.align.environments import Environment, Step, Turn
from lmworks.align.episodes import Episodes
from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.post_trainer import trainer_class
from lmworks.align.rollout_engine import Completion
from lmworks.align.rollouts import Rollout, load_round
from lmworks.data.chat_tokenizer import ChatTokenizer
from lmworks.data.example_batches import PromptExample
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import read_metrics
from lmworks.spec import DataError, LMWorksError, RunSpec
from lmworks.spec.run import DataSpec
from post_training import built_online, make_spec, save_terse_model, write_lines
from tiny import differences, saved
from typed import lmworks
from variations import with_slow

EOT = 256
CHAT = ChatTokenizer.open(DataSpec(tokenizer="bytes"), "")


# --- a scripted policy --------------------------------------------------------------------------------------


class Script:
    """An engine that says what it is told to, turn by turn: `texts[sample][turn]`; None: cut at its limit."""

    group = None

    def __init__(self, *texts: Sequence[str | None], samples: int = 0) -> None:
        self.texts, self.samples, self.turn = texts, samples or len(texts), 0
        self.prompts: list[list[list[int]]] = []
        self.seeds: list[list[int]] = []

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], samples: int = 0, max_tokens: Any = None
    ) -> list[list[Completion]]:
        self.prompts.append([list(one) for one in prompts])
        self.seeds.append(list(seeds))
        limits = max_tokens or [40] * len(prompts)
        said = [texts[self.turn] for texts in self.texts if self.turn < len(texts)]
        self.turn += 1
        if not samples:
            return [[self.completion(text, limits[0]) for text in said] for _ in prompts]
        return [[self.completion(text, limit)] for text, limit in zip(said, limits, strict=True)]

    def completion(self, text: str | None, limit: int) -> Completion:
        ids = [ord("x")] * limit if text is None else [*text.encode(), EOT][:limit]
        ended = text is not None and len(text) < limit
        return Completion(ids, [-float(one) for one in ids], CHAT.tokenizer.decode(ids), ended)


class Guess(Environment):
    """Says 'lower' until the answer is said; every guess costs 0.1."""

    def reset(self, example: Any) -> Any:
        if example.get("broken") == "reset":
            raise OSError("no room")
        self.example = example
        return example["prompt"]

    def step(self, turn: Turn) -> Step:
        if self.example.get("broken") == "step":
            raise OSError("gone")
        if self.example.get("broken") == "data":
            raise DataError("no such column")
        if turn.text == self.example["answer"]:
            return Step(reward=1.0, done=True)
        return Step("lower", -0.1)

    def finish(self) -> float | None:
        return -1.0


def play(script: Script, tmp_path: Path, prompt: Any = "Q:", *overrides: str, **columns: Any) -> list[Rollout]:
    fixed = ["align.max_tokens=40", "align.max_turns=3", f"align.samples={script.samples}", *overrides]
    spec = make_spec(tmp_path, "grpo", *fixed, f"data.global_batch={4 * script.samples}")
    played = Episodes(spec, script, Guess, CHAT)  # type: ignore[arg-type]
    example = PromptExample([], prompt, {"answer": "7", **columns}, "file line 1")
    return played.play({5: example}, run="0", draw=2, version=3)


def test_tokens_and_masks_of_an_episode(tmp_path: Path) -> None:
    """Token by token: sampled ones stay as they were, only the observation's are appended, and they do not count."""
    script = Script(["9", "7"], ["7"])
    first, second = play(script, tmp_path)
    observed = [*b"\nlower\n"]
    assert first.prompt_ids == [*b"Q:"] and first.prompt == 5 and first.version == 3
    assert first.token_ids == [ord("9"), EOT, *observed, ord("7"), EOT]
    assert first.mask == [1, 1, *[0] * len(observed), 1, 1]
    assert first.sampler_logps == [-57.0, -256.0, *[0.0] * len(observed), -55.0, -256.0]
    assert first.text == "9\nlower\n7" and first.ended and first.turns == 2
    assert first.reward == pytest.approx(0.9) and first.rewards == {"environment": first.reward}
    assert second.token_ids == [ord("7"), EOT] and second.mask == [1, 1] and second.reward == 1.0
    # The next turn is asked for with exactly these tokens, and with a seed of its own.
    assert script.prompts == [[[*b"Q:"]], [[*b"Q:", ord("9"), EOT, *observed]]]
    assert len({seed for seeds in script.seeds for seed in seeds}) == 2


def test_messages_are_rendered_by_the_template(tmp_path: Path) -> None:
    """A model on bytes has the plain dialogue: without tool messages, an observation is the user's."""
    script = Script(["9", "7"])
    (one,) = play(script, tmp_path, [{"role": "user", "content": "Which?"}], "align.method=ppo", "align.beta=0")
    assert one.prompt_ids == [*b"User: Which?\nAssistant:"]
    assert one.token_ids == [ord("9"), EOT, *b"\nUser: lower\nAssistant:", ord("7"), EOT]
    assert one.messages == [
        {"role": "assistant", "content": "9"},
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "7"},
    ]


def test_an_episode_ends_when_turns_or_tokens_are_used_up(tmp_path: Path) -> None:
    few, cut, crowded = play(Script(["9", "8", "6"], [None], ["9" * 32]), tmp_path)
    assert few.turns == 3 and few.ended and few.token_ids[-1] == EOT  # no observation after the last turn
    assert few.reward == pytest.approx(-0.3 - 1.0)
    assert len(cut.token_ids) == 40 and not cut.ended and cut.turns == 1 and cut.reward == pytest.approx(-1.1)
    # 33 tokens and an observation of 7 leave no room for a turn.
    assert len(crowded.token_ids) == 33 and all(crowded.mask) and not crowded.ended
    assert all(len(one.token_ids) == len(one.mask) == len(one.sampler_logps) for one in (few, cut, crowded))


@pytest.mark.parametrize(
    ("broken", "error"), [("step", "OSError: gone (test_episodes.py"), ("reset", "OSError: no room")]
)
def test_an_environment_that_fails_ends_its_episode(broken: str, error: str, tmp_path: Path) -> None:
    one, other = play(Script(["9"], ["7"]), tmp_path, broken=broken)
    for rollout in (one, other):
        assert rollout.failure.startswith(error) and rollout.turns == 1 and rollout.reward != rollout.reward


def test_errors_of_data_and_spec_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such column"):
        play(Script(["9"], ["7"]), tmp_path, broken="data")
    with pytest.raises(DataError, match=r"file line 1: the prompt .* has 60 tokens, and 24 fit"):
        play(Script(["9"], ["7"]), tmp_path, "Q" * 60)


def test_an_environment_that_hangs_ends_its_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "call_all", lambda calls: [TimeoutError("no answer in 300 s") for _ in calls])
    one, _ = play(Script(["9"], ["7"]), tmp_path)
    assert one.failure == "TimeoutError: no answer in 300 s" and one.reward != one.reward


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("lower", 1.0, False), "step returned a tuple, not a Step"),
        (None, "step returned None, not a Step"),
        (Step(observation=5), "the observation of a step is a int, not a text"),  # type: ignore[arg-type]
        (Step(reward="1"), "the reward of step is '1', not a finite number or None"),  # type: ignore[arg-type]
        (Step(reward=float("inf")), "the reward of step is inf, not a finite number or None"),
    ],
)
def test_what_an_environment_returns_is_checked(
    step: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guess, "step", lambda self, turn: step)
    with pytest.raises(LMWorksError, match=message):
        play(Script(["9"], ["7"]), tmp_path)


def test_a_prompt_is_a_text_or_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "reset", lambda self, example: None)
    with pytest.raises(LMWorksError, match="reset returned None, not a text or messages"):
        play(Script(["9"], ["7"]), tmp_path)


def test_prompts_of_a_group_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(Guess, "reset", lambda self, example: f"Q{next(numbers)}")
    with pytest.raises(LMWorksError, match="`reset` must depend on the example alone"):
        play(Script(["9"], ["7"]), tmp_path)


# --- training -----------------------------------------------------------------------------------------------

TALK = """
from lmworks.align import Environment, Step

class Talk(Environment):
    def reset(self, example):
        self.turns, self.answer = 0, example["answer"]
        return example["prompt"]

    def step(self, turn):
        self.turns += 1
        if "!" in turn.text:
            raise RuntimeError("shouting")
        return Step(f"{len(turn.text)}?", 0.1 * len(turn.text), done=self.turns == 3)
"""


def talking(tmp_path: Path, method: str, *overrides: str) -> RunSpec:
    """A model that ends its turns soon, and an environment that answers two of them."""
    save_terse_model(make_spec(tmp_path, method), tmp_path / "start")
    (tmp_path / "talk.py").write_text(TALK)
    return make_spec(
        tmp_path, method, f"align.environment={tmp_path / 'talk.py'}:Talk", f"checkpoint.init={tmp_path / 'start'}",
        "align.rewards=[]", "align.max_tokens=32", "align.max_turns=3", "optim.lr=1e-4", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize(
    "method", with_slow(["grpo", "dapo", "dr_grpo", "gspo", "rloo"], ["dapo", "dr_grpo", "gspo", "rloo"])
)
def test_gradients_of_several_turns_equal_those_of_plain_functions(method: str, tmp_path: Path) -> None:
    """Every episode in a pass of its own over whole logits, with the mask of its turns."""
    beta = "0" if method == "rloo" else "0.2"
    spec = talking(
        tmp_path, method, f"align.beta={beta}", "align.importance_cap=0", "align.dynamic_sampling=0",
        "align.overlong_buffer=0", "data.global_batch=16",
    )  # fmt: skip
    GPT(spec.model, seed=9).save_hf(tmp_path / "reference")
    spec = spec.replace(align=spec.align.replace(reference=str(tmp_path / "reference")))
    trainer = built_online(spec, tmp_path / "run")
    batches = trainer.batches_at(0)
    rollouts = trainer.rounds.rollouts
    assert len({one.turns for one in rollouts}) > 1 and max(one.mask.count(0) for one in rollouts) > 4
    counts = trainer.count(batches)
    sums = trainer.forward_backward(batches, counts)
    model = GPT.from_hf(tmp_path / "start")
    want = plain_policy_loss(spec, model, rollouts, GPT.from_hf(tmp_path / "reference") if beta != "0" else None)
    want.backward()
    assert float(sums[0]) / counts.units == pytest.approx(float(want.detach()), rel=1e-4, abs=1e-6)
    for shard in trainer.parallel_model.shards:
        grad = dict(model.named_parameters())[shard.name].grad
        torch.testing.assert_close(shard.leaf.grad, grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("method", with_slow(["grpo", "ppo"], ["grpo"]))
def test_engine_and_trainer_agree_over_several_turns(method: str, tmp_path: Path) -> None:
    trainer = built_online(talking(tmp_path, method, "align.temperature=0.7"), tmp_path / "run")
    engine: Any = trainer.rollout_engine
    run, cached = engine.run, []

    def recorded(*arguments: Any) -> Any:
        results = run(*arguments)
        cached.append(sum(result.cached_tokens for result in results.values()))
        return results

    engine.run = recorded
    for _ in range(2):
        values = trainer.next_step(trainer.rounds)
        trainer.next_step(trainer.rounds)
        assert values["sampler_diff/max"] < 1e-5
        assert values["environment/turns"] > 1.2 and values["environment/observation_tokens"] > 1
    assert values["reward/environment"] > 0
    assert not cached[0] and max(cached) > 0  # the turns before are in the prefix cache


@pytest.mark.slow  # tests/align/test_online.py resumes inside of a round
def test_a_run_resumed_inside_of_a_round_of_episodes_is_bitwise_equal(tmp_path: Path) -> None:
    spec = talking(
        tmp_path, "grpo", "checkpoint.every=1", "checkpoint.keep=0", "optim.steps=3", "optim.schedule=constant"
    )  # two steps a round
    trainer_class(spec)(spec, tmp_path / "whole", quiet=True).run()
    short = spec.replace(optim=spec.optim.replace(steps=1))
    trainer_class(short)(short, tmp_path / "short", quiet=True).run()
    (tmp_path / "short" / "spec.toml").write_text((tmp_path / "whole" / "spec.toml").read_text())
    OnlineTrainer.resume(tmp_path / "short", quiet=True).run()
    assert not differences(saved(tmp_path / "whole", 3), saved(tmp_path / "short", 3))
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "short"))
    assert whole[0]["environment/turns"] > 1 and [one["loss"] for one in whole] == [one["loss"] for one in resumed]


def run_on_rank(_rank: int, spec: RunSpec, run: Path) -> None:
    trainer_class(spec)(spec, run, quiet=True).run()


@pytest.mark.slow
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_episodes_of_two_ranks_are_those_of_one(engine_tp: int, tmp_path: Path) -> None:
    """Also where both are one engine, which samples a turn of both, though one has no episode left."""
    spec = talking(tmp_path, "grpo", "optim.steps=1", "align.prompts=3", "data.global_batch=12")
    trainer_class(spec)(spec, tmp_path / "one", quiet=True).run()
    layout = ["parallel.dp=2", "parallel.strategy=fsdp2", f"align.engine_tp={engine_tp}"]
    both = talking(tmp_path, "grpo", "optim.steps=1", "align.prompts=3", "data.global_batch=12", *layout)
    on_ranks(2, run_on_rank, both, tmp_path / "two", group=False, timeout=120)
    one, two = (load_round(tmp_path / name / "rollouts" / "round-000000.npz") for name in ("one", "two"))
    assert [answer.token_ids for answer in one] == [answer.token_ids for answer in two]
    assert [answer.mask for answer in one] == [answer.mask for answer in two]
    assert [answer.rewards for answer in one if not answer.failure] == [
        answer.rewards for answer in two if not answer.failure
    ]


def test_failures_are_counted_and_told(tmp_path: Path) -> None:
    spec = talking(tmp_path, "grpo", "align.samples=8", "data.global_batch=32", "align.temperature=2")
    trainer = built_online(spec, tmp_path / "run")
    values = trainer.next_step(trainer.rounds)
    failed = [one for one in trainer.rounds.rollouts if one.failure]
    assert failed and 0 < values["environment/failures"] < 1
    assert all(one.advantage == 0 for one in failed)
    (event,) = [one for one in trainer.folder.events() if one["kind"] == "environment_failed"]
    assert event["error"].startswith("RuntimeError: shouting (talk.py, line ")


def test_rewards_are_added_to_those_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def one(completions, **columns):\n    return [10.0 for _ in completions]\n")
    trainer = built_online(talking(tmp_path, "grpo", f"align.rewards=['{tmp_path / 'one.py'}:one']"), tmp_path / "run")
    trainer.batches_at(0)
    for rollout in trainer.rounds.rollouts:
        if not rollout.failure:
            assert rollout.reward == pytest.approx(10 + rollout.rewards["environment"])


@pytest.mark.slow
def test_it_learns_what_only_the_second_turn_is_rewarded_for(tmp_path: Path) -> None:
    """Digits after the observation; before it nothing counts but that a turn ends."""
    (tmp_path / "second.py").write_text(SECOND)
    spec = talking(
        tmp_path, "grpo", f"align.environment={tmp_path / 'second.py'}:Second", "align.max_turns=2", "align.samples=8",
        "align.prompts=8", "data.global_batch=64", "data.micro_batch=8", "checkpoint.every=0", "optim.steps=40",
        "optim.lr=5e-3", "optim.schedule=constant",
    )  # fmt: skip
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    rewards = [row["reward/environment"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert max(rewards[:3]) < 0.2 and sum(rewards[-5:]) / 5 > 0.5


SECOND = """
from lmworks.align import Environment, Step

class Second(Environment):
    def reset(self, example):
        self.turns = 0
        return example["prompt"]

    def step(self, turn):
        self.turns += 1
        if self.turns == 1 and not turn.cut:
            return Step("now:")
        digits = sum(one.isdigit() for one in turn.text) if self.turns == 2 else 0
        return Step(reward=min(1.0, digits / 4), done=True)
"""


def test_missing_columns_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "grpo.jsonl", [{"prompt": f"{i}+1="} for i in range(60)])
    spec = make_spec(tmp_path, "grpo", "align.environment=python", "align.rewards=[]")
    with pytest.raises(DataError, match=r"grpo.jsonl line \d+: align.environment = 'python' needs the column 'answer'"):
        trainer_class(spec)(spec, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("name", with_slow(["python", "file_edit"], ["python"]))
def test_finetune_with_an_environment(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec(tmp_path, "grpo")
    GPT(spec.model, seed=1).save_hf(tmp_path / "model")
    columns: dict[str, Any] = {"answer": "3"}
    if name == "file_edit":
        columns = {"files": {"f.py": "x = 1\n"}, "tests": ["import f\nassert f.x == 1"]}
    prompts = [{"prompt": [{"role": "user", "content": f"{i}?"}], **columns} for i in range(30)]
    path = write_lines(tmp_path / "tasks.jsonl", prompts)
    arguments = [
        "finetune", str(tmp_path / "model"), "--data", str(path), "--method", "grpo", "--run-dir",
        str(tmp_path / "run"), f"align.environment={name}", "data.tokenizer=bytes", "optim.steps=1", "data.seq=1200",
        "model.context=1200", "align.max_tokens=8", "align.prompts=2", "align.samples=2", "log.eval_batches=1",
    ]  # fmt: skip
    code, _, error = lmworks(capsys, *arguments)
    assert code == 0, error
    (row, *_) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["reward/environment"] == (1.0 if name == "file_edit" else 0.0)
