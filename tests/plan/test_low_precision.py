"""Products in fp8 and fp4: what the casts of their operands move, what is saved, and what the peaks allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.memory.sheet import saved_by_blocks
from lmworks.plan.network import network
from lmworks.plan.ops import Workload
from lmworks.plan.software import SOFTWARE
from lmworks.plan.step.price import price
from lmworks.plan.step.uncalibrated import casts
from lmworks.spec import ModelSpec, SpecError, catalogue

LLAMA = ModelSpec.from_preset("llama3-8b")  # 4,096 wide, 32 heads and 8 of keys of 128, MLP of 14,336
TOKENS, HIDDEN, QKV, WIDE = 8192, 4096, 6144, 14336
WEIGHTS = HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * WIDE
B200, H100 = catalogue()["B200-SXM"], catalogue()["H100-SXM-80GB"]


def case(software: str, dtype: str, gpu: Any = B200, **changes: Any) -> Case:
    return Case(LLAMA, gpu, SOFTWARE[software], TOKENS, dtype=dtype, **{"accumulation": 8, **changes})


def cast_bytes(software: str, accumulation: int) -> tuple[float, float]:
    """Of a block, forward and backward."""
    given = case(software, "fp8")
    op = casts(network(Workload.of_case(given)).block, given.software, accumulation)
    return tuple(sum(kernel.bytes * kernel.count for kernel in way) for way in (op.forward, op.backward))  # type: ignore[return-value]


def test_transformer_engine_casts_only_what_no_kernel_writes_in_fp8() -> None:
    """Four bytes each: attention's output, weights once a step; gradients of q, k, v, of the sum after attention and
    of the one after the MLP. Norms and SwiGLU write fp8 themselves."""
    forward, backward = cast_bytes("megatron", accumulation=8)
    assert forward == 4 * (TOKENS * HIDDEN + WEIGHTS / 8)
    assert backward == 4 * TOKENS * (QKV + HIDDEN + HIDDEN)


def test_others_cast_both_operands_of_every_product() -> None:
    forward, backward = cast_bytes("torchtitan-compile", accumulation=8)
    inputs, outputs = TOKENS * (3 * HIDDEN + WIDE), TOKENS * (QKV + 2 * HIDDEN + 2 * WIDE)
    assert forward == 5 * (inputs + WEIGHTS)
    assert backward == 5 * ((outputs + WEIGHTS) + (outputs + inputs))


def test_saved_inputs_of_products_take_a_byte_in_fp8() -> None:
    """Of each token: two norms' outputs and SwiGLU's in one byte less; attention's output once more, in one."""
    wide, low = (float(saved_by_blocks(case("megatron", dtype))) for dtype in ("bf16", "fp8"))
    assert wide - low == LLAMA.layers * TOKENS * (2 * HIDDEN + WIDE - HIDDEN)


def test_fp4_is_priced_by_its_own_peak() -> None:
    times = {dtype: price(case("megatron", dtype, zero=1)) for dtype in ("bf16", "fp8", "fp4")}
    products = [float(times[dtype].parts["matmul"]) for dtype in ("bf16", "fp8", "fp4")]
    assert np.all(np.array(products[:-1]) / products[1:] > 1.4)
    assert times["fp4"].parts["attention"] == times["fp8"].parts["attention"]  # in 16 bits
    with pytest.raises(SpecError, match="precision fp4: this accelerator's peak is not in the catalogue"):
        price(case("megatron", "fp4", gpu=H100))


def test_nemo_is_a_megatron_that_sums_in_16_bits_and_overlaps_tensor_parallel_messages() -> None:
    plain, bridge = (price(case(name, "fp8", gpu=H100, tp=4, sp=True)) for name in ("megatron", "megatron-bridge"))
    assert bridge.parts["tp"] < 0.8 * plain.parts["tp"]
    assert bridge.parts["casts"] == pytest.approx(plain.parts["casts"])  # and Megatron's fitted constants
    assert any("no run of megatron-bridge" in note for note in bridge.notes)
