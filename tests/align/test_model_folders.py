"""Models that a run reads beside its own: folders that do not fit are refused before anything is built or written, and
a resumed run goes on with the models that it had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmworks.align.model_folders import digest_of_folder
from lmworks.align.post_trainer import PostTrainer, trainer_class
from lmworks.model import GPT
from lmworks.model.reward_stats import RewardStats, write_stats
from lmworks.record import RunFolder
from lmworks.spec import ModelSpec, RunSpec, SpecError
from post_training import MODEL, make_spec
from tiny import write_adapter
from variations import with_slow

KEYS = {"reference": "dpo", "reward_model": "grpo", "critic": "ppo", "teacher": "distill"}


def write_model(folder: Path, seed: int = 5, **shape: Any) -> Path:
    GPT(ModelSpec.from_dict({**MODEL, **shape}), seed=seed).save_hf(folder)
    return folder


def spec_with(tmp_path: Path, key: str, folder: Path, *overrides: str) -> RunSpec:
    return make_spec(tmp_path, KEYS[key], f"align.{key}={folder}", *overrides)


def refusal(spec: RunSpec, run: Path) -> str:
    """The one line that a user gets; nothing is built, and no folder is there."""
    with pytest.raises(SpecError) as raised:
        trainer_class(spec)(spec, run, quiet=True)
    assert not run.exists() and "\n" not in str(raised.value)
    return str(raised.value)


def adapter(folder: Path) -> Path:
    write_adapter(folder, ModelSpec.from_dict(MODEL), 1)
    return folder


def unsaved_run(folder: Path, scalar_head: bool) -> None:
    method = {"align": {"method": "reward"}} if scalar_head else {}
    RunFolder.create(folder, RunSpec.from_dict({"model": MODEL, "data": {"seq": 64}, **method}))


WRONG: dict[str, tuple[Callable[[Path, bool], object], str]] = {
    "nowhere": (lambda folder, _: None, "there is no such folder"),
    "empty": (lambda folder, _: folder.mkdir(), "holds no model: neither spec.toml"),
    "unsaved": (unsaved_run, "is a run without a checkpoint"),
    "short": (
        lambda folder, scalar_head: write_model(folder, context=32, scalar_head=scalar_head),
        "has a context of 32 tokens, fewer than data.seq = 64",
    ),
    "vocabulary": (
        lambda folder, scalar_head: write_model(folder, vocab=300, scalar_head=scalar_head),
        "(vocabularies of 300 and 258): name a model with the same tokenizer",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("key", KEYS)
def test_a_folder_that_does_not_fit_is_refused_by_key(key: str, wrong: str, tmp_path: Path) -> None:
    make, message = WRONG[wrong]
    folder = tmp_path / wrong
    make(folder, key == "reward_model")
    said = refusal(spec_with(tmp_path, key, folder), tmp_path / "out")
    assert said.startswith(f"align.{key} = '{folder}'") and message in said


@pytest.mark.parametrize("key", KEYS)
def test_an_adapter_is_no_whole_model(key: str, tmp_path: Path) -> None:
    said = refusal(spec_with(tmp_path, key, adapter(tmp_path / "adapter")), tmp_path / "out")
    assert said.startswith(f"align.{key} = ") and "is an adapter" in said and "lmworks checkpoint" in said


@pytest.mark.parametrize(
    ("key", "scalar_head", "message"),
    [
        ("reference", True, "is a reward model: it has no probabilities of tokens"),
        ("teacher", True, "is a reward model: it has no probabilities of tokens"),
        ("reward_model", False, "is no reward model: train one with align.method = 'reward'"),
    ],
)
def test_a_wrong_head_is_refused(key: str, scalar_head: bool, message: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", scalar_head=scalar_head)
    assert message in refusal(spec_with(tmp_path, key, folder), tmp_path / "out")


# --- resumed runs -------------------------------------------------------------------------------------------


def resume(run: Path) -> None:
    text = (run / "spec.toml").read_text()
    (run / "spec.toml").write_text(text.replace("steps = 1\n", "steps = 2\n"))
    kind = trainer_class(RunFolder.open(run).spec())
    kind.resume(run, quiet=True).run()


@pytest.mark.parametrize("key", with_slow(KEYS, ("reward_model",)))
def test_a_changed_model_is_refused_and_a_moved_one_is_not(key: str, tmp_path: Path) -> None:
    shape = {"scalar_head": True} if key == "reward_model" else {}
    folder = write_model(tmp_path / "model", **shape)
    spec = spec_with(tmp_path, key, folder, "optim.steps=1", "optim.schedule=constant", "optim.warmup=0")
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    shutil.move(folder, tmp_path / "moved")
    write_model(folder, seed=6, **shape)
    with pytest.raises(SpecError) as raised:
        resume(tmp_path / "run")
    said = str(raised.value)
    assert said.startswith(f"align.{key} = '{folder}' is not the ") and "had up to step 1: restore its weights" in said
    path = tmp_path / "other" / "spec.toml"
    path.write_text(path.read_text().replace(str(folder), str(tmp_path / "moved")))
    resume(tmp_path / "other")


def test_the_model_that_a_run_starts_from_is_its_reference(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start")
    overrides = (f"checkpoint.init={start}", "data.tokenizer=bytes", "optim.steps=1", "optim.schedule=constant")
    spec = make_spec(tmp_path, "dpo", *overrides)
    trainer_class(spec)(spec, tmp_path / "run", quiet=True).run()
    shutil.rmtree(start)
    write_model(start, seed=6)
    with pytest.raises(SpecError, match=r"^checkpoint\.init = '.*start' is not the reference"):
        PostTrainer.resume(tmp_path / "run", quiet=True).run()


def test_a_model_can_not_be_added_or_left_out(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", scalar_head=True)
    spec = spec_with(tmp_path, "reward_model", folder, "optim.steps=1", "optim.schedule=constant", "optim.warmup=0")
    trainer_class(spec)(spec, tmp_path / "with", quiet=True).run()
    plain = make_spec(tmp_path, "grpo", "optim.steps=1", "optim.schedule=constant", "optim.warmup=0")
    trainer_class(plain)(plain, tmp_path / "without", quiet=True).run()
    texts = {name: (tmp_path / name / "spec.toml").read_text() for name in ("with", "without")}
    (tmp_path / "with" / "spec.toml").write_text(texts["without"])
    (tmp_path / "without" / "spec.toml").write_text(texts["with"])
    with pytest.raises(SpecError, match=r"names no reward model, which .*with had up to step 1"):
        resume(tmp_path / "with")
    with pytest.raises(SpecError, match=r"align\.reward_model = '.*' is not the reward model that .*without had"):
        resume(tmp_path / "without")


def test_a_digest_is_of_weights_config_and_statistics(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", scalar_head=True)
    seen = [digest_of_folder(folder)]
    write_stats(folder, RewardStats(0.5, 2.0))
    seen.append(digest_of_folder(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    seen.append(digest_of_folder(folder))
    (folder / "README.md").write_text("not a part of the model")
    assert len(set(seen)) == 3 and digest_of_folder(folder) == seen[-1]
