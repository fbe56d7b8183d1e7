"""GPT-2's MLP with GELU at the end of a product, against the three layers that it stands for.

What cuBLAS computes is compared on a GPU (tests/gpu/test_gelu_mlp_gpu.py); here its operations are formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.training import cublas, gelu_mlp
from lmworks.kernels.training.gelu import gelu_grad
from lmworks.model import GPT
from lmworks.model.attention import dense
from lmworks.model.training_fusion import fuse_gelu_epilogues
from lmworks.parallel.parallelize import apply_activation_checkpointing, gelu_blocks
from lmworks.spec import LMWorksError, ModelSpec, SpecError, load_run
from lmworks.train.health.nonfinite import FirstNonfiniteModule

CUBLAS = "cublas 2"


def drawn(bias: bool, dtype: torch.dtype) -> list[Tensor | None]:
    luck = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 5, 16), (3, 5, 16), (48, 16), (48,), (16, 48), (16,)]
    made: list[Tensor | None] = []
    for place, shape in enumerate(shapes):
        wanted = bias or place not in (3, 5)
        made.append(torch.randn(shape, generator=luck).to(dtype).requires_grad_() if wanted else None)
    return made


def plain(x: Tensor, y: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
    return x + F.linear(F.gelu(F.linear(y, up, up_bias), approximate="tanh"), down, down_bias)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_equal_three_layers(bias: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "TYPES", {torch.float32: 0})
    given = drawn(bias, torch.float32)

    def ours(*tensors: Tensor | None) -> Tensor:
        return gelu_mlp.add_gelu_mlp(*tensors, implementation=CUBLAS)  # type: ignore[arg-type]

    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*given)
    wanted = plain(*given)  # type: ignore[arg-type]
    if not compiled:
        assert "AddGeluMLP" in str(found.grad_fn)
    assert not found._is_view()  # a pipeline with a split backward pass detaches it in place
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    leaves = [one for one in given if one is not None]
    both = [torch.autograd.grad(result, leaves, grad) for result in (found, wanted)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_second_derivative_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass reads was made of x and weights, and it would be taken for constant."""
    monkeypatch.setattr(cublas, "TYPES", {torch.float32: 0})
    given = drawn(False, torch.float32)
    found = gelu_mlp.add_gelu_mlp(*given, implementation=CUBLAS)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(found.square().sum(), given[4:5], create_graph=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_autocast_applies_to_both_matmuls() -> None:
    given = [drawn(True, torch.bfloat16)[0], *drawn(True, torch.float32)[1:]]
    with torch.autocast("cpu", torch.bfloat16):
        found = gelu_mlp.add_gelu_mlp(*given, implementation=CUBLAS)  # type: ignore[arg-type]
        wanted = plain(*given)  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.5)
    (grad,) = torch.autograd.grad(found.float().sum(), given[2:3])  # type: ignore[arg-type]
    assert grad.dtype == torch.float32


def test_unsupported_inputs_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not divide into 16 bytes, wide numbers, no tokens, passes without gradients, no library."""
    monkeypatch.setattr(gelu_mlp.AddGeluMLP, "apply", lambda *_: pytest.fail("cuBLAS was asked"))
    ways = {"implementation": CUBLAS}
    x, up, down = (torch.randn(shape).bfloat16() for shape in ((4, 12), (20, 12), (12, 20)))
    gelu_mlp.add_gelu_mlp(x, x, up, None, down, None, **ways)
    wide = drawn(True, torch.float32)
    gelu_mlp.add_gelu_mlp(*wide, **ways)  # type: ignore[arg-type]
    with torch.no_grad():
        gelu_mlp.add_gelu_mlp(*drawn(True, torch.bfloat16), **ways)  # type: ignore[arg-type]
    gelu_mlp.add_gelu_mlp(*drawn(True, torch.bfloat16))  # type: ignore[arg-type]  # nothing was measured on a CPU
    x, y, *layers = drawn(True, torch.bfloat16)
    assert x is not None and y is not None
    assert gelu_mlp.add_gelu_mlp(x[:, :0], y[:, :0], *layers, **ways).shape == (3, 0, 16)  # type: ignore[arg-type]
    layers[3] = drawn(True, torch.float32)[5]
    with pytest.raises(RuntimeError, match="dtype"):  # read as what it is not, it would be any numbers
        gelu_mlp.add_gelu_mlp(x, y, *layers, **ways)  # type: ignore[arg-type]
    layers[3] = None
    monkeypatch.setattr(cublas, "is_available", lambda _device: False)
    gelu_mlp.add_gelu_mlp(x, y, *layers, **ways)  # type: ignore[arg-type]


def test_unknown_algorithm_is_rejected() -> None:
    with pytest.raises(SpecError, match="linear_gelu has no implementation 'cublas 9'"):
        gelu_mlp.add_gelu_mlp(*drawn(False, torch.bfloat16), implementation="cublas 9")  # type: ignore[arg-type]


def test_gelu_grad_is_derivative() -> None:
    x = torch.linspace(-6, 6, 97, dtype=torch.float32, requires_grad=True)
    (wanted,) = torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)
    torch.testing.assert_close(gelu_grad(x.detach()), wanted, rtol=1e-5, atol=1e-6)


def test_block_uses_fused_mlp_when_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, int]]] = []

    def fastest(op: str, _device: torch.device, **shape: int) -> str:
        asked.append((op, shape))
        return CUBLAS

    spec = ModelSpec.from_preset("tiny").replace(mlp="gelu", norm="layer", bias=True, ffn=64, positions="learned")
    model = GPT(spec).bfloat16()
    tokens = torch.randint(0, model.spec.vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    apart = model(tokens)
    monkeypatch.setattr(dispatch, "fastest", fastest)
    fuse_gelu_epilogues(model.layers())
    found = model(tokens)
    assert asked[-3:] == [(op, {"hidden": model.spec.hidden, "ffn": 64}) for op in gelu_mlp.OPS]
    torch.testing.assert_close(found, apart, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hooks_on_layers_disable_fusion(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is not finite, the layer is named; DeepSpeed's hooks gather its weights."""
    monkeypatch.setattr(dispatch, "fastest", lambda *_given, **_shape: CUBLAS)
    model = GPT(ModelSpec.from_preset("tiny").replace(mlp="gelu", norm="layer", ffn=64)).bfloat16()
    fuse_gelu_epilogues(model.layers())
    if compiled:
        for block in model.layers():
            block.compile(fullgraph=True)
    tokens = torch.randint(0, model.spec.vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    nodes = str(model.states(tokens, torch.arange(9), dense(model.spec, tokens.device, seq=9)).grad_fn)
    assert compiled or "AddGeluMLP" in nodes
    with torch.no_grad():
        model.layers()[1].mlp.down.weight[0, 0] = torch.inf
    with FirstNonfiniteModule({0: model}) as bad:
        model(tokens)
    assert bad.name() == ("blocks.1.mlp.down", 0)


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ((), True),
        (("parallel.recompute=full",), True),
        (("parallel.recompute=selective",), False),
        (("model.mlp=swiglu",), False),
        (("model.layers=4", "parallel.pp=2", "data.global_batch=32"), True),
        (("model.layers=4", "parallel.pp=2", "data.global_batch=32", "parallel.schedule=zbv"), False),
    ],
)
def test_only_plain_layers_are_fused(words: tuple[str, ...], joined: bool) -> None:
    spec = load_run("tiny", ["model.mlp=gelu", *words])
    with torch.device("meta"):
        part = GPT(spec.model)
    apply_activation_checkpointing(part, spec, torch.device("cpu"))
    assert gelu_blocks(part, spec) == (part.layers() if joined else [])


def test_heuristic_struct_matches_c_layout() -> None:
    """64 bytes of an algorithm, its workspace, status, waves and four reserved numbers: cublasLt.h."""
    import ctypes

    assert ctypes.sizeof(cublas.Heuristic) == 96 and cublas.Heuristic.workspace.offset == 64


class FakeCublas:
    """Notes what it is asked; of the ways that it finds the second is none."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], int]] = []
        self.device = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*given: Any) -> int:
            self.asked.append((name, given, self.device))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                found, count = given[-2], given[-1]._obj
                count.value, found[1].status = 3, 15
                for place in range(3):
                    found[place].waves = place
            return 0

        return function

    def given(self, name: str) -> list[tuple[Any, ...]]:
        return [given for asked, given, _ in self.asked if asked == name]

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCublas:
    fake = FakeCublas()
    monkeypatch.setattr(cublas, "library", lambda: fake)
    monkeypatch.setattr(cublas, "handle_of", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0))
    return fake


def place_at(address: int, *shape: int) -> Tensor:
    """A tensor whose address divided by 256 leaves `address`."""
    size = 2 * torch.Size(shape).numel()
    room = torch.empty(size + 512, dtype=torch.uint8)
    first = (address - room.data_ptr()) % 256
    return room[first : first + size].view(torch.bfloat16).view(shape)


def test_algorithms_depend_on_alignment(fake: FakeCublas) -> None:
    """On the device of the numbers, and one that cuBLAS calls unfit is none."""
    product = cublas.Gemm(cublas.GemmSpec(8, 24, 16, True, cublas.PLAIN, 1, torch.bfloat16, device=3))
    weight, out = place_at(0, 24, 16), place_at(0, 8, 24)
    for address in (0, 16, 0, 32):
        product(place_at(address, 8, 16), weight, out)
    wishes = [(given[1].value, given[2]._obj.value) for given in fake.given("cublasLtMatmulPreferenceSetAttribute")]
    most = (cublas.MAX_WORKSPACE, cublas.WORKSPACE)
    assert wishes == [most, most, (5, 16), (6, 16), (7, 16), (8, 16)]  # cublasLt.h: of A, B, C and D
    assert product.algorithms[True].waves == product.algorithms[False].waves == 2
    assert {device for name, _, device in fake.asked if name == "cublasLtMatmul"} == {3}
    assert len(fake.given("cublasLtMatmul")) == 4


def test_unaligned_tensors_are_copied() -> None:
    odd = place_at(2, 4, 8)
    assert cublas.align(odd).data_ptr() % 16 == 0 and cublas.align(odd.t()).is_contiguous()
    even = place_at(16, 4, 8)
    assert cublas.align(even) is even


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch for other GPUs, or for none."""
    monkeypatch.setattr(torch.version, "cuda", None)
    cublas.library.cache_clear()
    try:
        assert not cublas.is_available(torch.device("cuda")) and cublas.is_available(torch.device("cpu"))
        with pytest.raises(LMWorksError, match="has no libcublasLt beside it: cublasLtCreate"):
            cublas.create("cublasLtCreate")
    finally:
        cublas.library.cache_clear()
