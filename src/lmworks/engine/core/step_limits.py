"""How much a step computes: its tokens, by the card and the model, and what attention over a context adds to them."""

from __future__ import annotations

import math

import torch

from ...spec import ModelSpec, recognise
from ...spec.components import attention_core, token_cache

STEP_SECONDS, PRODUCT_RATE = 0.25, 0.6  # of a step of prompts; FLOP/s of its products beside the card's peak
MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 2048, 8192
ATTENTION_RATE = 0.7  # FLOP/s of attention over long contexts beside those of large matrix products, on an H200


def batch_tokens(model: ModelSpec, device: torch.device, tp: int) -> int:
    """Tokens of a step, so that it takes about STEP_SECONDS: a power of two, by what the card computes."""
    if device.type == "cpu":
        return 512
    gpu = recognise(torch.cuda.get_device_name(device))
    peak = None if gpu is None else gpu.peak_flops("bf16")
    if peak is None:
        return MAX_BATCH_TOKENS
    tokens = int(STEP_SECONDS * PRODUCT_RATE * peak * tp / (2 * model.layers * model.block_matmul_params))
    return min(max(1 << (tokens.bit_length() - 1), MIN_BATCH_TOKENS), MAX_BATCH_TOKENS)


def context_of_token(model: ModelSpec) -> float:
    """Keys whose attention takes as long as the matrix products of one token; infinite where windows bound them."""
    core = attention_core(model)
    if core.window and not core.full_share:
        return math.inf
    cache = token_cache(model)
    absorbed = cache.vectors == 1  # one vector is key and value of all heads
    per_key = 4 * core.heads * cache.width if absorbed else core.flops_per_key
    return ATTENTION_RATE * 2 * model.block_matmul_params / (per_key * (core.full_share or 1))
