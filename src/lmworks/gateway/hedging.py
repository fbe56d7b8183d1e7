"""Hedged requests: a server that has not begun to answer in time gets a rival, and the first to begin answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .config import ModelRule
from .exchange import Exchange
from .http_client import UpstreamError
from .outcomes import RetryBudget
from .relay import StreamRelay
from .server_choice import ServerChoice
from .servers import Server
from .tries import Tries, Try

Race = dict[asyncio.Task[Try], Server]  # tries until they begin


class Hedging:
    def __init__(self, tries: Tries, choice: ServerChoice) -> None:
        self.tries, self.choice = tries, choice
        self.budget = RetryBudget(lambda: choice.config().health.hedge_share)

    async def run(
        self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay, failed: set[Server]
    ) -> None:
        """As `Tries.run`, with a rival after `hedge_seconds`. A server that loses sees its client leave."""
        exchange.count()
        race: Race = {self.enter(exchange, server, rule, relay): server}
        try:
            await asyncio.wait(race, timeout=rule.hedge_seconds)
            if not any(task.done() for task in race):
                rivals = self.choice.able(exchange, rule, {server, *failed})
                if rivals and self.budget.spend():
                    rival = self.choice.pick(rivals, exchange, rule)
                    exchange.hedge = "none"
                    race[self.enter(exchange, rival, rule, relay)] = rival
            winner = await self.first(race, exchange, failed)
        finally:
            leave(race, exchange)
        exchange.server = winner.server
        if exchange.hedge:
            exchange.hedge = "first" if winner.server is server else "second"
        await self.tries.finish(winner, exchange, relay)

    def enter(self, exchange: Exchange, server: Server, rule: ModelRule, relay: StreamRelay) -> asyncio.Task[Try]:
        return asyncio.create_task(self.tries.begin(exchange, server, rule, relay))

    async def first(self, race: Race, exchange: Exchange, failed: set[Server]) -> Try:
        """The first that begins, taken out of the race; raises the last error where none does."""
        while True:
            done = {task for task in race if task.done()}  # mostly: waiting takes another turn of the event loop
            if not done:
                done, _ = await asyncio.wait(race, return_when=asyncio.FIRST_COMPLETED)
            winner = next((task for task in done if task.exception() is None), None)
            for task in done - {winner}:
                error = task.exception()
                if error is None:
                    continue  # as quick as the winner
                exchange.server = server = race.pop(task)
                if not isinstance(error, UpstreamError) or not (race or winner):
                    raise error
                failed.add(server)
                self.tries.failed(exchange, server, error)
            if winner is not None:
                del race[winner]
                return winner.result()


def leave(race: Iterable[asyncio.Task[Try]], exchange: Exchange) -> None:
    """Nobody waits for these any more; some have begun at the same time as the winner.

    Nothing is awaited: a client that left meanwhile would leave a winner that nobody closes.
    """
    for task in race:
        if not task.cancel() and task.exception() is None:
            task.result().server.breaker.abandoned()
            task.result().close(exchange)
