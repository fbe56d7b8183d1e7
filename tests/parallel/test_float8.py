"""Linear layers in fp8: which of them, with which numbers, and that training goes on under its names.

Products are emulated here: the same roundings, in fp32 arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.kernels.training import swiglu_fp8
from lmworks.model import GPT, training_fusion
from lmworks.model.training_fusion import fuse_float8_swiglu
from lmworks.parallel import parallelize
from lmworks.parallel.precision import apply_float8, check_float8
from lmworks.prove.parity import parity
from lmworks.spec import ModelSpec, RunSpec, SpecError
from lmworks.spec.layouts import Layout
from tiny import curve, make_spec, saved, train
from variations import with_slow

pytest.importorskip("torchao")
FP8 = "precision.dtype=fp8"
CPU = torch.device("cpu")


def converted(spec: RunSpec) -> tuple[GPT, set[str]]:
    with torch.device("meta"):
        part = GPT(spec.model)
    apply_float8(part, spec, CPU)
    return part, {name for name, module in part.named_modules() if type(module).__name__ == "Float8Linear"}


def test_linear_layers_of_blocks_and_nothing_else(dataset: Path) -> None:
    spec = make_spec(dataset, FP8, "model.experts=4", "model.shared_experts=1", "model.expert_ffn=32")
    part, found = converted(spec)
    attention = {f"blocks.0.attention.{name}" for name in ("q", "k", "v", "out")}
    assert found == attention | {f"blocks.0.mlp.shared.{name}" for name in ("gate", "up", "down")}
    with torch.device("meta"):
        plain = GPT(spec.model)
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_widths_that_tensor_cores_do_not_take_stay_as_they_are(dataset: Path) -> None:
    spec = make_spec(dataset, FP8, "model.ffn=40")
    _, found = converted(spec)
    assert found == {f"blocks.0.attention.{name}" for name in ("q", "k", "v", "out")}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_product_is_that_of_fp8_numbers(scaling: str, dataset: Path) -> None:
    """Against casts by hand: x and w to E4M3, each by the scale of its tensor or of its rows."""
    spec = make_spec(dataset, FP8, f"precision.fp8_scaling={scaling}")
    part, _ = converted(spec)
    layer = part.blocks["0"].attention.q.to_empty(device="cpu")  # type: ignore[union-attr]
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 32, generator=draw), torch.randn(layer.weight.shape, generator=draw)
    with torch.no_grad():
        layer.weight.copy_(w)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        largest = tensor.abs().amax(dim=1, keepdim=True) if scaling == "rowwise" else tensor.abs().max()
        scale = 448 / largest
        if scaling == "rowwise":
            scale = 2 ** torch.floor(torch.log2(scale))  # torchao rounds them down to powers of two
        return (tensor * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    exact, expected, found = x @ w.t(), cast(x) @ cast(w).t(), layer(x).detach()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    assert (found - exact).abs().max() > 1e-2  # it was rounded


def test_training_goes_on_under_the_same_names(dataset: Path, tmp_path: Path) -> None:
    bf16 = ("precision.dtype=bf16", "precision.weights=bf16")
    train(make_spec(dataset, *bf16), tmp_path / "bf16")
    train(make_spec(dataset, *bf16, FP8, "precision.fp8_head=true"), tmp_path / "fp8")
    one, other = (list(curve(tmp_path / name)) for name in ("bf16", "fp8"))
    assert one != other
    assert saved(tmp_path / "bf16").keys() == saved(tmp_path / "fp8").keys()
    losses = [torch.tensor([step[1] for step in run]) for run in (one, other)]
    assert losses[1][-1] < losses[1][0] - 0.5
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)


@pytest.mark.parametrize("recompute", with_slow(["selective", "mlp", "full"], ["selective", "full"]))
def test_an_mlp_that_is_one_operation_trains_alike(
    recompute: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchao's layers do, whatever is computed again; and to the bit as if nothing were."""
    given = (FP8, "precision.weights=bf16", "model.layers=2", "optim.lr=2e-3", "optim.steps=6")
    train(make_spec(dataset, *given), tmp_path / "layers")
    passes = count_joined(monkeypatch)
    train(make_spec(dataset, *given), tmp_path / "kept")
    assert passes == {"forward": 24, "backward": 24}  # steps × blocks × micro-batches
    train(make_spec(dataset, *given, f"parallel.recompute={recompute}"), tmp_path / "again")
    assert passes == {"forward": 24 + 48, "backward": 48}
    assert curve(tmp_path / "again") == curve(tmp_path / "kept") != curve(tmp_path / "layers")
    losses = [torch.tensor([step[1] for step in curve(tmp_path / name)]) for name in ("kept", "layers")]
    torch.testing.assert_close(*losses, rtol=0, atol=2e-3)


def count_joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """MLPs are one operation from now on, whose passes are counted."""
    passes = {"forward": 0, "backward": 0}
    apply, function = apply_float8, swiglu_fp8.SwiGLUMLP

    def joined(part: GPT, spec: RunSpec, device: torch.device) -> None:
        apply(part, spec, device)
        fuse_float8_swiglu(part, torch.nn.Linear)

    def counted(name: str, way: Callable[..., Any]) -> Any:
        def once_more(*args: Any) -> Any:
            passes[name] += 1
            return way(*args)

        return staticmethod(once_more)

    monkeypatch.setattr(parallelize, "apply_float8", joined)
    monkeypatch.setattr(training_fusion, "has_hooks", lambda _: False)  # by hooks that cast what comes in on a CPU
    monkeypatch.setattr(swiglu_fp8, "pick", lambda *_, **__: "triton")
    for name in passes:
        monkeypatch.setattr(function, name, counted(name, getattr(function, name)))
    return passes


def test_what_cannot_run_is_refused(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for overrides, message in (
        (["parallel.tp=2"], "does not combine with parallel.tp = 2"),
        (["data.seq=31", "data.micro_batch=1"], "divisible by 16, not 1 × 31"),
        (["parallel.dp=2", "parallel.strategy=fsdp1"], "does not combine with strategy = 'fsdp1'"),
    ):
        with pytest.raises(SpecError, match=message):
            make_spec(dataset, FP8, *overrides)
    with pytest.raises(SpecError, match=r"model.hidden = 24 divisible by 16"):
        RunSpec.from_dict(
            {"model": ModelSpec.from_preset("tiny", hidden=24, heads=2).to_dict(), "precision": {"dtype": "fp8"}}
        )
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(SpecError, match=r'pip install "lmworks\[fp8\]"'):
        check_float8(make_spec(dataset, FP8), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"dp": 2}, {"dp": 2, "strategy": "fsdp2"}, {"pp": 2}], ids=str)
def test_ranks_are_no_further_from_fp32_than_one(parallel: dict[str, Any]) -> None:
    """Bytes and messages are those of the planner, too. `lmworks prove parity` leaves fp8 out: it needs no torchao."""
    sections = {
        "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2},
        "data": {"seq": 16, "global_batch": 4, "micro_batch": 1},
        "precision": {"dtype": "fp8", "weights": "bf16"},
        "parallel": parallel,
    }
    with parity(quick=True) as proof:
        result = proof.prove(Layout("fp8", sections))
    assert result.ok, result.failure
