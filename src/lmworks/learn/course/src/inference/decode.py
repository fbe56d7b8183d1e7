"""One token at a time: attention of the newest token over all keys and values that are kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def decode_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Keeps k and v of the token at `position`, and returns its attention over all tokens up to it.

    q and the result (heads, dim), k and v (kv_heads, dim); query head h reads KV head h // (heads / kv_heads). keys and
    values (max_len, kv_heads, dim) are written in place; beyond `position` anything may stand in them.
    """
    # exercise decode_step(q, k, v, keys, values, position)
    keys[position], values[position] = k, v
    group = q.shape[0] // k.shape[0]
    seen_keys, seen_values = (cache[: position + 1].repeat_interleave(group, dim=1) for cache in (keys, values))
    scores = torch.einsum("hd,shd->hs", q, seen_keys) / math.sqrt(q.shape[-1])
    return torch.einsum("hs,shd->hd", scores.softmax(dim=-1), seen_values)
    # end decode_step
