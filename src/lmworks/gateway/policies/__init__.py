"""Routing policies, a file each. A policy narrows the servers that may answer down to those that it prefers.

Several are applied in their order, so a filter, a score and a pick are the same thing; what is left after the last is
taken in turn. A policy that has no preference for a request leaves the servers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..prompt_index import PromptBlocks
from ..servers import Server


class Policy:
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        """At least one of `servers`, which are never none."""
        raise NotImplementedError

    def answered(self, server: Server, exchange: Exchange, blocks: PromptBlocks) -> None:
        """The server has begun to answer, and says which blocks the prompt has."""

    def failed(self, server: Server, exchange: Exchange) -> None:
        """It did not answer."""


def make_policy(name: str) -> Policy:
    from .cost import Cost
    from .least_loaded import LeastLoaded
    from .model_size import ModelSize
    from .power_of_two import PowerOfTwo
    from .prefix_cache import PrefixCache
    from .priority import Priority
    from .round_robin import RoundRobin
    from .session_affinity import SessionAffinity
    from .tier import Tier
    from .warm_adapter import WarmAdapter

    kinds: dict[str, type[Policy]] = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "session_affinity": SessionAffinity,
        "prefix_cache": PrefixCache,
        "cost": Cost,
        "model_size": ModelSize,
        "tier": Tier,
        "priority": Priority,
        "warm_adapter": WarmAdapter,
    }
    return kinds[name]()


class Router:
    """Policies by their names: each keeps its state over all requests of one model."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str], Policy] = {}

    def pick(self, servers: Sequence[Server], exchange: Exchange, names: Sequence[str]) -> Server:
        for name in (*names, "round_robin"):
            if len(servers) == 1:
                break
            policy = self.made.get((exchange.rule.name, name))
            if policy is None:
                policy = self.made[exchange.rule.name, name] = make_policy(name)
            servers = policy.narrow(servers, exchange)
        return servers[0]

    def of(self, exchange: Exchange) -> list[Policy]:
        """Policies that have seen requests like this one."""
        return [policy for (model, _), policy in self.made.items() if model == exchange.rule.name]
