"""Further exercises, `src/memory/`: against arithmetic by hand."""

from __future__ import annotations

from types import ModuleType

from ..checking.expect import expect_equal

GB = 10**9


def model_states(budget: ModuleType) -> None:
    for parameters, ranks, stage, precision, weights, gradients, optimizer, remark in (
        (10, 1, 0, "bf16", 20, 20, 120, "2, 2 and 12 bytes a parameter"),
        (10, 1, 0, "fp32", 40, 40, 80, "4, 4 and 8: in fp32 the weights are the master copy"),
        (10, 5, 0, "bf16", 20, 20, 120, "stage 0 shards nothing"),
        (10, 5, 1, "bf16", 20, 20, 24, "stage 1 shards the optimizer states"),
        (10, 5, 2, "bf16", 20, 4, 24, "stage 2: gradients too"),
        (10, 5, 3, "bf16", 4, 4, 24, "stage 3: weights too"),
        (10, 4, 3, "bf16", 6, 6, 36, "10 parameters on 4 ranks: 3 on the rank that has most"),
        (30 * GB, 64, 1, "bf16", 60 * GB, 60 * GB, 5_625_000_000, ""),
        (30 * GB, 64, 3, "bf16", 937_500_000, 937_500_000, 5_625_000_000, ""),
        (7 * GB, 7, 2, "fp32", 28 * GB, 4 * GB, 8 * GB, ""),
    ):
        case = f"{parameters:,} parameters, {ranks} ranks, ZeRO-{stage}, {precision}"
        expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        expect_equal(case, budget.model_states(parameters, ranks, stage, precision), expected, remark=remark)


def kv_cache_bytes(budget: ModuleType) -> None:
    for layers, heads, kv_heads, hidden, lengths, number, expected, remark in (
        (1, 1, 1, 8, [16], 2, 512, "16 tokens × (a key and a value) × 8 numbers × 2 bytes"),
        (3, 1, 1, 8, [16], 2, 1536, "three layers"),
        (1, 4, 4, 8, [16], 2, 512, "four heads of 2 numbers are as wide as one of 8"),
        (1, 4, 2, 8, [16], 2, 256, "two of four heads have keys: half of it"),
        (1, 1, 1, 8, [16], 1, 256, "one byte a number (fp8)"),
        (1, 1, 1, 8, [17], 2, 1024, "17 tokens take two blocks of 16"),
        (1, 1, 1, 8, [1, 1, 0], 2, 1024, "each sequence has blocks of its own; an empty one has none"),
        (80, 64, 8, 8192, [4096] * 2, 2, 2 * 4096 * 327_680, "70B: 320 KiB a token"),
    ):
        case = f"{layers} layers, {heads} heads, {kv_heads} KV heads, width {hidden}, lengths {lengths}, {number} bytes"
        got = budget.kv_cache_bytes(layers, heads, kv_heads, hidden, lengths, number)
        expect_equal(case, got, expected, remark=remark)


def cheapest_stage(budget: ModuleType) -> None:
    for parameters, ranks, memory, activations, precision, expected, remark in (
        (10, 5, 161, 0, "bf16", 0, "no sharding is needed"),
        (10, 5, 160, 0, "bf16", 0, "160 bytes of states fill 160 bytes: they fit"),
        (10, 5, 159, 0, "bf16", 1, "stage 1 needs 20 + 20 + 24"),
        (10, 5, 64, 0, "bf16", 1, ""),
        (10, 5, 63, 0, "bf16", 2, "stage 2 needs 20 + 4 + 24"),
        (10, 5, 47, 0, "bf16", 3, "stage 3 needs 4 + 4 + 24"),
        (10, 5, 31, 0, "bf16", None, "not even stage 3 fits"),
        (10, 5, 160, 10, "bf16", 1, "activations count"),
        (10, 5, 50, 10, "bf16", 3, "every rank has its own activations, whole"),
        (10, 5, 159, 0, "fp32", 1, "fp32 needs 160 bytes, too"),
        (10, 5, 95, 0, "fp32", 2, "fp32, stage 1: 40 + 40 + 16"),
    ):
        case = f"{parameters} parameters, {ranks} ranks, {memory} bytes, {activations} of activations, {precision}"
        expect_equal(
            case, budget.cheapest_stage(parameters, ranks, memory, activations, precision), expected, remark=remark
        )


CHECKS = {"model_states": model_states, "kv_cache_bytes": kv_cache_bytes, "cheapest_stage": cheapest_stage}
