"""The tree of commands: panels, whole descriptions, former spellings, suggestions and completion."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lmworks.cli.main import PANELS, Commands, app
from typed import lmworks

# Every spelling of 0.1's first command line, with what is typed after it. The last is what it answers with.
FORMER = [
    (["models", "--json"], 0),
    (["hardware", "h100", "--json"], 0),
    (["mesh", "tiny", "parallel.dp=2", "--json"], 0),
    (["mesh", "tiny", "--rank", "7"], 2),
    (["pipeline", "tiny", "parallel.pp=2", "data.global_batch=32", "--json"], 0),
    (["pipeline", "tiny"], 2),
    (["health", "NOWHERE"], 2),
    (["runs diagnose", "NOWHERE", "--json"], 2),
    (["parity", "--layouts", "fsdp9"], 2),
    (["chaos", "--list", "--json"], 0),
    (["simulate", "tiny", "--rank", "9"], 2),
    (["study", "ddp-fsdp", "NOWHERE"], 2),
    (["study", "precision", "NOWHERE"], 2),
    (["study"], 2),
    (["bench profile", "engine", "--model", "NOWHERE"], 2),
    (["bench profile"], 2),
    (["export", "NOWHERE", "OUT"], 2),
]


def groups(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if hasattr(command, "commands"):
        yield path
        for name, below in command.commands.items():
            yield from groups(below, (*path, name))


@pytest.mark.parametrize("path", list(groups(get_command(app))), ids=" ".join)
def test_help_describes_every_command_on_one_line_of_80_columns(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = lmworks(capsys, *path, "--help")
    group: Any = get_command(app)
    for name in path:
        group = group.commands[name]
    rows = dict(re.findall(r"^  ([a-z][\w-]*) +(\S.*)$", out, re.MULTILINE))
    assert rows.keys() == group.commands.keys()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert [text for text in rows.values() if not text.endswith(".") or text.endswith("..")] == []


def test_help_is_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = lmworks(capsys, "--help")
    sections = re.findall(r"^(\w[\w ]*):\n((?:  .*\n?)+)", out.partition("Options:")[2], re.MULTILINE)
    listed = {title: re.findall(r"^  (\S+)", text, re.MULTILINE) for title, text in sections}
    assert listed == {panel: list(words) for panel, words in PANELS.items()}
    assert 5 <= len(listed) <= 6 and sum(map(len, listed.values())) <= 30


@pytest.mark.parametrize(("words", "expected"), FORMER)
def test_former_spellings_answer_as_those_of_today(
    words: list[str], expected: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = lmworks(capsys, *words[0].split(), *words[1:])
    after = lmworks(capsys, *Commands.former[words[0]].split(), *words[1:])
    assert before == after and before[0] == expected
    if "--json" in words and expected == 0:
        json.loads(before[1])


def test_every_former_spelling_is_tried_and_leads_to_a_command() -> None:
    assert Commands.former.keys() == {words[0] for words, _ in FORMER}
    for old, new in Commands.former.items():
        command: Any = get_command(app)
        assert old not in command.commands
        for word in new.split():
            command = command.commands[word]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", "'train'"),
        ("kernels", "'bench kernels'"),
        ("paritty", "'prove parity'"),
        ("exprot", "'checkpoint export'"),
    ],
)
def test_suggestions_are_in_the_spelling_of_today(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, typed)
    assert code == 2 and f"No such command '{typed}'. Did you mean {meant}" in err


def test_a_default_command_takes_what_names_no_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert lmworks(capsys, "runs", str(tmp_path), "--json") == lmworks(capsys, "runs", "ls", str(tmp_path), "--json")
    plain, named = (lmworks(capsys, "plan", *run, "tiny", "--no-probe", "--json") for run in ((), ("run",)))
    assert plain[0] == named[0] == 0 and json.loads(plain[1])["memory"] == json.loads(named[1])["memory"]


# What a command must not wait for, unless it uses it: module names, or how they begin.
HEAVY = ("torch", "transformers", "numpy", "lmworks.engine", "lmworks.train", "lmworks.model")
OTHERS = ("lmworks.cli.plan", "lmworks.cli.train", "lmworks.serve", "lmworks.spec.run", "lmworks.record.folder")


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [(["--help"], HEAVY), (["--version"], (*HEAVY, *OTHERS)), (["learn", "list"], (*HEAVY, *OTHERS))],
    ids=["help", "version", "learn"],
)  # fmt: skip
def test_a_command_imports_what_it_uses(words: list[str], unwanted: tuple[str, ...]) -> None:
    code = f"import sys; from lmworks.cli.main import app; app({words!r}, standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = done.stdout.splitlines()[-1].split()
    assert "lmworks.cli.main" in loaded, done.stderr
    assert not {name for name in loaded for start in unwanted if f"{name}.".startswith(f"{start}.")}
