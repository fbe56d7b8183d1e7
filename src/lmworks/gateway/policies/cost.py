"""The cheapest pool for a request, by its prompt and its longest answer: dearer ones are for when the cheap are busy.

Where the model has an objective (`[[slos]]`), only servers that would meet it are here. Else a server with QUEUE or
more requests to do is passed over where another one has fewer, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import Exchange
from ..servers import Server
from . import Policy

QUEUE = 32
BYTES_A_TOKEN = 4  # of JSON
ANSWER_TOKENS = 256  # where a request does not say how many at most
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Cost(Policy):
    def narrow(self, servers: Sequence[Server], exchange: Exchange) -> Sequence[Server]:
        free = [server for server in servers if server.queue < QUEUE] or servers
        prompt, answer = expected_tokens(exchange)
        prices = [server.pool.price_in * prompt + server.pool.price_out * answer for server in free]
        least = min(prices)
        return [server for server, price in zip(free, prices, strict=True) if price == least]


def expected_tokens(exchange: Exchange) -> tuple[int, int]:
    """Of the prompt, and of the answer at most."""
    given = (exchange.body.get(name) for name in LIMITS if name in exchange.body.fields)
    answer = next((one for one in given if isinstance(one, int) and one > 0), ANSWER_TOKENS)
    return len(exchange.body.raw) // BYTES_A_TOKEN + 1, answer
