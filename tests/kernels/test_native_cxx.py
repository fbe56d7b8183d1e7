"""CXX as people set it: a program, a path with spaces, or a command of several words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from lmworks.kernels.native import build
from lmworks.kernels.native.rms_norm import NAME, SOURCES
from lmworks.spec import LMWorksError


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with ninja, a compiler, and a wrapper that runs what it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    tool(folder, "ninja", "")
    tool(folder, "g++", 'echo "g++ 13 $*"')
    tool(folder, "wrap", 'echo "wrapped"\nexec "$@"')
    return folder


def tool(folder: Path, name: str, does: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def test_cxx_with_several_words(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is handed one program, which runs all of them."""
    said: list[str] = []

    def load(*_args: object, **_named: object) -> None:
        program = cpp_extension.get_cxx_compiler()
        said.append(subprocess.run([program, "-c", "a b.cpp"], capture_output=True, text=True, check=True).stdout)

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setenv("CXX", "wrap g++ '-DX=a b'")
    plan = build.plan_build(NAME, SOURCES)
    assert plan.compilers == (f"{tools / 'wrap'} g++ '-DX=a b'",)
    plan.folder.mkdir(parents=True)
    build.compile_sources(plan)
    assert said == ["wrapped\ng++ 13 -DX=a b -c a b.cpp\n"]
    assert os.environ["CXX"] == "wrap g++ '-DX=a b'"


def test_cxx_options_are_in_library_key(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for command in ("g++", "wrap g++", "wrap g++ -m32"):
        monkeypatch.setenv("CXX", command)
        keys.append(build.plan_build(NAME, SOURCES).key)
    assert len(set(keys)) == 3


def test_cxx_path_with_spaces(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tool(tools / "my tools", "g++", "echo g++ 13")
    monkeypatch.setenv("CXX", str(path))
    plan = build.plan_build(NAME, SOURCES)
    assert plan.compilers == (f"'{path}'",)
    assert "g++ 13" in build.version_of(plan.compilers[0])
    with build.cxx_as_one_program(tools):
        assert cpp_extension.get_cxx_compiler() == str(path)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("ccache g++", "there is no compiler 'ccache' here: install one"),
        ("wrap clang++", r"'wrap clang\+\+', which CXX names, does not run \(.*clang\+\+.*\): install what is missing"),
        ("g++ '", r"is not a command \(No closing quotation\): write it as for a shell, e\.g\. g\+\+"),
        ("", "there is no compiler '' here"),
    ],
)
def test_missing_cxx_is_reported(tools: Path, monkeypatch: pytest.MonkeyPatch, command: str, missing: str) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(LMWorksError, match=missing) as refused:
        build.plan_build(NAME, SOURCES)
    assert "\n" not in str(refused.value)
