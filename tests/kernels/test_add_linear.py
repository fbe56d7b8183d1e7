"""A sum that is a part of a product, against a layer and a sum by themselves.

What cuBLAS computes is compared on a GPU (tests/gpu/test_add_linear_gpu.py); here its operation is a formula.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import dispatch
from lmworks.kernels.training import cublas
from lmworks.kernels.training.add_linear import AddLinear, add_linear
from lmworks.model import GPT
from lmworks.spec import ModelSpec, SpecError

CUBLAS = "cublas 2"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 4 bytes, too, so that nothing is lost to rounding."""
    monkeypatch.setattr(cublas, "TYPES", {torch.float32: 0, **cublas.TYPES})


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_and_its_gradients_are_those_of_a_layer_and_a_sum(bias: bool, compiled: bool) -> None:
    x, y, weight = drawn(3, 5, 16), drawn(3, 5, 24, seed=1), drawn(16, 24, seed=2)
    added = drawn(16, seed=3) if bias else None

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return add_linear(x, y, weight, added, CUBLAS)

    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(x, y)
    assert compiled or "AddLinear" in str(found.grad_fn)
    wanted = x + F.linear(y, weight, added)
    leaves = [one for one in (x, y, weight, added) if one is not None]
    grad = drawn(3, 5, 16, seed=99).detach()
    both = [torch.autograd.grad(total, leaves, grad) for total in (found, wanted)]
    for one, other in zip([found, *both[0]], [wanted, *both[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_result_lies_as_a_compiler_is_told() -> None:
    """Whole, however what it begins with does."""
    given = (torch.randn(6, 8), torch.randn(16, 8), torch.randn(16), torch.randn(16, 6).t(), 0)
    torch.library.opcheck(cublas.linear_add, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("wide")
def test_second_derivatives_are_right() -> None:
    x, y, weight, bias = drawn(5, 24), drawn(5, 16, seed=1), drawn(24, 16, seed=2), drawn(24, seed=3)
    found = []
    for total in (add_linear(x, y, weight, bias, CUBLAS), x + F.linear(y, weight, bias)):
        (grad,) = torch.autograd.grad(total.square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(grad.sum(), [y, weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_only_what_is_wanted_is_computed() -> None:
    wanted = (True, False, True, False, False)
    pass_ = SimpleNamespace(saved_tensors=(drawn(5, 16), drawn(24, 16)), needs_input_grad=wanted)
    assert tuple(one is not None for one in AddLinear.backward(pass_, torch.ones(5, 24))) == wanted


def test_autocast_takes_it_with_it() -> None:
    x, y, weight, bias = drawn(2, 5, 24, dtype=torch.bfloat16), drawn(2, 5, 16), drawn(24, 16), drawn(24)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = add_linear(x, y, weight, bias, CUBLAS), x + F.linear(y, weight, bias)
    assert found.dtype == torch.bfloat16 and "AddLinear" in str(found.grad_fn)
    torch.testing.assert_close(found, wanted)
    leaves = [y, weight, bias]
    both = [torch.autograd.grad(total.float().square().sum(), leaves) for total in (found, wanted)]
    for one, other in zip(*both, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=1.0)


def test_what_cublas_does_not_take_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide numbers, rows that do not divide into 16 bytes, no tokens, passes without gradients, no library."""
    monkeypatch.setattr(AddLinear, "apply", lambda *_: pytest.fail("cuBLAS was asked"))
    add_linear(drawn(4, 8), drawn(4, 16), drawn(8, 16), None, CUBLAS)
    odd = [drawn(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (4, 12), (8, 12))]
    add_linear(*odd, None, CUBLAS)
    x, y, weight = (drawn(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (4, 16), (8, 16)))
    add_linear(x[:0], y[:0], weight, None, CUBLAS)
    with torch.no_grad():
        add_linear(x, y, weight, None, CUBLAS)
    with pytest.raises(RuntimeError, match="dtype"):  # read as what it is not, a bias would be any numbers
        add_linear(x, y, weight, drawn(8), CUBLAS)
    monkeypatch.setattr(cublas, "there", lambda _device: False)
    add_linear(x, y, weight, None, CUBLAS)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(SpecError, match="linear_sum has no implementation 'cublas 9'"):
        add_linear(drawn(4, 8), drawn(4, 16), drawn(8, 16), None, "cublas 9")


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"positions": "rope"}, {"qk_norm": True}, {"bias": False}])
def test_a_network_that_joins_learns_what_it_did(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient."""
    spec = ModelSpec.from_preset("tiny").replace(mlp="gelu", norm="layer", bias=True, qkv_bias=True, ffn=64)
    model = GPT(spec.replace(**changes))
    tokens = torch.randint(0, model.spec.vocab, (2, 17), generator=torch.Generator().manual_seed(0))
    found: list[list[Tensor]] = []
    monkeypatch.setattr(dispatch, "fastest", lambda *_given, **_shape: CUBLAS)
    for joined in (False, True):
        for block in model.layers():
            block.joined = joined
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


LISTENING = ("forward", "forward_pre", "full_backward", "full_backward_pre")


@pytest.mark.parametrize("kind", LISTENING)
def test_whoever_listens_to_a_projection_hears_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "fastest", lambda *_given, **_shape: CUBLAS)
    model = GPT(ModelSpec.from_preset("tiny").replace(mlp="gelu", norm="layer", ffn=64)).bfloat16()
    heard: list[str] = []
    for name, block in model.blocks.items():
        block.joined = True
        for part in ("q", "out"):
            listen = getattr(block.attention.get_submodule(part), f"register_{kind}_hook")
            listen(lambda *_, said=f"{name}.{part}": heard.append(said))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    wanted = [f"{name}.{part}" for name in model.blocks for part in ("q", "out")]
    assert heard == (wanted[::-1] if "backward" in kind else wanted)
