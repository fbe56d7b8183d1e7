"""Sums that are parts of products, against layers and sums by themselves.

What cuBLAS computes is compared on a GPU (tests/gpu/test_sums_gpu.py); here its operations are formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import choose, cublas, sums
from lmworks.kernels.sums import Layer, add_linear, linears
from lmworks.model import GPT
from lmworks.spec import ModelSpec, SpecError

CUBLAS = "cublas 2"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def layers_of(bias: bool, dtype: torch.dtype = torch.float32) -> list[Layer]:
    """Of one input: queries, and keys and values of fewer heads."""
    widths = (24, 8, 8)
    made: list[Layer] = []
    for seed, width in enumerate(widths, 10):
        added = drawn(width, seed=seed + 20, dtype=dtype) if bias else None
        made.append((drawn(width, 16, seed=seed, dtype=dtype), added))
    return made


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of 4 bytes, too, so that nothing is lost to rounding."""
    monkeypatch.setattr(cublas, "TYPES", {torch.float32: 0, **cublas.TYPES})


def compare(found: list[Tensor], wanted: list[Tensor], leaves: list[Tensor]) -> None:
    grads = [drawn(*one.shape, seed=99 + place).detach() for place, one in enumerate(wanted)]
    both = [torch.autograd.grad(results, leaves, grads) for results in (found, wanted)]
    for one, other in zip([*found, *both[0]], [*wanted, *both[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_and_its_gradients_are_those_of_a_layer_and_a_sum(bias: bool, compiled: bool) -> None:
    x, y, weight = drawn(3, 5, 16), drawn(3, 5, 24, seed=1), drawn(16, 24, seed=2)
    added = drawn(16, seed=3) if bias else None

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return add_linear(x, y, (weight, added), CUBLAS)

    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(x, y)
    assert compiled or "AddLinear" in str(found.grad_fn)
    leaves = [one for one in (x, y, weight, added) if one is not None]
    compare([found], [x + F.linear(y, weight, added)], leaves)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_that_meet_are_those_of_layers_by_themselves(bias: bool, compiled: bool) -> None:
    y, layers = drawn(3, 5, 16), layers_of(bias)

    def ours(y: Tensor) -> list[Tensor]:
        return linears(y, layers, CUBLAS)

    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(y)
    assert [one.shape for one in found] == [(3, 5, 24), (3, 5, 8), (3, 5, 8)]
    leaves = [y, *(one for layer in layers for one in layer if one is not None)]
    compare(found, [F.linear(y, *layer) for layer in layers], leaves)


@pytest.mark.usefixtures("wide")
def test_products_begin_with_what_they_are_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product by itself, and no sum anywhere: by PyTorch's operations there would be as many as terms."""
    seen: list[str] = []
    for name in ("product_add", "linear_add"):
        usual = getattr(cublas, name)
        monkeypatch.setattr(cublas, name, lambda *given, usual=usual, name=name: (seen.append(name), usual(*given))[1])
    y, layers = drawn(5, 16), layers_of(False)
    torch.autograd.grad([one.sum() for one in linears(y, layers, CUBLAS)], y)
    assert seen == ["product_add"] * 2
    add_linear(drawn(5, 24), y, layers[0], CUBLAS)
    assert seen[2:] == ["linear_add"]


@pytest.mark.parametrize("op", ["linear_add", "product_add"])
def test_results_lie_as_a_compiler_is_told(op: str) -> None:
    """Whole, however what they begin with does."""
    onto = torch.randn(16, 6).t()
    given = {
        "linear_add": (torch.randn(6, 8), torch.randn(16, 8), torch.randn(16), onto, 0),
        "product_add": (torch.randn(6, 8), torch.randn(8, 16), onto, 0),
    }
    torch.library.opcheck(getattr(cublas, op), given[op], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("wide")
def test_second_derivatives_are_right_or_refused() -> None:
    x, y, layer = drawn(5, 24), drawn(5, 16, seed=1), layers_of(True)[0]
    leaves, found = [y, layer[0]], []
    for total in (add_linear(x, y, layer, CUBLAS), x + F.linear(y, *layer)):
        (grad,) = torch.autograd.grad(total.square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(grad.sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    several = [one.square().sum() for one in linears(y, layers_of(True), CUBLAS)]
    (grad,) = torch.autograd.grad(several, y, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grad.sum(), y)


@pytest.mark.usefixtures("wide")
def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "input_gradient", lambda *_: pytest.fail("nobody wants it"))
    y, layers = drawn(5, 16).detach(), layers_of(True)
    layers[1] = tuple(one.detach() for one in layers[1] if one is not None)  # type: ignore[assignment]
    sum(one.sum() for one in linears(y, layers, CUBLAS)).backward()  # type: ignore[union-attr]
    grads = [one.grad is not None for layer in layers for one in layer if one is not None]
    assert grads == [True, True, False, False, True, True]


def test_autocast_takes_them_with_it() -> None:
    y, layers = drawn(2, 5, 16), layers_of(True)
    with torch.autocast("cpu", torch.bfloat16):
        found = linears(y, layers, CUBLAS)
        total = add_linear(drawn(2, 5, 24, dtype=torch.bfloat16), y, layers[0], CUBLAS)
        wanted = [F.linear(y, *layer) for layer in layers]
    assert {one.dtype for one in found} == {torch.bfloat16} == {total.dtype}
    assert "AddLinear" in str(total.grad_fn)
    for one, other in zip(found, wanted, strict=True):
        assert "Linears" in str(one.grad_fn.next_functions)  # type: ignore[union-attr]  # of which it is a view
        torch.testing.assert_close(one, other)
    leaves = [y, *(one for layer in layers for one in layer if one is not None)]
    both = [torch.autograd.grad([one.float().square().sum() for one in results], leaves) for results in (found, wanted)]
    for one, other in zip(*both, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=1.0)


def sum_of(x: Tensor, y: Tensor, layer: Layer) -> None:
    add_linear(x, y, layer, CUBLAS)


def several(_x: Tensor, y: Tensor, layer: Layer) -> None:
    linears(y, [layer, layer], CUBLAS)


@pytest.mark.parametrize("work", [sum_of, several])
def test_what_cublas_does_not_take_is_left_to_pytorch(
    work: Callable[[Tensor, Tensor, Layer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide numbers, rows that do not divide into 16 bytes, no tokens, passes without gradients, no library."""
    for function in (sums.AddLinear, sums.Linears):
        monkeypatch.setattr(function, "apply", lambda *_: pytest.fail("cuBLAS was asked"))
    narrow = [drawn(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (4, 16), (8, 16))]
    work(drawn(4, 8), drawn(4, 16), (drawn(8, 16), None))
    odd = [drawn(*shape, dtype=torch.bfloat16) for shape in ((4, 8), (4, 12), (8, 12))]
    work(odd[0], odd[1], (odd[2], None))
    x, y, weight = narrow
    work(x[:0], y[:0], (weight, None))
    with torch.no_grad():
        work(x, y, (weight, None))
    with pytest.raises(RuntimeError, match="dtype"):  # read as what it is not, a bias would be any numbers
        work(x, y, (weight, drawn(8)))
    monkeypatch.setattr(cublas, "there", lambda _device: False)
    work(x, y, (weight, None))


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(SpecError, match="linear_sum has no implementation 'cublas 9'"):
        add_linear(drawn(4, 8), drawn(4, 16), (drawn(8, 16), None), "cublas 9")
    with pytest.raises(SpecError, match="input_gradient has no implementation"):
        linears(drawn(4, 16), [(drawn(8, 16), None)], "triton")


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"positions": "rope"}, {"qk_norm": True}, {"bias": False}])
def test_a_network_that_joins_learns_what_it_did(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient."""
    spec = ModelSpec.from_preset("tiny").replace(mlp="gelu", norm="layer", bias=True, qkv_bias=True, ffn=64)
    model = GPT(spec.replace(**changes))
    tokens = torch.randint(0, model.spec.vocab, (2, 17), generator=torch.Generator().manual_seed(0))
    found: list[list[Tensor]] = []
    monkeypatch.setattr(choose, "fastest", lambda *_given, **_shape: CUBLAS)
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
    monkeypatch.setattr(choose, "fastest", lambda *_given, **_shape: CUBLAS)
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
