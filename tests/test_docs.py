"""What these pages tell their reader to type can be typed: commands, options, specs; and what they name is there."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from lmworks.cli.main import app
from lmworks.plan.cluster_request import ClusterRequest, run_on_cluster
from lmworks.spec import load_run
from lmworks.spec.layouts import choose

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
]
LINES = [
    line
    for block in BLOCKS
    for whole in block.replace("\\\n", " ").splitlines()
    for line in re.split(r" (?:&&|\|\||[|;]) ", whole)
]
COMMAND = get_command(app)
MADE = ("runs/tiny/spec.toml", "my-gpus.toml")  # files that a reader has once he has come so far
FILES = re.compile(
    r"(?<![\w./-])(?:[a-z_]+/[a-z_0-9./-]+\.(?:py|toml|txt|sh)|[a-z_]+_(?:cpu|gpu|tune|train|doc)\.json)\b"
)
PLACES = (ROOT, ROOT / "src/lmworks", ROOT / "src/lmworks/learn/course", ROOT / "tests", ROOT / "benchmarks/results")


def parse(line: str) -> None:
    """As the command line does it, up to where a command would begin its work."""
    name, *words = shlex.split(line, comments=True)
    command = COMMAND
    context = command.make_context(name, words)
    while hasattr(command, "resolve_command"):
        if not (context._protected_args or context.args) and command.invoke_without_command:
            return
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)
    given = context.params
    if given.get("layouts"):
        choose(given["layouts"])
    if given.get("spec") and not any(name in line for name in MADE):
        asked = {field.name: given[field.name] for field in fields(ClusterRequest) if field.name in given}
        if asked.keys() == {field.name for field in fields(ClusterRequest)}:  # plan memory
            run_on_cluster(given["spec"], given["overrides"], ClusterRequest(**asked))
        else:
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
        ("lmworks prove parity --layouts fsdp9", "there is no layout"),
    ],
)
def test_what_cannot_be_typed_is_found(line: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(Exception, match=error):
        parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_have_a_header(page: Path) -> None:
    """An empty line within a table ends it: what follows is shown as text."""
    text = without_code(page)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert not [table for table in tables if not re.match(r"\|.*\n\|[-:| ]+\n", table)]


def test_the_changelog_lists_every_command() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("- **Commands**: ")[1]
    listed = {
        name: set(re.findall(r"[\w-]+", words)) for name, words in re.findall(r"`([\w-]+)`(?:\s+\(([^)]*)\))?", text)
    }
    assert listed == {name: set(getattr(command, "commands", ())) for name, command in COMMAND.commands.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """In code `kernel[grid](x)` is a call."""
    text = without_code(page)
    targets = {target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target}
    assert not sorted(target for target in targets if not leads_somewhere(page, target))


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    there = page.parent / name if name else page
    return there.exists() and (not anchor or anchor in anchors(there))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = without_code(page)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "log"], ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    """In the text, between backticks; what a fenced block says may be of the reader's own."""
    text = without_code(page)
    named = {name for span in re.findall(r"`([^`\n]+)`", text) for name in FILES.findall(span)}
    named = {name for name in named if not name.startswith("deliverables/")}  # of a lesson: the reader's own
    assert not sorted(name for name in named if not any((place / name).exists() for place in PLACES))
