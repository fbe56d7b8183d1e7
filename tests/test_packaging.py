"""What is installed is what a clone has: package data, examples, links that work, a whole source distribution."""

from __future__ import annotations

import email
import fnmatch
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import lmworks
from lmworks.spec import load_run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/lmworks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_package_data_has_every_file() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["lmworks"]
    files = [*PACKAGE.rglob("*"), *(PACKAGE / "configs").rglob("*")]  # rglob does not enter a link
    names = {str(path.relative_to(PACKAGE)) for path in files if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert "configs/tiny.toml" in names
    assert not sorted(name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns))


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest[1] == PROJECT["project"]["version"] == lmworks.__version__


def test_examples_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = load_run(ROOT / "configs/reference/7b-8-h100.toml")
    monkeypatch.chdir(tmp_path)
    assert load_run("configs/reference/7b-8-h100.toml") == here
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.toml").write_text('name = "mine"\n')
    assert load_run("configs/tiny.toml").name == "mine"  # a file of one's own comes first


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source distribution of what git has, built as an installer does it."""
    folder = tmp_path_factory.mktemp("build")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "clone" / name, follow_symlinks=False)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "setuptools>=77"], check=True)
    for backend in ("build_sdist", "build_wheel"):
        code = f"from setuptools import build_meta; build_meta.{backend}({str(folder / 'dist')!r})"
        subprocess.run([python, "-c", code], cwd=folder / "clone", check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_trains_an_example(built: Path, tmp_path: Path) -> None:
    python = built / "venv/bin/python"
    (wheel,) = (built / "dist").glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "requirements.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    words = ["train", "configs/tiny.toml", "optim.steps=2", "log.eval_batches=1", "--json"]
    ended = subprocess.run([built / "venv/bin/lmworks", *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/tiny/report.html").is_file()
    missing = subprocess.run([built / "venv/bin/lmworks", "plan", "validate"], capture_output=True, text=True)
    assert missing.returncode == 2 and len(missing.stderr.splitlines()) == 1 and "--tables" in missing.stderr
    words = ["plan", "validate", "--source", "torchtitan", "--tables", built / "clone/validation", "--json"]
    assert subprocess.run([built / "venv/bin/lmworks", *words], capture_output=True).returncode == 0
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        described = email.message_from_bytes(archive.read(name)).get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", str(described))
    assert len(targets) > 30 and not [target for target in targets if not target.startswith(("https://", "#"))]


@pytest.mark.slow
def test_the_source_distribution_has_docs_and_tests(built: Path) -> None:
    (archive,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    clone = built / "clone"
    wanted = {
        str(path.relative_to(clone))
        for name in ("docs", "tests", "configs", "validation")
        for path in (clone / name).rglob("*.*")
        if path.suffix != ".pyc"  # of what the build itself compiles
    }
    assert wanted and not sorted(wanted - names)
