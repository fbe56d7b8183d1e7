"""A stream whose server is lost goes on with another one: by tokens between servers of ours, by text on others."""

from __future__ import annotations

from ..serve.limits import APIError
from ..serve.sse import DONE
from .config import ModelRule
from .exchange import Exchange
from .http_client import UpstreamError
from .prefix_continuation import takes_prefix
from .relay import StreamRelay
from .server_choice import ServerChoice
from .server_request import USAGE_PATHS
from .token_continuation import can_continue
from .tries import Tries

MIGRATIONS = 8  # of one stream


class Migration:
    def __init__(self, tries: Tries, choice: ServerChoice) -> None:
        self.tries, self.choice = tries, choice

    async def run(self, exchange: Exchange, rule: ModelRule, relay: StreamRelay, last: APIError) -> None:
        """After `exchange.server` has failed with `last`; raises where no server can take the stream up."""
        assert exchange.server is not None
        failed = {exchange.server}
        for _ in range(MIGRATIONS):
            left = self.choice.of_its_version(exchange, rule, failed)
            by_tokens = relay.journal and relay.complete and not relay.by_prefix
            able = [server for server in left if can_continue(server, exchange)] if by_tokens else []
            if not able and relay.plain and exchange.path in USAGE_PATHS and relay.texts:
                if relay.finished:  # nothing was left but its last event
                    exchange.connection.write(DONE)
                    exchange.connection.end()
                    return
                able = [server for server in left if takes_prefix(server, exchange)]
                relay.by_prefix = len(relay.texts)
            if not able:
                raise lost(last)
            server = self.choice.pick(able, exchange, rule)
            exchange.server, exchange.migrations = server, exchange.migrations + 1
            try:
                await self.tries.run(exchange, server, rule, relay)
                return
            except UpstreamError as error:
                failed.add(server)
                last = self.tries.failed(exchange, server, error)
        raise lost(last)


def lost(last: APIError) -> APIError:
    """One code for all streams that were cut off, whatever their last server failed with."""
    return APIError(502, "upstream_lost", str(last))
