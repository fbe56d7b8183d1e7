"""What blocks were computed by, as a hash: blocks of other weights, another precision or another layout are foreign."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..core.model_runner import ModelRunner

FORMAT = 1  # of the bytes of a block: count up when they change
CHUNK = 1 << 22  # numbers that are summed at once
PRIME = 2_147_483_629  # weights of the sum: positions modulo this one, so that exchanged numbers are noticed


def fingerprint(runner: ModelRunner) -> bytes:
    """Of the model and the draft model, and the layout of their caches."""
    models = [runner.model, *([] if runner.draft is None else [runner.draft.model])]
    caches = [runner.cache, *([] if runner.draft is None else [runner.draft.cache])]
    layout = {
        "format": FORMAT,
        "models": [asdict(model.spec) for model in models],
        "dtype": runner.spec.dtype,
        "context": runner.spec.context,  # scaled rotary embeddings depend on it
        "caches": [{**asdict(cache.shape), "dtype": str(cache.shape.dtype)} for cache in caches],
    }
    found = hashlib.blake2b(json.dumps(layout, sort_keys=True, default=str).encode(), digest_size=32)
    for model in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for number in content_sums(tensor):
                found.update(number.to_bytes(8, "little", signed=True))
    return found.digest()


def block_key(fingerprint: bytes, digest: bytes) -> bytes:
    """Of a block in any store; `digest` is its hash in the prefix cache: tokens, tenant, adapter, salt."""
    return hashlib.blake2b(fingerprint + digest, digest_size=16).digest()


@torch.no_grad()
def content_sums(tensor: Tensor) -> tuple[int, int]:
    """Sums over all its numbers as integers modulo 2**64, plain and weighted by position: exact on every device."""
    flat = tensor.detach().contiguous().view(-1)
    width = flat.element_size()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = flat.view(integers[width]) if flat.dtype != torch.bool else flat.to(torch.int8)
    plain = weighted = 0
    for begin in range(0, len(flat), CHUNK):
        part = flat[begin : begin + CHUNK].to(torch.int64)
        weight = (torch.arange(begin + 1, begin + 1 + len(part), device=part.device) * 0x9E3779B1) % PRIME
        plain += int(part.sum())
        weighted += int((part * weight).sum())
    return wrap(plain), wrap(weighted)


def wrap(number: int) -> int:
    """As a signed integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
