"""Which server a request goes to: of those that have the model, the ones that its rollout, its place and its objective
leave, and of these the one that the policies pick.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from .admission import in_time
from .config import GatewayConfig, ModelRule
from .exchange import Exchange
from .policies import Router
from .prefill_decode import check_agreement, disagreement
from .rollouts import Rollouts
from .servers import Server, Servers


class ServerChoice:
    def __init__(self, config: Callable[[], GatewayConfig], servers: Servers, rollouts: Rollouts) -> None:
        self.config, self.servers, self.rollouts = config, servers, rollouts
        self.router = Router()

    def able(self, exchange: Exchange, rule: ModelRule, without: Container[Server]) -> list[Server]:
        """Servers on the request's side of a rollout. Prefill servers answer where there are no others."""
        found = self.servers.serving(rule.serves, rule.pools, without)
        if not found and rule.prefill_pools:
            found = self.servers.serving(rule.serves, rule.prefill_pools, without)
        if exchange.ticket is not None:
            found = [server for server in found if server.pool.name == exchange.ticket.pool] or found
        return self.rollouts.narrow(found, exchange, rule.name)

    def first(self, exchange: Exchange, rule: ModelRule, failed: Container[Server]) -> Server | None:
        """Raises APIError where there are servers, and none would answer in time, or take KV blocks."""
        found = self.able(exchange, rule, failed)
        if rule.prefill_pools and found and found[0].pool.name in rule.pools:
            found = check_agreement(found, self.servers.known(rule.serves, rule.prefill_pools), rule.serves)
        found = in_time(found, exchange, self.config().level(rule.name, exchange.tenant.tier))
        return self.pick(found, exchange, rule) if found else None

    def prefill(self, exchange: Exchange, rule: ModelRule, decode: Server, failed: Container[Server]) -> Server | None:
        """Who computes the prompt for this decode server."""
        found = [
            server
            for server in self.servers.serving(rule.serves, rule.prefill_pools, failed)
            if disagreement(server, decode, rule.serves) is None
        ]
        return self.pick(found, exchange, rule) if found else None

    def of_its_version(self, exchange: Exchange, rule: ModelRule, failed: Container[Server]) -> list[Server]:
        """Servers that can go on with what `exchange.server` has said: of a rollout's pools those of the same one."""
        pools = rule.pools
        if self.rollouts.of(rule.name) is not None and exchange.server is not None:
            pools = [exchange.server.pool.name]
        return self.servers.serving(rule.serves, pools, failed)

    def pick(self, servers: Sequence[Server], exchange: Exchange, rule: ModelRule) -> Server:
        return self.router.pick(servers, exchange, rule.policy or self.config().routing.policy)
