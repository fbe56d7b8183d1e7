"""Who asks: the tenant of a request, and the key that it came with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """Whose requests count together. Its name and tier are labels of metrics and logs."""

    name: str
    tier: str  # of service: its weight under overload and its limits


ANYONE = Tenant("anyone", "default")  # where the gateway asks for no keys
