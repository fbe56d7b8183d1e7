"""What these pages tell their reader to type can be typed: commands and options exist, specs are legal."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from lmworks.cli.main import app
from lmworks.spec import load_run
from lmworks.spec.layouts import choose

ROOT = Path(__file__).parent.parent
PLAIN = (
    "precision",
    "checkpoint-commands",
    "parallelism",
    "simulate",
    "planning",
    "plan-memory",
    "serving-plan",
    "calibrate",
    "validation",
    "reference",
    "engine",
    "speculation",
    "adapters",
    "quantization",
    "serving",
    "bench-serve",
    "bench-train",
    "checkpoints",
    "goodput",
    "faults",
    "hangs",
    "reliability",
    "health",
    "kernels",
    "runbooks/loss-spike",
    "kernels-attention",
    "study-precision",
    "native-ops",
)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PLAIN)]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
]
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMAND = get_command(app)


def parse(line: str) -> None:
    """As the command line does it, up to where a command would begin its work."""
    name, *words = shlex.split(line, comments=True)
    command = COMMAND
    context = command.make_context(name, words)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)
    given = context.params
    if given.get("layouts"):
        choose(given["layouts"])
    if given.get("spec"):
        load_run(given["spec"], given.get("overrides") or ())


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("lmworks")])
def test_commands_can_be_typed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(line)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("lmworks trains configs/tiny.toml", "No such command"),
        ("lmworks train configs/tiny.toml --ranks 2", "No such option"),
        ("lmworks train configs/tiny.toml parallel.tp=3", "does not divide"),
        ("lmworks parity --layouts fsdp9", "there is no layout"),
    ],
)
def test_what_cannot_be_typed_is_found(line: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(Exception, match=error):
        parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    missing = sorted(target for target in targets if target and not (page.parent / target).exists())
    assert not missing
