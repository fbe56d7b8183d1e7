"""What rounding may do in low precision: the yardstick is derived from last places, and not one machine's draw."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from lmworks.prove.rank_record import IndexedShard, RankRecord
from lmworks.prove.rounding import (
    RMS_ROUNDING,
    UNIT,
    error_ratios,
    rounding_growth,
    rounding_verdict,
    sampling_factor,
    weight_rounding,
)
from lmworks.spec import RunSpec
from lmworks.spec.layouts import layouts

STEPS, SIZE = 5, 32
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def record(gradient: Tensor, weight: Tensor, loads: list[list[int]] | None = None) -> RankRecord:
    """Of one rank that has one weight; the same gradient in every step."""
    return RankRecord(
        losses=[5.0] * STEPS,
        norms=[2.0] * STEPS,
        tokens=STEPS * 64,
        shards=[IndexedShard("norm.weight", torch.arange(SIZE))],
        gradients=[[gradient]] * STEPS,
        weights=[weight],
        loads=[{"0": torch.tensor(load)} for load in loads or []],
    )


def spec_of(dtype: str) -> RunSpec:
    return layouts()["fp16-fsdp2-tp2" if dtype == "fp16" else "bf16-tp2-sp"].run()


def off(value: Tensor, elements: int) -> Tensor:
    """The same, the first elements of it one last place lower."""
    lower = torch.nextafter(value, torch.zeros_like(value))
    return torch.where(torch.arange(SIZE) < elements, lower, value)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_once_is_the_rms_of_a_rounding(dtype: str) -> None:
    numbers = torch.exp2(torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    error = numbers.to(FORMATS[dtype]).double() - numbers
    measured = float(error.norm() / numbers.norm())
    assert measured == pytest.approx(RMS_ROUNDING * UNIT[dtype], rel=0.06)
    assert float((error / numbers).abs().max()) <= UNIT[dtype]


@pytest.mark.parametrize("elements", [0, 1])
def test_last_places_of_a_stored_weight_are_no_error(elements: int) -> None:
    """Of a norm's weights one rank has none or one a last place of fp32 off, four ranks five: √5 times as far, or ∞."""
    gradient, weight = torch.ones(SIZE), torch.full((SIZE,), 1.0)
    oracle, one, many = (
        record(gradient, weight),
        record(gradient, off(weight, elements)),
        record(gradient, off(weight, 5)),
    )
    found = {times.what: times.value for times in error_ratios(one, [many], oracle, spec_of("fp16"))}
    assert 0 < found["the weight of norm.weight"] < 1
    assert rounding_verdict(one, [many], oracle, spec_of("fp16")).failure == ""


def test_an_update_that_is_wrong_is_seen_in_the_weight() -> None:
    spec = spec_of("fp16")
    gradient, weight = torch.ones(SIZE), torch.full((SIZE,), 1.0)
    oracle = record(gradient, weight)
    rate = spec.optim.lr * spec.optim.clip / 2.0  # norms are 2
    wrong = record(gradient, weight + 0.01 * rate * math.sqrt(STEPS))  # 1 % of all updates
    found = rounding_verdict(oracle, [wrong], oracle, spec)
    assert found.failure.startswith("the weight of norm.weight is ")
    least = weight_rounding(oracle, spec)["norm.weight"]
    # One rounding to fp16 of five updates, and five to fp32 of the weight, in two runs.
    product, kept = RMS_ROUNDING * 2**-11 * rate * math.sqrt(5), RMS_ROUNDING * 2**-24 * math.sqrt(10)
    assert least == pytest.approx(math.hypot(product, kept))


def test_a_weight_kept_in_bf16_is_rounded_in_bf16() -> None:
    gradient, weight = torch.ones(SIZE), torch.full((SIZE,), 1.0)
    oracle = record(gradient, weight)
    often = weight_rounding(oracle, layouts()["bf16-weights-zero-1"].run())["norm.weight"]
    once = weight_rounding(oracle, layouts()["bf16-weights-ddp"].run())["norm.weight"]  # beside a master
    assert often == pytest.approx(RMS_ROUNDING * 2**-8 * math.sqrt(10), rel=0.01)
    assert once == pytest.approx(RMS_ROUNDING * 2**-8 * math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_three_times_the_error_of_one_rank_is_too_much(dtype: str) -> None:
    """Of a gradient: one rank is off by two roundings, the layout by six."""
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    noise *= math.sqrt(SIZE) / noise.norm() * RMS_ROUNDING * UNIT[dtype]
    gradient, weight = torch.ones(SIZE), torch.ones(SIZE)
    oracle, one, many = (record(gradient + n * noise, weight) for n in (0, 2, 6))
    found = rounding_verdict(one, [many], oracle, spec_of(dtype))
    assert found.worst is not None
    assert found.worst.value == pytest.approx(6 / math.sqrt(5), rel=0.01)
    assert found.worst.limit == pytest.approx(math.sqrt(2) * math.exp(5 / math.sqrt(5 * SIZE)))
    assert found.failure == "the gradient of norm.weight is 2.68 times as far from fp32 as on one rank, more than 2.10"


@pytest.mark.parametrize("numbers", [8, 40, 160])
def test_chance_is_five_deviations_of_a_ratio_of_two_draws(numbers: int) -> None:
    draws = torch.randn(2, 20_000, numbers, generator=torch.Generator().manual_seed(2)).norm(dim=2)
    measured = float((draws[0] / draws[1]).log().std())
    assert math.log(sampling_factor(numbers)) / 5 == pytest.approx(measured, rel=0.1)


def test_a_sum_of_more_parts_is_rounded_more_often() -> None:
    """Parts of a sum as random as rounding errors, added up in bf16 one after the other."""
    spec = spec_of("bf16")
    for parts in (2, 4):
        terms = torch.randn(parts, 20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        exact, total = terms.sum(0), torch.zeros(20_000, dtype=torch.bfloat16)
        for term in terms:
            total += term.bfloat16()
        cut, whole = (float((rounded.double() - exact).norm()) for rounded in (total, exact.bfloat16()))
        layout = spec.replace(parallel=spec.parallel.replace(tp=parts, sp=False))
        assert rounding_growth(layout) == pytest.approx(cut / whole, rel=0.08)


def test_routing_that_rounding_moved_is_said_and_not_divided_by_nothing() -> None:
    gradient, weight = torch.ones(SIZE), torch.ones(SIZE)
    before, after = [8, 8], [9, 7]
    oracle = one = record(gradient, weight, [before] * STEPS)
    jumped = record(gradient * 1.5, weight * 1.5, [after] * STEPS)
    found = rounding_verdict(one, [jumped], oracle, spec_of("bf16"))
    assert found.worst is None
    assert found.failure == (
        "in bf16 rounding changes which experts are chosen (in the first step 1 times, on one rank 0): a jump and no "
        "rounding error, so the layout cannot be judged in bf16; use precision.dtype = 'fp32'"
    )
    # From the third step on: the two before are judged, and found equal or not.
    later = dataclasses.replace(jumped, loads=[{"0": torch.tensor(load)} for load in [before] * 2 + [after] * 3])
    wrong = rounding_verdict(one, [later], oracle, spec_of("bf16"))
    assert wrong.failure.startswith("the gradient of norm.weight is ")
    later.gradients = [[gradient]] * 2 + [[gradient * 1.5]] * 3
    right = rounding_verdict(one, [later], oracle, spec_of("bf16"))
    assert right.worst is not None and (right.worst.value, right.failure) == (0.0, "")
    assert "from step 3 on" in right.cause and "2 of 5 steps are compared" in right.cause
