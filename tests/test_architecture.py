"""The architecture, enforced: a room imports only from the floors below it (docs/architecture.md)."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmworks

SOURCE = Path(lmworks.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"

FLOORS = [
    {"spec"},
    {"plan", "record", "launch", "kernels", "data", "sandbox", "trace"},
    {"model", "diagnose", "curate", "editor", "observability"},
    {"parallel", "report"},
    {"engine", "checkpoint"},
    {"train", "serve", "sweep"},
    {"align", "loading", "weight_prefetch"},  # the last two: files
    {"llm", "bench", "prove", "tune", "scaling", "evals", "gateway", "fleet"},
    {"drill", "learn"},
    {"cli", "ui"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = {
    *("spec", "plan", "record", "launch", "diagnose", "report", "sandbox", "trace", "sweep", "tune", "scaling"),
    *("curate", "editor", "fleet", "gateway", "drill", "observability"),
    "checkpoint/format",
}


def modules() -> list[Path]:
    """Every module; the package itself and what is run (__main__) are above all floors."""
    above = {SOURCE / "__init__.py"}
    return sorted(path for path in SOURCE.rglob("*.py") if path not in above and path.name != "__main__.py")


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute names of all that a module imports, anywhere in it: at its top, in functions, for type checkers."""
    return tuple(imported_names(path))


def imported_names(path: Path) -> Iterator[str]:
    package = ["lmworks", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def room_imports() -> dict[str, set[str]]:
    """Room → the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in modules():
        here = found.setdefault(room_of(path), set())
        here |= {name.split(".")[1] for name in imports(path) if name.startswith("lmworks.")} & FLOOR.keys()
    return {room: others - {room} for room, others in found.items()}


def picture() -> str:
    """A Mermaid graph of the rooms: an edge to each room on the nearest floors that explains the others."""
    edges = room_imports()

    def below(room: str) -> set[str]:
        return edges[room].union(*(below(other) for other in edges[room])) if edges.get(room) else set()

    lines = ["```mermaid", "graph TD"]
    for floor, rooms in reversed(list(enumerate(FLOORS))):
        if here := sorted(rooms & edges.keys()):
            lines.append(f"  subgraph floor{floor}[floor {floor}]")
            lines += [f"    {room}" for room in here]
            lines.append("  end")
    for room in sorted(edges, key=lambda room: (-FLOOR[room], room)):
        direct = {one for one in edges[room] if not any(one in below(other) for other in edges[room] - {one})}
        lines += [f"  {room} --> {one}" for one in sorted(direct, key=lambda one: (-FLOOR[one], one))]
    return "\n".join([*lines, "```"])


def test_the_picture_of_the_rooms_is_drawn_from_the_imports() -> None:
    assert picture() in PAGE.read_text(encoding="utf-8"), "python tests/test_architecture.py draws it anew"


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in modules()} <= FLOOR.keys()


def wrong_imports(path: Path) -> Iterator[str]:
    room, place = room_of(path), path.relative_to(SOURCE).as_posix()
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "torch" and {room, path.relative_to(SOURCE).parent.as_posix()} & WITHOUT_TORCH:
            yield f"{place} imports {name}, and its room does without torch"
        if top != "lmworks":
            continue
        other = rest[0] if rest else ""
        if other == "__version__" or other == room:
            continue
        if other not in FLOOR:
            yield f"{place} imports {name}: go to the room that holds it"
        elif FLOOR[other] >= FLOOR[room]:
            yield f"{place} (floor {FLOOR[room]}) imports {name} ({FLOOR[other]})"


def test_imports_go_down() -> None:
    assert len(modules()) > 500
    assert not [wrong for path in modules() for wrong in wrong_imports(path)]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import torch", "does without torch"),
        ("def later():\n    from ..train import Trainer", r"\(floor 1\) imports lmworks.train.Trainer \(5\)"),
        ("from ..record import RunFolder", r"\(floor 1\) imports lmworks.record.RunFolder \(1\)"),
        ("import lmworks", "go to the room that holds it"),
        ("from .. import __version__\nfrom ..spec import RunSpec\nfrom .case import Case", None),
    ],
)
def test_a_wrong_import_is_found(text: str, wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "plan").mkdir()
    (path := tmp_path / "plan" / "new.py").write_text(text, encoding="utf-8")
    found = list(wrong_imports(path))
    assert (found == []) if wrong is None else (len(found) == 1 and re.search(wrong, found[0])), found


@pytest.mark.parametrize(
    "code",
    [
        "import lmworks; lmworks.RunSpec, lmworks.ModelSpec, lmworks.Cluster, dir(lmworks)",
        "import lmworks; lmworks.SamplingParams(temperature=0.5)",
        "import lmworks.spec, lmworks.plan, lmworks.record, lmworks.launch",
        "from lmworks.cli.main import app; app(['--help'], standalone_mode=False)",
        "from lmworks.cli.main import app; app(['train', '--help'], standalone_mode=False)",
        "from lmworks.cli.main import app; app(['bench', 'offline', '--help'], standalone_mode=False)",
        "from lmworks.cli.main import app; app(['models', '--json'], standalone_mode=False)",
    ],
)
def test_no_torch_before_it_is_needed(code: str) -> None:
    check = "import sys; heavy = {'torch', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_names_of_test_modules_are_unique() -> None:
    """pytest imports them by their bare names: of two that are equal, a run of all tests has one."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition("<!-- made: rooms -->\n")
    PAGE.write_text(
        f"{head}<!-- made: rooms -->\n{picture()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}", encoding="utf-8"
    )
