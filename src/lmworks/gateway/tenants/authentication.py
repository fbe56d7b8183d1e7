"""From a request to its caller. Wrong keys are counted, and guessing is slowed down.

Addresses that name keys which do not exist are counted each by itself; wrong secrets of a key that exists by address
and key. So nobody can lock another address out of its key, and somebody behind the same address only with its prefix.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from ...serve.keys import sent_key
from ...serve.limits import APIError
from ..http_server import HTTPRequest
from .config import Tenants
from .directory import Caller, Directory
from .identity import prefix_of
from .rates import Bucket

log = logging.getLogger("lmworks.gateway")

MOST_REMEMBERED = 65536  # addresses and keys of failures


class Authentication:
    def __init__(
        self, directory: Directory, config: Callable[[], Tenants], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory, self.config, self.clock = directory, config, clock
        self.failures: OrderedDict[tuple[str, str], Bucket] = OrderedDict()

    def caller(self, request: HTTPRequest) -> Caller:
        """Raises APIError: 401 without a valid key, 429 after too many wrong ones, 403 for a disabled tenant."""
        shown = sent_key({name: request.header(name) or "" for name in ("authorization", "x-api-key")})
        if shown is None:
            raise APIError(401, "missing_api_key", "an API key is needed: send the header Authorization: Bearer KEY")
        prefix = prefix_of(shown)
        source = (request.client, prefix if prefix in self.directory.keys else "")
        self.check_source(source)
        found = self.directory.find(shown)
        if found is None:
            self.failed(source)
            raise APIError(401, "invalid_api_key", "the API key is unknown, expired or revoked")
        if found.tenant.disabled:
            raise APIError(403, "tenant_disabled", f"the tenant {found.tenant.name!r} is disabled")
        return found

    def check_source(self, source: tuple[str, str]) -> None:
        bucket, limit = self.failures.get(source), self.config().auth_failures
        if bucket is not None and (wait := bucket.wait(self.clock(), 1, limit)):
            message = f"too many wrong API keys from this address: try again in {math.ceil(wait)} s"
            raise APIError(429, "too_many_auth_failures", message, None, wait)

    def failed(self, source: tuple[str, str]) -> None:
        limit = self.config().auth_failures
        bucket = self.failures.setdefault(source, Bucket())
        self.failures.move_to_end(source)
        bucket.add(self.clock(), 1, limit)
        if bucket.wait(self.clock(), 1, limit):
            log.warning("too many wrong API keys", extra={"client": source[0], "key": source[1]})
        while len(self.failures) > MOST_REMEMBERED:
            self.failures.popitem(last=False)
