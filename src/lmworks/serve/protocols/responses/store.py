"""Responses that can be retrieved and continued: in memory, bounded for each tenant, and lost with the process.

A response holds its own input and output, and the id of the one before it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

from ...limits import APIError, Limits


@dataclass(frozen=True)
class Stored:
    response: dict[str, Any]
    input: list[dict[str, Any]]
    bytes: int  # of both as JSON


class ResponseStore:
    def __init__(self) -> None:
        self.tenants: defaultdict[str, OrderedDict[str, Stored]] = defaultdict(OrderedDict)  # the oldest first
        self.bytes: defaultdict[str, int] = defaultdict(int)

    def put(self, tenant: str, stored: Stored, limits: Limits) -> None:
        """Drops the tenant's oldest where there are too many."""
        response = stored.response
        kept = self.tenants[tenant]
        kept[response["id"]] = stored
        self.bytes[tenant] += stored.bytes
        while len(kept) > limits.stored_responses or self.bytes[tenant] > limits.stored_bytes:
            self.delete(tenant, next(iter(kept)))

    def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """Another tenant's is not found, like one that never was."""
        found = self.tenants[tenant].get(response_id) if tenant in self.tenants else None
        if found is None:
            message = f"there is no response {response_id[:64]!r}: it was not stored, or is gone"
            raise APIError(404 if param is None else 400, "response_not_found", message, param)
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        self.bytes[tenant] -= self.get(tenant, response_id).bytes
        del self.tenants[tenant][response_id]

    def conversation(self, tenant: str, response_id: str | None, limits: Limits) -> list[dict[str, Any]]:
        """Items of a response and of all before it, the oldest first."""
        parts: list[list[dict[str, Any]]] = []
        items = size = 0
        while response_id is not None:
            stored = self.get(tenant, response_id, "previous_response_id")
            parts.append([*stored.input, *stored.response["output"]])
            items, size = items + len(parts[-1]), size + stored.bytes
            if items > limits.messages or size > limits.body_bytes:
                message = "the responses before this one are longer than one request may be"
                raise APIError(400, "limit_exceeded", message, "previous_response_id")
            response_id = stored.response["previous_response_id"]
        return [item for part in reversed(parts) for item in part]
