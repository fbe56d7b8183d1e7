"""Mistakes that people make with `lmworks finetune`: one line that names the key, file or line, and what would work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmworks.model import GPT
from lmworks.spec import ModelSpec
from post_training import MODEL, write_chats, write_pairs, write_prompts
from typed import lmworks

REWARDS = """\
import sys
def leave(completions, **columns): sys.exit(3)
def short(completions, **columns): return [1.0]
def fail(completions, **columns): raise ValueError("no gold")
def nan(completions, **columns): return [float("nan")] * len(completions)
"""
ROUND = "align.prompts=2 align.samples=2 align.max_tokens=8"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    GPT(ModelSpec.from_dict(MODEL)).save_hf(folder / "hf")
    chats = write_chats(folder / "chats.jsonl").read_text()
    write_pairs(folder / "pairs.jsonl")
    write_prompts(folder / "prompts.jsonl")
    (folder / "empty.jsonl").write_text("")
    lines = chats.splitlines(keepends=True)
    (folder / "broken.jsonl").write_text("".join([*lines[:6], '{"messages": [\n', *lines[7:]]))
    (folder / "other.jsonl").write_text(chats.replace("messages", "conversations"))
    (folder / "nothing").mkdir()
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    (folder / "r.py").write_text(REWARDS)
    (folder / "syntax.py").write_text("def f(:")
    return folder


@pytest.fixture
def at_stage(stage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(stage)
    yield


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere --data chats.jsonl", "'nowhere': there is no such folder; name a Hugging Face folder or a run"),
        ("nothing --data chats.jsonl", "'nothing': neither a run (spec.toml) nor a Hugging Face folder (config.json)"),
        ("adapter --data chats.jsonl", "'adapter': an adapter; `lmworks checkpoint merge BASE adapter OUT` makes"),
        ("hf", "--data is missing: name a file of examples"),
        ("hf --data no.jsonl", "no.jsonl': no such file; post-training reads .jsonl, .json, .parquet or a folder"),
        ("hf --data chats.jsonl data.val_path=no.jsonl optim.steps=1", "data.val_path = "),
        ("hf --data empty.jsonl", "empty.jsonl: there are no examples in it"),
        ("hf --data broken.jsonl", "broken.jsonl line 7: not JSON: Expecting value at character 15; data.bad_examples"),
        (
            "hf --data other.jsonl",
            "line 1, line 2, line 3: no column 'messages' ('conversations' would have to be renamed); it has "
            "conversations; wanted: 'messages', or 'prompt' and 'completion'; and 57 more\n",
        ),
        (
            "hf --data pairs.jsonl",
            "it has prompt, chosen, rejected; wanted: 'messages', or 'prompt' and 'completion'; its columns are those "
            "of preferences, for align.method = reward, dpo, ipo, orpo, simpo; and",
        ),
        ("hf --data chats.jsonl --method dop", "--method dop: there is no such method; did you mean 'dpo'?"),
        ("hf --data chats.jsonl --lora 0", "--lora 0: a rank is 1 or more, e.g. 16; without --lora all weights are"),
        ("hf --data chats.jsonl --lora 8 lora.targets=q", "must be a list, e.g. lora.targets='[\"q\"]', got 'q'"),
        (
            "hf --data chats.jsonl --lora 8 lora.targets=['q_proj']",
            "'q_proj': this model has no such linear layer",
        ),
        ("hf --data chats.jsonl --epochs 0", "--epochs 0: must be more than 0"),
        ("hf --data chats.jsonl lr=1e-5", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("hf --data chats.jsonl data.seq=999", "data.seq = 999 is longer than model.context = 64; lower data.seq"),
        (
            "hf --data prompts.jsonl --method grpo",
            "needs rewards, e.g. align.rewards='[\"exact\"]', align.reward",
        ),
        (
            "hf --data prompts.jsonl --method grpo align.rewards=['exact'] align.max_tokens=512",
            "align.max_tokens = 512 leaves no room for a prompt in data.seq = 64: lower it\n",
        ),
        (
            "hf --data prompts.jsonl --method grpo align.rewards=['exact'] align.max_tokens=32 data.seq=32",
            "in data.seq = 32: lower it, or raise data.seq up to model.context = 64\n",
        ),
    ],
)
def test_refused_before_anything_is_started(
    words: str, message: str, at_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = lmworks(capsys, "finetune", *words.split(), "--run-dir", "run", "data.tokenizer=bytes")
    said = err[err.index("lmworks: error:") :]
    assert code in (1, 2) and message in said and said.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("r.py", "align.rewards = 'r.py': name a function of the file, as in r.py:reward"),
        ("exakt", "'exakt': no such reward; did you mean 'exact'? give path/file.py:function"),
        ("syntax.py:f", "syntax.py cannot be imported: SyntaxError: invalid syntax (syntax.py, line 1)\n"),
        ("r.py:leave", "r.py:leave' failed on sample 0, "),
        ("r.py:fail", "ValueError: no gold (r.py, line 4)\n"),
        ("r.py:short", "returned 1 values for 4 completions; it must return one for each"),
        ("r.py:nan", "prompts.jsonl line "),
    ],
)
def test_rewards_that_cannot_be_used(
    reward: str, message: str, at_stage: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"finetune hf --data prompts.jsonl --method grpo {ROUND} optim.steps=1 data.tokenizer=bytes".split()
    code, _, err = lmworks(capsys, *words, f'align.rewards=["{reward}"]', "--run-dir", str(tmp_path / "run"))
    said = err[err.index("lmworks: error:") :]
    assert code in (1, 2) and message in said and said.count("\n") == 1


@pytest.mark.usefixtures("at_stage")
@pytest.mark.parametrize("more", ([], ["data.path=stdlib:bytes", "--run-dir", "trained"]))
def test_a_model_folder_is_no_spec_to_train(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    code, out, err = lmworks(capsys, "train", "hf", *more)
    assert code == 2 and not out and err.count("\n") == 1
    assert "hf is a Hugging Face model, not a spec: `lmworks finetune hf --data FILE` trains it" in err
    assert "checkpoint.init=hf" in err and not Path("trained").exists()
