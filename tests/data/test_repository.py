"""Repositories as documents: order by imports, metadata, and retrieval of similar files."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from corpora import folder_bytes

from lmworks.data import TokenData, prepare
from lmworks.data.repository import imported_modules, order_files, repository_pieces, share_of
from lmworks.data.similar_files import SimilarFiles, context_files, identifiers
from lmworks.data.sources import Reading
from lmworks.data.tokenizer import load_tokenizer
from lmworks.spec import DataError, SpecError

FILES = {
    "README.md": "a package",
    "src/app/__init__.py": "",
    "src/app/main.py": "from .core.model import Model\nfrom app import util\nimport os\n\nModel(util.helper())\n",
    "src/app/util.py": "import app.core.base\n\ndef helper():\n    return app.core.base.NAME\n",
    "src/app/core/__init__.py": "from . import base",
    "src/app/core/base.py": "NAME = 'x'\n",
    "src/app/core/model.py": "from ..util import helper\nfrom .base import (\n    NAME,\n)\n\nclass Model: ...\n",
    "tests/test_main.py": "from app.main import Model\n",
    "broken.py": "def f(:\n",
}


def test_a_file_comes_after_what_it_imports() -> None:
    ordered = order_files(FILES)
    assert sorted(ordered) == sorted(FILES)
    place = {path: number for number, path in enumerate(ordered)}
    for user, needed in {
        "src/app/main.py": ["src/app/core/model.py", "src/app/util.py"],
        "src/app/core/model.py": ["src/app/util.py", "src/app/core/base.py"],
        "src/app/util.py": ["src/app/core/base.py"],
        "src/app/core/__init__.py": ["src/app/core/base.py"],
        "tests/test_main.py": ["src/app/main.py"],
    }.items():
        assert all(place[one] < place[user] for one in needed), user
    # Nothing to wait for: by path, and as early as that allows.
    assert ordered[:2] == ["README.md", "broken.py"]


def test_the_order_does_not_depend_on_that_of_the_files() -> None:
    names = list(FILES)
    for seed in range(10):
        random.Random(seed).shuffle(names)
        assert order_files({name: FILES[name] for name in names}) == order_files(FILES)


def test_circles_of_imports_are_cut() -> None:
    files = {"a.py": "import b", "b.py": "import c", "c.py": "import a", "d.py": "import a, b", "e.py": ""}
    assert order_files(files) == ["e.py", "a.py", "c.py", "b.py", "d.py"]


def test_imports_are_pythons_own() -> None:
    text = "import a.b as x, c\nfrom ..d import e, f\nfrom . import g\nif 1:\n    from h.i import (j,\n k)\n"
    found = {".".join(name) for name in imported_modules("p/q/r.py", text)}
    assert found == {"a.b", "c", "p.d.e", "p.d.f", "p.q.g", "h.i.j", "h.i.k"}


def test_metadata_is_dropped_by_name() -> None:
    files = {"b.py": "import a\n", "a.py": "x = 1\n"}
    with_names = (("<repo_name>", "r"), ("<file_sep>", "a.py\nx = 1\n"), ("<file_sep>", "b.py\nimport a\n"))
    assert repository_pieces("r", files, 0.0) == with_names
    assert repository_pieces("r", files, 1.0) == (("<file_sep>", "x = 1\n"), ("<file_sep>", "import a\n"))
    dropped = sum(share_of(f"repository-{number}") < 0.3 for number in range(4000))
    assert abs(dropped / 4000 - 0.3) < 0.03


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repositories")
    for number in range(6):
        for path, text in FILES.items():
            file = root / f"project-{number}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("helper", f"helper_{number}"))
        (root / f"project-{number}" / "logo.png").write_bytes(b"\x89PNG\0\0")
    (root / "loose.py").write_text("y = 2\n")
    return root


def test_a_repository_is_one_document(repositories: Path, tmp_path: Path) -> None:
    reading = Reading(repositories=True, metadata_dropout=0.5)
    made = prepare([str(repositories)], tmp_path / "one", "bpe:350+code", val_fraction=0, workers=1, reading=reading)
    again = prepare([str(repositories)], tmp_path / "two", "bpe:350+code", val_fraction=0, workers=2, reading=reading)
    assert folder_bytes(made.folder) == folder_bytes(again.folder)
    assert made.index.dropped["unreadable"] == 6 and made.index.documents("train") == 7
    tokenizer, data = load_tokenizer(made.folder), TokenData.open(made.folder)
    repo, sep = tokenizer.token_id("<repo_name>"), tokenizer.token_id("<file_sep>")
    starts = [*data.document_starts(0, len(data)).tolist(), len(data)]
    names = {}
    for first, last in itertools.pairwise(starts):
        tokens = data.read(first, last).tolist()
        assert tokens.pop() == tokenizer.eot and tokenizer.eot not in tokens
        files = "".join("\0" if token == sep else tokenizer.decode([token]) for token in tokens).split("\0")
        if tokens[0] == repo:
            names[files[0]] = [file.partition("\n")[0] for file in files[1:]]
        else:
            assert tokens[0] == sep and all(not file.startswith("src/") for file in files)
    expected = {name for name in names if share_of(name) >= 0.5}
    assert set(names) == expected and 0 < len(names) < 7
    not_empty = [path for path in order_files(FILES) if FILES[path].strip()]
    assert all(paths == not_empty for name, paths in names.items() if name.startswith("project-"))


def test_refusals(repositories: Path, tmp_path: Path) -> None:
    reading = Reading(repositories=True)
    with pytest.raises(DataError, match=r"no token <(repo_name|file_sep)>; bpe:N\+code has one"):
        prepare([str(repositories)], tmp_path / "bytes", "bytes", workers=1, reading=reading)
    with pytest.raises(SpecError, match="is no folder"):
        prepare([str(repositories / "loose.py")], tmp_path / "file", "bpe:350+code", workers=1, reading=reading)
    with pytest.raises(SpecError, match="--metadata-dropout 2"):
        wrong = Reading(repositories=True, metadata_dropout=2)
        prepare([str(repositories)], tmp_path / "wrong", "bpe:350+code", workers=1, reading=wrong)


# --- similar files ----------------------------------------------------------------------------------------


def test_bm25_is_that_of_its_formula() -> None:
    draw = random.Random(0)
    words = [f"name{n}" for n in range(30)]
    files = {f"f{n}.py": " ".join(draw.choices(words, k=draw.randint(5, 60))) for n in range(20)}
    query = " ".join(draw.sample(words, 6))
    found = dict(SimilarFiles(files).rank(query, most=99))
    mean = sum(len(text.split()) for text in files.values()) / len(files)
    for path, text in files.items():
        expected = 0.0
        for word in set(query.split()):
            held = sum(word in other.split() for other in files.values())
            often = text.split().count(word)
            idf = math.log((len(files) - held + 0.5) / (held + 0.5) + 1)
            expected += idf * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * len(text.split()) / mean))
        assert found.get(path, 0.0) == pytest.approx(expected)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_jaccard_and_order() -> None:
    files = {"a.py": "alpha beta gamma", "b.py": "alpha beta", "c.py": "delta", "d.py": "beta alpha"}
    assert SimilarFiles(files).rank("alpha + beta", method="jaccard") == [("b.py", 1.0), ("d.py", 1.0), ("a.py", 2 / 3)]
    assert identifiers("x = foo_1(bar.Baz, 'é')") == ["foo_1", "bar", "Baz"]


def test_the_file_that_defines_the_names_is_found() -> None:
    """Of the standard library: code that uses a module's own names finds that module."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.name: path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.glob("*.py"))}
    for name, use in {
        "textwrap.py": "TextWrapper(width=70, subsequent_indent='').fill(text)",
        "fractions.py": "Fraction.limit_denominator(x, max_denominator=7)",
        "sched.py": "scheduler.enterabs(time, priority, action, argument)",
    }.items():
        assert name in [path for path, _ in SimilarFiles(files).rank(use, most=2)], name


def test_context_fits_and_ends_with_the_most_similar() -> None:
    files = {"a.py": "alpha beta", "b.py": "alpha " * 50, "c.py": "alpha", "now.py": "alpha beta"}
    chosen = context_files(SimilarFiles(files), "now.py", "alpha beta", most_characters=40)
    assert [path for path, _ in chosen] == ["c.py", "a.py"]
