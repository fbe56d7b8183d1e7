"""The operator in C++ and CUDA: what is said where it cannot be built, when it is built again, and what it computes."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import cpp_extension

from lmworks.kernels import native
from lmworks.kernels.native import build
from lmworks.kernels.native.rms_norm import NAME, SOURCES
from lmworks.kernels.rms_norm import rms_norm
from lmworks.spec import LMWorksError

EPS = 1e-5


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def tool(folder: Path, name: str, says: str = "") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_missing_compiler_is_reported(tools: Path) -> None:
    with pytest.raises(LMWorksError, match=r"rms_norm_native is built from C\+\+ .* no compiler 'c\+\+' here: install"):
        build.plan_build(NAME, SOURCES)
    tool(tools, "c++")
    with pytest.raises(LMWorksError, match="ninja, which is not on the PATH: pip install ninja"):
        build.plan_build(NAME, SOURCES)
    tool(tools, "ninja")
    assert build.plan_build(NAME, SOURCES).sources == SOURCES[:1]  # no GPU here: the CPU's part alone


def test_library_key_depends_on_inputs(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tools / "op.cpp"
    source.write_text("int f();")
    plan = build.Build("op", (source,), (str(tool(tools, "c++", "c++ 12")),))
    keys = [plan.key]
    source.write_text("int g();")
    keys.append(plan.key)
    tool(tools, "c++", "c++ 13")
    keys.append(plan.key)
    for name, value in (("CPP_FLAGS", ("-O0",)), ("processor", lambda: "another")):
        monkeypatch.setattr(build, name, value)
        keys.append(plan.key)
    monkeypatch.setattr(torch, "__version__", "0.0")
    keys.append(plan.key)
    assert len(set(keys)) == len(keys)
    assert plan.key == keys[-1]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Build:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.ops, "load_library", lambda _path: None)
    source = tmp_path / "op.cpp"
    source.write_text("")
    return build.Build("op", (source,), ())


def test_concurrent_builds_compile_once(plan: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def slowly(_plan: build.Build) -> None:
        time.sleep(0.05)
        built.append(1)
        plan.library.touch()

    monkeypatch.setattr(build, "compile_sources", slowly)
    threads = [threading.Thread(target=build.load_library, args=(plan,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_interrupted_build_is_repeated(plan: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """cpp_extension's own lock, which a killed build leaves behind, would be waited for without end."""
    calls: list[bool] = []

    def stopped(*_args: object, **_named: object) -> None:
        calls.append((plan.folder / "lock").exists())
        (plan.folder / "lock").touch()
        (plan.folder / "op.so").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(cpp_extension, "load", stopped)
    with pytest.raises(KeyboardInterrupt):
        build.load_library(plan)
    build.load_library(plan)
    assert calls == [False, False]


def test_missing_library_is_rebuilt(plan: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def compiled(_plan: build.Build) -> None:
        built.append(1)
        plan.library.touch()

    monkeypatch.setattr(build, "compile_sources", compiled)
    for _ in range(2):
        build.load_library(plan)
    assert built == [1]
    plan.library.unlink()
    build.load_library(plan)
    assert built == [1, 1]


def test_damaged_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    damaged = build.Build("op", (), ())
    monkeypatch.setattr(build, "compile_sources", lambda _plan: damaged.library.write_text("no library"))
    with pytest.raises(LMWorksError, match=r"op\.so cannot be loaded .*remove its folder, and it is built again"):
        build.load_library(damaged)


def test_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        LMWorksError, match=r"cannot be written \(Not a directory\); name another folder in LMWORKS_CACHE"
    ):
        build.load_library(build.Build("op", (), ()))


def test_failed_build_can_be_retried(plan: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same process: after a compiler was mended, and after a source was."""
    built: list[str] = []

    def build_library(*, name: str, build_directory: str, **_named: object) -> None:
        built.append(name)
        if len(built) == 1:
            raise RuntimeError("Error building extension 'op': it was not there")

    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", build_library)
    with pytest.raises(LMWorksError, match="op could not be built"):
        build.load_library(plan)
    build.load_library(plan)
    plan.sources[0].write_text("int f();")
    build.load_library(plan)
    assert built == ["op", "op", "op"]


def test_compiler_output_is_in_error(plan: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_named: object) -> None:
        raise RuntimeError("Error building extension 'op':\nop.cpp:3:7: error: 'x' was not declared\nninja: stopped\n")

    monkeypatch.setattr(cpp_extension, "load", fails)
    with pytest.raises(
        LMWorksError, match=r"op could not be built \(op.cpp:3:7: error: 'x' was not declared\)"
    ) as said:
        build.load_library(plan)
    assert "ninja: stopped" in (plan.folder / "build.log").read_text()
    assert "\n" not in str(said.value)


# --- what it computes: built for real ---------------------------------------------------------------------


buildable = pytest.mark.skipif(
    shutil.which("ninja") is None or shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a compiler"
)


def gradients(x: Tensor, weight: Tensor, grad: Tensor, norm: object) -> list[Tensor]:
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = norm(x, weight)  # type: ignore[operator]
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.slow
@buildable
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (3, 130), (2, 5, 3, 24), (200, 257), (0, 8)])
def test_native_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], generator=rng)
    mine = gradients(x, weight, grad, lambda x, w: rms_norm(x, w, EPS, "native"))
    theirs = gradients(x.double(), weight.double(), grad, lambda x, w: F.rms_norm(x, w.shape, w, EPS))
    assert [one.dtype for one in mine] == [dtype, dtype, torch.float32]
    for one, other in zip(mine, theirs, strict=True):
        step = torch.finfo(one.dtype).eps
        atol = 4 * step * (other.abs().max().item() if other.numel() else 0)
        torch.testing.assert_close(one.double(), other, rtol=step, atol=atol if one.dtype == torch.float32 else 1e-5)


@pytest.mark.slow
@buildable
def test_native_passes_opcheck() -> None:
    native.load()
    op = torch.ops.lmworks.rms_norm_native.default
    for dtype in (torch.float32, torch.bfloat16):
        for x in (torch.randn(4, 3, 10).to(dtype), torch.randn(3, 4, 10).to(dtype).transpose(0, 1)):
            torch.library.opcheck(op, (x.requires_grad_(), torch.randn(10, requires_grad=True), EPS))
    with pytest.raises(RuntimeError, match=r"weight must be \(10\), as the last dimension of x, not \[3\]"):
        op(torch.zeros(2, 10), torch.zeros(3), EPS)
    with pytest.raises(NotImplementedError, match="not implemented for 'Double'"):
        op(torch.zeros(2, 10, dtype=torch.float64), torch.zeros(10), EPS)


@pytest.mark.slow
@buildable
def test_native_in_a_compiled_graph() -> None:
    native.load()
    x, weight, grad = torch.randn(6, 40), torch.randn(40), torch.randn(6, 40)

    def net(x: Tensor, weight: Tensor) -> Tensor:
        return native.rms_norm(x * 2, weight, EPS).relu()

    compiled = torch.compile(net, fullgraph=True)
    for one, other in zip(gradients(x, weight, grad, compiled), gradients(x, weight, grad, net), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@buildable
def test_weight_gradient_does_not_depend_on_threads() -> None:
    native.load()
    rng = torch.Generator().manual_seed(1)
    x, grad = torch.randn(1000, 300, generator=rng), torch.randn(1000, 300, generator=rng)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(x, torch.ones(300), grad, lambda x, w: rms_norm(x, w, EPS, "native"))[2])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_part_compiles_for_hopper(tmp_path: Path) -> None:
    """Only to an object, and as cpp_extension would: a PyTorch without CUDA has the headers but no library to link."""
    command = [
        "nvcc", "-c", str(SOURCES[1]), "-o", str(tmp_path / "rms_norm.o"), "-std=c++20", "-Xptxas", "-v",
        *build.CUDA_FLAGS, *cpp_extension.COMMON_NVCC_FLAGS, "-gencode=arch=compute_90,code=sm_90",
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", *(f"-I{path}" for path in cpp_extension.include_paths("cpu")),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = [line for line in done.stderr.splitlines() if "spill stores" in line]
    assert len(spills) >= 12  # forward and backward, three precisions, with wide loads and without
    assert all(", 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
