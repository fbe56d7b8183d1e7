"""Who does an op follows from what was measured, and from nothing where nothing was."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmworks.kernels import dispatch
from lmworks.spec import LMWorksError, SpecError

GPU = torch.device("cuda", 0)
TABLE = """
["NVIDIA H200".measured]
rms_norm = "some day"

["NVIDIA H200".rms_norm]
"hidden=1024 tokens=4096" = "torch"
"hidden=8192 tokens=4096" = "triton"

["NVIDIA H1*".rms_norm]
"hidden=1024 tokens=4096" = "native"
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Whatever other tests have read."""
    for cached in (dispatch.table, dispatch.measured_points, dispatch.nearest):
        cached.cache_clear()
    yield
    for cached in (dispatch.table, dispatch.measured_points, dispatch.nearest):
        cached.cache_clear()


def on(device: str, table: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of this name, where this was measured."""
    file = folder / "measured.toml"
    file.write_text(table, encoding="utf-8")
    monkeypatch.setattr(dispatch, "MEASURED", file)
    monkeypatch.setattr(dispatch, "device_name", lambda _device: device)


@pytest.mark.parametrize(
    ("device", "shape", "winner"),
    [
        ("NVIDIA H200", {"tokens": 4096, "hidden": 1024}, "torch"),
        ("NVIDIA H200", {"tokens": 4096, "hidden": 2048}, "torch"),  # one doubling from the first, two from the other
        ("NVIDIA H200", {"tokens": 64, "hidden": 4096}, "triton"),
        ("NVIDIA H100 80GB HBM3", {"tokens": 4096, "hidden": 8192}, "native"),
        ("NVIDIA B200", {"tokens": 4096, "hidden": 8192}, "torch"),
    ],
)
def test_nearest_measured_shape_is_used(
    device: str, shape: dict[str, int], winner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device, TABLE, tmp_path, monkeypatch)
    assert dispatch.fastest("rms_norm", GPU, **shape) == winner
    assert dispatch.fastest("rope", GPU, **shape) == "torch"  # an op that nobody measured
    assert dispatch.fastest("rms_norm", torch.device("cpu"), **shape) == "torch"


def test_empty_tensor_uses_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may hold no rows of any weight whose gradients are summed together."""
    on("NVIDIA H200", TABLE, tmp_path, monkeypatch)
    assert dispatch.fastest("rms_norm", GPU, tokens=0, hidden=8192) == "torch"


def test_implementation_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on("NVIDIA H100", TABLE, tmp_path, monkeypatch)
    known = ("torch", "triton")
    assert dispatch.pick("rms_norm", "triton", known, GPU, tokens=1, hidden=1) == "triton"
    # The file may be of a version that had more.
    assert dispatch.pick("rms_norm", None, known, GPU, tokens=1, hidden=1) == "torch"
    with pytest.raises(SpecError, match=r"rms_norm has no implementation 'tritn'; did you mean 'triton'\?"):
        dispatch.pick("rms_norm", "tritn", known, GPU, tokens=1, hidden=1)


@pytest.mark.parametrize(
    "table", ['["NVIDIA H200".rms_norm]\n"hidden=many" = "torch"', "[", '[x.rms_norm]\n"a=0" = ""']
)
def test_damaged_table_is_reported(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on("NVIDIA H200" if "H200" in table else "x", table, tmp_path, monkeypatch)
    with pytest.raises(LMWorksError, match=r"measured\.toml.*write it again: lmworks bench kernels --record"):
        dispatch.fastest("rms_norm", GPU, hidden=1)


@pytest.mark.slow  # the compiler takes seconds to import
def test_dispatch_is_constant_under_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on("NVIDIA H200", TABLE, tmp_path, monkeypatch)

    @torch.compile(fullgraph=True, backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if dispatch.fastest("rms_norm", GPU, tokens=4096, hidden=8192) == "triton" else 3)

    assert double(torch.ones(1)).item() == 2


def test_packaged_table_is_valid() -> None:
    table = tomllib.loads(dispatch.MEASURED.read_text(encoding="utf-8"))
    for device, ops in table.items():
        dates = ops.pop("measured")
        assert dates.keys() == ops.keys()
        for op, points in ops.items():
            assert len(dispatch.measured_points(op, device)) == len(points)


def test_unmeasured_op_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the plain one under another name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    options = importlib.import_module("compile_options")
    monkeypatch.setattr(dispatch, "table", lambda: {"NVIDIA H200": {"linear_add": {"hidden=8 ffn=8": "cublas 1"}}})
    monkeypatch.setattr(options, "bench_train", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit, match="linear_sum was not measured"):
        options.run("the sum after attention apart", ["tiny"], 1)
