"""The commands as they are typed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import typed
from chat_files import talk, write_lines, write_tokenizer
from chat_templates import plain_template
from lmworks.record import RunFolder
from lmworks.spec import RunSpec

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lmworks(capsys: pytest.CaptureFixture[str]) -> Run:
    """`lmworks data …`: exit code, stdout, stderr."""
    return lambda *arguments: typed.lmworks(capsys, "data", *map(str, arguments))


def test_prepare_then_inspect(lmworks: Run, corpus: Path, tmp_path: Path) -> None:
    code, out, err = lmworks("prepare", corpus, "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["up_to_date"], result["vocab_size"]) == (False, 300)
    assert sum(split["documents"] for split in result["splits"].values()) == 60
    assert "tokenize: 1 of 1" in err  # no terminal: plain lines, and not on standard output

    code, out, _ = lmworks("prepare", corpus, "--out", tmp_path / "out", "--tokenizer", "bpe:300")
    assert code == 0
    assert "is up to date, nothing to do" in out

    _, out, _ = lmworks("inspect", tmp_path / "out", "--json", "--samples", "1")
    figures = json.loads(out)
    assert figures["splits"]["train"]["tokens"] == result["splits"]["train"]["tokens"]
    assert len(figures["samples"]) == 1
    _, shown, _ = lmworks("inspect", tmp_path / "out")
    assert "every shard matches its checksum" in shown
    assert "document " in shown


def test_separator_escapes(lmworks: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\n\ntwo\n\nthree")
    _, out, _ = lmworks("prepare", tmp_path / "t.txt", "--separator", r"\n\n", "--out", tmp_path / "out", "--json")
    assert sum(split["documents"] for split in json.loads(out)["splits"].values()) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "culprit"),
    [
        (["prepare", "gone.txt", "--out", "{}/o"], 2, "gone.txt"),
        (["prepare", "stdlib", "--out", "{}/o", "--tokenizer", "bpe:7"], 2, "bpe:7"),
        (["prepare", "stdlib", "--out", "{}/o", "--val-fraction", "2"], 2, "--val-fraction 2"),
        (["prepare", "{}/a.jsonl", "--out", "{}/o"], 1, "a.jsonl line 1"),
        (["prepare", "{}/a.jsonl", "--out", "{}/a.jsonl"], 2, "a.jsonl"),
        (["inspect", "{}/nothing"], 2, "nothing"),
        (["inspect", "stdlib:word"], 2, "stdlib:word"),
    ],
)
def test_bad_input_is_one_line_error(
    lmworks: Run, tmp_path: Path, arguments: list[str], code: int, culprit: str
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    found, _, err = lmworks(*[argument.replace("{}", str(tmp_path)) for argument in arguments])
    assert found == code
    errors = [line for line in err.splitlines() if not line.startswith("tokenize:")]
    assert len(errors) == 1, err
    assert errors[0].startswith("lmworks: error: ")
    assert culprit in errors[0]


def test_ctrl_c_prints_how_to_continue(lmworks: Run, corpus: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, lmworks.data.assemble as a\n"
        "a.ShardWriter.write = lambda self, raw: os.kill(os.getpid(), signal.SIGINT)\n"
        "from lmworks.cli.main import main\nmain()"
    )
    arguments = ["data", "prepare", str(corpus), "--out", str(tmp_path / "out")]

    def default_sigint() -> None:  # a background job of a shell may have inherited that it is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=default_sigint,
    )
    assert run.returncode == 130, run.stderr
    assert run.stderr.splitlines()[-1] == "lmworks: interrupted; run the same command again to continue"
    assert "Traceback" not in run.stderr
    assert lmworks(*arguments[1:])[0] == 0


def test_wrong_usage_is_exit_code_2(lmworks: Run) -> None:
    for arguments in (["prepare", "stdlib"], ["inspect"], ["prepare", "stdlib", "--out", "x", "--workers", "many"]):
        code, _, err = lmworks(*arguments)
        assert code == 2
        assert "Traceback" not in err


def test_preparing_needs_no_torch() -> None:
    script = (
        "import sys, lmworks.data as d; d.prepare, d.TokenData, d.resolve, d.bigram_loss; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_preview_marks_trained_tokens(lmworks: Run, tmp_path: Path) -> None:
    hf = write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    chats = write_lines(
        tmp_path / "chats.jsonl",
        [{"messages": talk("q", "the answer 数", "r", "b")}, {"messages": talk("q")}, {"messages": talk("x", "y")}],
    )
    code, out, err = lmworks("preview", chats, "--model", hf, "--examples", "1")
    assert code == 0, err
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦the answer 数<|im_end|>⟧\n<|im_start|>user" in out
    assert f"{chats} line 1: " in out and "left out: 1 no assistant turn" in out and "line 2" in out
    code, out, _ = lmworks("preview", chats, "--line", "3", "--json")
    found = json.loads(out)
    assert found["kind"] == "conversations" and found["report"]["left_out"] == {"no assistant turn": 1}
    assert found["examples"][0]["place"] == f"{chats} line 3"
    assert found["examples"][0]["sequences"][0] == [
        {"text": "User: x\nAssistant:", "tokens": 18, "trained": False},
        {"text": " y<|endoftext|>", "tokens": 3, "trained": True},
        {"text": "\n", "tokens": 1, "trained": False},
    ]
    code, _, err = lmworks("preview", chats, "--line", "2")
    assert code == 1 and "no usable example on line 2" in err
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b" * 40}])
    _, out, _ = lmworks("preview", pairs)
    assert "line 1, chosen: 3 tokens, 2 trained" in out and "q⟦a<|endoftext|>⟧" in out
    _, out, _ = lmworks("preview", write_lines(tmp_path / "p.jsonl", [{"prompt": "q", "answer": "4"}]))
    assert "1 examples (prompts)" in out
    code, _, err = lmworks("preview", pairs, "--seq", "16")
    assert code == 1 and "42 tokens, more than 16" in err


def test_window_of_a_fine_tuning_run_names_lines(lmworks: Run, tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": talk(f"q{i}", "a" * i)} for i in range(1, 30)])
    data = {"path": str(chats), "tokenizer": "bytes", "seq": 64, "micro_batch": 2, "packing": False}
    table = {"model": {"preset": "tiny"}, "data": data, "align": {"method": "sft"}}
    RunFolder.create(tmp_path / "run", RunSpec.from_dict(table))
    code, out, err = lmworks("window", tmp_path / "run", "--cursor", "1", "--json")
    assert code == 0, err
    row = json.loads(out)["rows"][0]
    (place,) = row["examples"]
    line = int(place.removeprefix(f"{chats} line "))
    assert f"User: q{line}\nAssistant: {'a' * line}" in row["text"]
    _, out, _ = lmworks("window", tmp_path / "run", "--cursor", "1")
    assert "lines" in out and f"2 from {chats}" in out
