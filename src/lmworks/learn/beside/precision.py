"""Number formats beside the trainer's."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row, numbers


def loss_scale(module: ModuleType) -> list[Row]:
    """Every seventh step overflows."""
    import torch

    from ...parallel.precision import LossScale
    from ...spec.precision import PrecisionSpec

    scaler, ours, rows = module.LossScaler(2.0**16, 3), LossScale(PrecisionSpec("fp16", loss_scale_window=3)), []
    parameter = torch.nn.Parameter(torch.zeros(1))
    for step in range(1, 21):
        parameter.grad = torch.full((1,), torch.inf if step % 7 == 0 else 1.0)
        ours.update(float(parameter.grad))
        scaler.step(torch.optim.SGD([parameter], lr=0.0), [parameter])
        if step % 5 == 0:
            rows.append(Row(f"scale after step {step}", scaler.scale, ours.scale))
    return rows


def fp8(module: ModuleType) -> list[Row]:
    import torch

    from ...kernels.training.float8 import reference

    x = numbers(64, 256)
    yours, scale = module.quantize_fp8(x)
    ours = reference(x, torch.float8_e4m3fn)
    errors = (
        float(100 * (one - x).norm() / x.norm()) for one in (yours.float() * scale, ours.values.float() * ours.scale)
    )
    return [Row("scale", float(scale), float(ours.scale)), Row("error over size of a number, %", *errors)]


def stochastic_rounding(module: ModuleType) -> list[Row]:
    import torch

    from ...kernels.training.adamw import round_to

    x, random = numbers(4096), torch.arange(4096, dtype=torch.int32) * 16
    yours, ours = module.stochastic_round(x, random), round_to(x, torch.bfloat16, random)
    return [Row("sum of 4,096 rounded numbers", float(yours.double().sum()), float(ours.double().sum()))]


BESIDE: dict[str, Beside] = {
    "loss_scale": loss_scale,
    "fp8": fp8,
    "stochastic_rounding": stochastic_rounding,
}
