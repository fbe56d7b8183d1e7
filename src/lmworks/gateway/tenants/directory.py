"""Tenants and keys in memory, followed from the store: no request waits for a database.

A change is seen after `refresh_seconds` at the latest. While the store is away, what is known stays; what that means
for requests is `tenants.store_down`.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...serve.limits import APIError
from .config import DEFAULT_TIER, Tier
from .identity import Key, Tenant, digest, prefix_of
from .store import Store

NOBODY = digest("a key that nobody has")


@dataclass(frozen=True)
class Caller:
    """A key that was shown, with its tenant: limits are the tenant's own over those of its tier."""

    tenant: Tenant
    key: Key
    weight: float

    def check_role(self, role: str, what: str) -> None:
        if not self.key.may(role):
            raise APIError(403, "role_not_allowed", f"{what} needs the role {role}; this key has {self.key.role}")

    def may_use(self, model: str) -> bool:
        return not self.key.models or model in self.key.models

    def check_model(self, name: str) -> None:
        if not self.may_use(name):
            raise APIError(403, "model_not_allowed", f"this key may not use the model {name[:80]!r}", "model")


class Directory:
    def __init__(self, store: Store, tiers: Callable[[], list[Tier]]) -> None:
        self.store, self.tiers = store, tiers
        self.tenants: dict[str, Tenant] = {}
        self.keys: dict[str, Key] = {}
        self.change = 0
        self.callers: dict[str, Caller] = {}  # by prefix, as they are now
        self.tiers_then: list[Tier] = []

    def read_changes(self) -> tuple[int, list[Tenant], list[Key]]:
        """In the store's thread; raises StoreDown."""
        return self.store.changes(self.change)

    def apply(self, found: tuple[int, list[Tenant], list[Key]]) -> None:
        change, tenants, keys = found
        if change == self.change:
            return
        self.change = change
        self.tenants |= {one.name: one for one in tenants}
        self.keys |= {one.prefix: one for one in keys}
        self.callers = {}

    def find(self, secret: str) -> Caller | None:
        """Who has this key; None where nobody has, or it is not valid any more. Takes as long for each."""
        prefix = prefix_of(secret)
        key = self.keys.get(prefix)
        if not hmac.compare_digest(digest(secret), NOBODY if key is None else key.sha256) or key is None:
            return None
        if key.disabled or (key.expires is not None and time.time() >= key.expires):
            return None
        tiers = self.tiers()
        if tiers is not self.tiers_then:  # the gateway's file has changed
            self.tiers_then, self.callers = tiers, {}
        caller = self.callers.get(prefix)
        if caller is None:
            caller = self.callers[prefix] = resolve(key, self.tenants, tiers)
        return caller


def resolve(key: Key, tenants: Mapping[str, Tenant], tiers: list[Tier]) -> Caller:
    tenant = tenants[key.tenant]
    tier = tier_of(tenant.tier, tiers)
    return Caller(replace(tenant, limits=tenant.limits.over(tier)), key, tier.weight)


def tier_of(name: str, tiers: list[Tier]) -> Tier:
    """The tier of this name; one that the file has no more is as the default one."""
    by_name = {tier.name: tier for tier in tiers}
    return by_name.get(name) or by_name.get(DEFAULT_TIER) or Tier(name=DEFAULT_TIER)
