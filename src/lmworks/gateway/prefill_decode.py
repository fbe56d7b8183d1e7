"""Prefill apart from decode: a prompt is computed by one pool of servers, and answered by another.

A prefill server (`engine.kv_listen`) gets the request first, for one token. The same request then goes to a decode
server, and names the first one's blocks, which the decode server fetches (`engine.kv_peers`). It computes what it does
not get, so the answer is the same whatever fails: without a prefill server the decode server does all of it, without a
decode server a prefill server does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..spec import LMWorksError

ONE_TOKEN = {"max_tokens": 1, "stream": False}
ANSWER_SETTINGS = ("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "continuation")
RETRIED = (429, 500, 502, 503, 504)  # statuses that another server may not have


@dataclass(frozen=True)
class PrefillServer:
    url: str  # without /v1
    blocks: str  # its engine.kv_listen


@dataclass
class PrefillDecode:
    """Both pools. Of each, the server with the fewest requests under way is asked first."""

    prefill: Sequence[PrefillServer]
    decode: Sequence[str]  # addresses, without /v1
    client: httpx.AsyncClient
    prefill_seconds: float = 60.0  # after which the decode server computes the prompt
    open: Counter[str] = field(default_factory=Counter)  # requests under way, by address

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The answer to a request that is not streamed."""
        body = await self.prefilled(path, body, headers)
        own = {name: value for name, value in body.items() if name != "kv_transfer_params"}
        tries = [(url, body) for url in sorted(self.decode, key=self.open.__getitem__)]
        tries += [(server.url, own) for server in self.prefill]
        error: Exception | None = None
        for last, (url, sent) in enumerate(tries, start=1 - len(tries)):
            self.open[url] += 1
            try:
                answer = await self.client.post(url + path, json=sent, headers=headers)
                if answer.status_code not in RETRIED or not last:
                    return answer
            except httpx.TransportError as failed:
                error = failed
            finally:
                self.open[url] -= 1
        raise LMWorksError(f"no server of the decode pool and of the prefill pool answers ({error})")

    async def prefilled(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The request for a decode server. Where no prefill server computes the prompt it is as it was."""
        shortened = {name: value for name, value in body.items() if name not in ANSWER_SETTINGS} | ONE_TOKEN
        for server in sorted(self.prefill, key=lambda each: self.open[each.url]):
            self.open[server.url] += 1
            try:
                answer = await self.client.post(
                    server.url + path, json=shortened, headers=headers, timeout=self.prefill_seconds
                )
            except httpx.TransportError:
                continue
            finally:
                self.open[server.url] -= 1
            if answer.status_code == 200:
                return {**body, "kv_transfer_params": {"remote": server.blocks}}
            if answer.status_code not in RETRIED:
                break  # the decode server says what is wrong with the request
        return dict(body)
