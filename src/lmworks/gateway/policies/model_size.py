"""The smallest model that a request fits: of pools with `size`, the least one whose `up_to_tokens` holds it."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy
from .cost import expected_tokens


class ModelSize(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        tokens = sum(expected_tokens(exchange))
        fitting = [one for one in servers if not one.pool.up_to_tokens or tokens <= one.pool.up_to_tokens]
        if not fitting:  # too long for all: the one that takes the longest
            most = max(one.pool.up_to_tokens for one in servers)
            return [one for one in servers if one.pool.up_to_tokens == most]
        least = min(one.pool.size for one in fitting)
        return [one for one in fitting if one.pool.size == least]
