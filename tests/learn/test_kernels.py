"""The interpreter of checks: what kernels touch, count and leave undefined, and what a compiler makes of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.learn.answers import load, write_references
from lmworks.learn.checking import check as checking
from lmworks.learn.checking.check import check_exercise
from lmworks.learn.checking.compiler import refusal
from lmworks.learn.checking.expect import Mismatch
from lmworks.learn.checking.kernel_memory import watch
from lmworks.learn.checking.run_isolated import run_isolated
from lmworks.learn.checking.traffic import TRAFFIC
from lmworks.learn.exercise import exercises
from lmworks.learn.progress import record_verdict
from lmworks.learn.workspace import Workspace

KERNELS = """
from kernels.device import tl, triton


@triton.jit
def copy(x_ptr, out_ptr, n, first, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n))


@triton.jit
def add_up(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr + tl.arange(0, BLOCK) * 0, tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def square(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x * x)


@triton.jit
def helper(x):
    return x + nothing


@triton.jit
def breaks(x_ptr, BLOCK: tl.constexpr):
    helper(tl.load(x_ptr + tl.arange(0, BLOCK)))


@triton.jit
def changes(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = 0.0
    for _ in range(0, n):
        total += tl.load(x_ptr + at)
    tl.store(out_ptr + at, total)
"""


def in_isolation(folder: Path, function: Callable[[Any], Any]) -> Any:
    """Of a module with these kernels; this process is left as it is."""
    write_references(folder)
    (folder / "src/kernels/mine.py").write_text(KERNELS)
    outcome = run_isolated(lambda: function(load(folder, "src/kernels/mine.py")), folder, 60)
    assert outcome.result is not None, outcome
    return outcome.result


def copied(module: Any, x: torch.Tensor, out: torch.Tensor, **sizes: int) -> list[Any]:
    """What is refused: the case, and the elements."""
    try:
        with watch("a copy"):
            module.copy[(1,)](x, out, **sizes)
    except Mismatch as wrong:
        return [wrong.case, wrong.expected, wrong.got]
    return []


def touched(module: Any) -> dict[str, list[Any]]:
    x, out, kept = torch.arange(16.0), torch.zeros(16), torch.zeros(16)
    found = {
        "all": copied(module, x, out, n=16, first=0, BLOCK=16),
        "load": copied(module, x[:10], out, n=16, first=0, BLOCK=16),
        "store": copied(module, x, kept[:10], n=16, first=0, BLOCK=16),
        "before": copied(module, x[4:], out, n=16, first=-2, BLOCK=4),
        "rows of a wider tensor": copied(module, x.view(4, 4)[:, :2], out, n=14, first=0, BLOCK=16),
        "beyond them": copied(module, x.view(4, 4)[:, :2], out, n=15, first=0, BLOCK=16),
    }
    return found | {"kept": kept.tolist()}


def test_what_lies_outside_of_a_tensor_is_not_touched(tmp_path: Path) -> None:
    assert in_isolation(tmp_path / "lmworks-learn-1", touched) == {
        "all": [],
        "load": ["a copy: elements of x_ptr in a load", "0 ≤ element < 10", "10, 11, 12, 13, 14, 15"],
        "store": ["a copy: elements of out_ptr in a store", "0 ≤ element < 10", "10, 11, 12, 13, 14, 15"],
        "before": ["a copy: elements of x_ptr in a load", "0 ≤ element < 12", "-2, -1"],
        "rows of a wider tensor": [],
        "beyond them": ["a copy: elements of x_ptr in a load", "0 ≤ element < 14", "14"],
        "kept": [0.0] * 16,
    }


def counted(module: Any) -> dict[str, Any]:
    x, out, total = torch.arange(8.0), torch.zeros(8), torch.zeros(1)
    with watch("counts") as memory:
        module.copy[(3,)](x, out, n=5, first=0, BLOCK=8)
        module.add_up[(1,)](x, total, BLOCK=8)
        fresh = torch.empty(8), torch.empty_like(x), torch.zeros(2)
    halves = torch.tensor([1.5, -3.0]).bfloat16()
    squares = torch.empty_like(halves)
    with watch("bf16"):
        module.square[(1,)](halves, squares, BLOCK=2)
    read, written = memory.of(x), memory.of(out)
    return {
        "read": [read.read, read.most_read, read.written],
        "written": written.written,
        "bytes": memory.bytes(),
        "undefined": out.isnan().tolist(),
        "sum": total.tolist(),
        "fresh": [bool(one.isnan().all()) for one in fresh],
        "bf16": squares.tolist(),
    }


def test_elements_are_counted_and_nothing_is_there_by_luck(tmp_path: Path) -> None:
    assert in_isolation(tmp_path / "lmworks-learn-2", counted) == {
        "read": [3 * 5 + 8, 8, 0],
        "written": 3 * 8,
        "bytes": [4 * 23, 4 * (24 + 8)],  # the atomic sum writes eight times
        "undefined": [False] * 5 + [True] * 3,
        "sum": [28.0],
        "fresh": [True, True, False],
        "bf16": [2.25, 9.0],
    }


def errors(module: Any) -> dict[str, Any]:
    x, found = torch.zeros(4), {}
    try:
        with watch("an error"):
            module.breaks[(1,)](x, BLOCK=4)
    except NameError as error:
        found["inner"] = str(error)
    for name in ("changes", "copy"):
        with watch(name) as memory:
            module.changes[(1,)](x, x, 3, BLOCK=4) if name == "changes" else module.copy[(1,)](x, x, 4, 0, BLOCK=4)
        found[name] = refusal(getattr(module, name), memory.arguments)
    return found


def test_errors_are_the_kernels_own_and_the_compilers(tmp_path: Path) -> None:
    """A sum that begins as a number runs in the interpreter; compiled, it may not become a block within the loop."""
    found = in_isolation(tmp_path / "lmworks-learn-3", errors)
    assert found["inner"] == "name 'nothing' is not defined" and found["copy"] is None
    line, why = found["changes"]
    assert line == "for _ in range(0, n):" and "Loop-carried variable total has initial type fp32" in why


def test_triton_that_was_imported_to_compile_is_imported_anew(tmp_path: Path) -> None:
    def imported_before() -> Any:
        os.environ.pop("TRITON_INTERPRET", None)
        before = importlib.import_module("triton.language")
        compiled = type(before.sum).__name__
        module = load(tmp_path / "lmworks-learn-4", "src/kernels/softmax.py")
        return compiled, type(module.tl.sum).__name__, module.softmax(torch.zeros(1, 4)).tolist()

    write_references(tmp_path / "lmworks-learn-4")
    outcome = run_isolated(imported_before, tmp_path / "lmworks-learn-4", 60)
    assert outcome.result == ["JITFunction", "InterpretedFunction", [[0.25] * 4]], outcome


def traffic(name: str, folder: Path) -> list[str]:
    return TRAFFIC[name](load(folder, exercises()[name].file))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        # a row of 256: x, delta and the sum are read, and the weight by each of two programs; r is a number a row
        ("triton_add", [["51,200", "32,832"], ["34,816", "32,832"]]),
        # op by op 5 N + 2 rows numbers are read, and 3 N + 2 rows written
        ("triton_softmax", [["64,000", "64,000"], ["320,128", "192,128"]]),
        pytest.param(
            "triton_matmul",
            [["16,777,216", "65,536", "0.2"], ["1,048,576", "65,536", "3.8"], ["524,288", "65,536", "7.1"],
             ["262,144", "65,536", "12.8"]],
            marks=pytest.mark.slow,
        ),
        # q once, and of k and v the 32, 64, … 256 keys up to the diagonal; ours writes log Σ exp as well. Op by op the
        # scores, 524,288 bytes, are written and read four times, the mask is read once
        pytest.param(
            "triton_attention",
            [["1,310,720", "131,072"], ["1,310,720", "133,120"], ["2,555,904", "2,228,224"]],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_bytes_that_solutions_move(tmp_path: Path, name: str, rows: list[list[str]]) -> None:
    folder = tmp_path / "lmworks-learn-5"
    write_references(folder)
    outcome = run_isolated(partial(traffic, name, folder), folder, 60)
    assert [line.split()[-len(rows[0]) :] for line in outcome.result[2:]] == rows, outcome


def test_without_triton_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace.create(tmp_path / "course")
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None)
    verdict = check_exercise(workspace, exercises()["triton_add"])
    assert verdict.status == "unavailable" and not verdict.passed
    assert verdict.message == 'this needs Triton; on Linux, `pip install "lmworks[learn]"` brings it'
    assert record_verdict(workspace.folder, verdict).of("triton_add").tries == 0
    assert check_exercise(workspace, exercises()["rmsnorm"]).status == "unfinished"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["add", "softmax", "matmul", "attention"])
def test_programs_of_kernels_run_with_nothing_written(tmp_path: Path, program: str) -> None:
    workspace = Workspace.create(tmp_path / "course")
    command = [sys.executable, f"src/kernels/{program}.py"]
    done = subprocess.run(command, cwd=workspace.folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("from PyTorch") == 2, done.stderr
    assert f"exercise triton_{program} is not written yet" in done.stderr
    apart = [float(line.partition("at most ")[2].split()[0]) for line in done.stdout.splitlines()]
    assert max(apart) < 0.02, done.stdout


@pytest.mark.slow
def test_a_program_without_triton_says_what_to_install(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "course")
    code = "import runpy, sys; sys.modules['triton'] = None; runpy.run_path('src/kernels/add.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace.folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'kernels need Triton; on Linux, `pip install "lmworks[learn]"` brings it\n'
