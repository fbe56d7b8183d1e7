"""Admission: which requests are rejected, and why, before they take any resources."""

from __future__ import annotations

from collections.abc import Collection

from ...spec import SpecError
from ...spec.errors import did_you_mean
from .request import Request
from .sampling_params import index

MAX_PRIORITY = 1000


def check_prompt(request: Request, valid_vocab: int, context: int) -> None:
    prompt = request.prompt
    if not prompt:
        raise SpecError("the prompt is empty: give at least one token")
    for token in prompt:
        if index(token) is None or not 0 <= token < valid_vocab:
            raise SpecError(f"the prompt holds token {token!r:.60}: the model's tokens are 0 to {valid_vocab - 1}")
    if len(prompt) >= context:
        raise SpecError(
            f"the prompt has {len(prompt)} tokens: with an answer of one token or more it does not fit "
            f"engine.context = {context}"
        )


def check_kv_capacity(request: Request, limit: int, size: int, blocks: int) -> None:
    """Alone in the pool it must fit, or it would wait forever. The last output token is never computed."""
    needed = -(-(limit - 1) // size)
    if needed > blocks:
        raise SpecError(
            f"the prompt ({len(request.prompt)} tokens) and max_tokens = {request.params.max_tokens} need {needed} "
            f"blocks of {size} tokens, and the pool has {blocks}: ask for fewer tokens, or give the engine more "
            "memory (engine.memory, engine.blocks)"
        )


def check_params(request: Request, adapters: Collection[str], has_tokenizer: bool) -> None:
    params = request.params
    if not isinstance(request.tenant, str):
        raise SpecError(f"tenant = {request.tenant!r:.60}: the name of a tenant is expected")
    if index(request.priority) is None:
        raise SpecError(f"priority = {request.priority!r:.60}: a whole number is expected")
    if abs(request.priority) > MAX_PRIORITY:
        raise SpecError(f"priority = {request.priority}: it must be between −{MAX_PRIORITY} and {MAX_PRIORITY}")
    if params.adapter is not None and params.adapter not in adapters:
        raise SpecError(f"adapter {params.adapter!r} is not loaded{did_you_mean(params.adapter, adapters)}")
    if not has_tokenizer and (params.stop or params.structured):
        raise SpecError("stop strings and structured output need a tokenizer; this engine has none: use token ids")
