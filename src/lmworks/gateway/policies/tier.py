"""Pools of a tier: its requests go to pools that name it, others' to pools that name none, while these are up."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy


class Tier(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        own = [one for one in servers if exchange.tenant.tier in one.pool.tiers]
        return own or [one for one in servers if not one.pool.tiers] or servers
