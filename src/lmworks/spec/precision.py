"""The number formats of a run: what products run in, what weights and optimizer states are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .errors import SpecError
from .schema import Section, opt

if TYPE_CHECKING:
    from .run import RunSpec

FP8_ALIGNED = 16  # numbers of 8 bits that tensor cores take at once
LARGEST_SCALE = 2.0**40  # beyond it fp16's smallest number, 2⁻²⁴, becomes more than its largest, 65,504


@dataclass(frozen=True)
class PrecisionSpec(Section):
    """By default all that is kept is fp32, and `dtype` is what the matrix products run in."""

    section: ClassVar[str] = "precision"

    dtype: str = opt(
        "fp32",
        "what matrix products run in; fp8: those of the blocks' linear layers, the others in bf16",
        choices=("fp32", "bf16", "fp16", "fp8"),
    )
    weights: str = opt("fp32", "what weights and their gradients are kept in", choices=("fp32", "bf16"))
    master: bool = opt(True, "bf16 weights: the optimizer keeps the 16 bits that make each an exact fp32 number")
    rounding: str = opt(
        "nearest",
        "bf16 weights without a master: how an updated weight is rounded",
        choices=("nearest", "stochastic"),
    )
    states: str = opt("fp32", "what AdamW's two moments are kept in", choices=("fp32", "bf16"))
    reduce: str = opt("fp32", "what gradients are summed in across ranks", choices=("fp32", "bf16"))
    loss_scale: float = opt(65_536.0, "fp16: first loss scale; it halves on overflow", ge=1, le=LARGEST_SCALE)
    loss_scale_window: int = opt(2000, "fp16: steps without overflow before the scale doubles", ge=1)
    fp8_scaling: str = opt(
        "tensorwise", "fp8: one scale for a tensor, or one for each row of it", choices=("tensorwise", "rowwise")
    )
    fp8_head: bool = opt(False, "fp8: the products with the vocabulary too")

    def check(self) -> None:
        if self.weights == "bf16" and self.compute != "bf16":
            raise SpecError(
                f"precision.weights = 'bf16' needs precision.dtype = 'bf16' or 'fp8', not '{self.dtype}': "
                "products would run in more digits than the weights have, or in others"
            )
        if self.weights != "bf16" and not self.master:
            raise SpecError("precision.master = false needs precision.weights = 'bf16': fp32 weights are the master")
        if self.rounding == "stochastic" and (self.weights != "bf16" or self.master):
            raise SpecError(
                "precision.rounding = 'stochastic' needs precision.weights = 'bf16' and precision.master = false: "
                "with an fp32 master no update is lost to rounding"
            )
        for name, value in {"fp8_scaling": self.fp8_scaling == "rowwise", "fp8_head": self.fp8_head}.items():
            if value and self.dtype != "fp8":
                raise SpecError(f"precision.{name} needs precision.dtype = 'fp8', not '{self.dtype}'")

    @property
    def compute(self) -> str:
        """What everything runs in that is not a product in 8 bits: activations are kept in it, ranks exchange it."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    def low_precision_optimizer(self, optimizer: str) -> bool:
        """Weights or moments are held in 16 bits. Its states are made with it, PyTorch's at the first step."""
        return self.weights == "bf16" or (optimizer == "adamw" and self.states == "bf16")


def check_precision(run: RunSpec) -> None:
    """What the layout must allow."""
    precision, layout = run.precision, run.parallel
    kept = {"weights": precision.weights == "bf16", "states": precision.states == "bf16"}
    kept["dtype"] = precision.dtype == "fp8"
    for name, given in kept.items():
        value = getattr(precision, name)
        if given and layout.engine == "deepspeed":
            raise SpecError(f"precision.{name} = '{value}' needs parallel.engine = 'native': DeepSpeed has its own")
        if given and layout.strategy == "fsdp1" and layout.dp > 1:
            raise SpecError(f"precision.{name} = '{value}' does not combine with strategy = 'fsdp1'; use 'fsdp2'")
    if layout.sync_each_pass and layout.strategy == "ddp" and precision.reduce != precision.weights:
        raise SpecError(
            f"parallel.sync_each_pass = true would round DDP's sums to precision.reduce = '{precision.reduce}' after "
            "every micro-batch; use parallel.strategy = 'fsdp2'"
        )
    if precision.dtype == "fp8":
        check_fp8(run)


def check_fp8(run: RunSpec) -> None:
    """What products of 8-bit operands take."""
    model, layout = run.model, run.parallel
    if layout.tp > 1:
        raise SpecError(f"precision.dtype = 'fp8' does not combine with parallel.tp = {layout.tp}; use 'bf16'")
    tokens = run.data.micro_batch * run.data.seq // layout.cp
    if tokens % FP8_ALIGNED:
        raise SpecError(
            f"precision.dtype = 'fp8' needs the tokens of a micro-batch on a rank divisible by {FP8_ALIGNED}, not "
            f"{run.data.micro_batch} × {run.data.seq} / cp = {tokens}"
        )
    if model.hidden % FP8_ALIGNED:
        raise SpecError(f"precision.dtype = 'fp8' needs model.hidden = {model.hidden} divisible by {FP8_ALIGNED}")
