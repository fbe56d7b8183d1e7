"""What administrators do to tenants and keys, by command or over HTTP: all of it is in the audit log."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...spec import SpecError
from ...spec.errors import did_you_mean
from .config import DEFAULT_TIER, Tier
from .identity import MARK, ROLES, Key, Tenant, digest, new_secret, prefix_of
from .limits import DAY_S, NANO, Limits
from .store import GROUPS, Entry, Store


class NotFound(SpecError):
    """A tenant or key that is not there."""


LONGEST = 100 * 365 * DAY_S  # a key's life: clocks and calendars end some time after that
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass
class Administration:
    """`actor`: a key's prefix, or who runs the command line; `source`: from where."""

    store: Store
    tiers: list[Tier]
    actor: str
    source: str

    def entry(self, action: str, target: str, **details: Any) -> Entry:
        return Entry(self.actor, self.source, action, target, details)

    # --- tenants ------------------------------------------------------------------------------------------

    def tenants(self) -> list[Tenant]:
        return sorted(self.store.changes(-1)[1], key=lambda one: one.name)

    def tenant(self, name: str) -> Tenant:
        found = {one.name: one for one in self.tenants()}
        if name not in found:
            raise NotFound(f"there is no tenant {name!r}{did_you_mean(name, found)}")
        return found[name]

    def create_tenant(self, name: str, tier: str, limits: Limits, cache_group: str = "") -> Tenant:
        if not NAME.fullmatch(name):
            raise SpecError(
                f"tenant: {name!r:.80} is no name: letters, digits, dots, dashes and underscores, 63 at most"
            )
        if any(one.name == name for one in self.tenants()):
            raise SpecError(f"there is a tenant {name!r} already")
        self.check_tier(tier)
        made = Tenant(name, tier, limits, cache_group, created=time.time())
        self.store.put_tenant(made, self.entry("tenants.create", name, tier=tier, limits=limits.given_values()))
        return made

    def update_tenant(
        self, name: str, tier: str | None, limits: dict[str, Any], cache_group: str | None, disabled: bool | None
    ) -> Tenant:
        """What is None stays; a limit of 0 is none of its own."""
        tenant = self.tenant(name)
        if tier is not None:
            self.check_tier(tier)
        changed = replace(
            tenant,
            tier=tenant.tier if tier is None else tier,
            limits=Limits.from_dict({**tenant.limits.given_values(), **limits}),
            cache_group=tenant.cache_group if cache_group is None else cache_group,
            disabled=tenant.disabled if disabled is None else disabled,
        )
        given = {"tier": tier, "limits": limits or None, "cache_group": cache_group, "disabled": disabled}
        details = {word: value for word, value in given.items() if value is not None}
        self.store.put_tenant(changed, self.entry("tenants.update", name, **details))
        return changed

    def check_tier(self, tier: str) -> None:
        known = [DEFAULT_TIER, *(one.name for one in self.tiers)]
        if tier not in known:
            raise SpecError(f"there is no tier {tier!r}{did_you_mean(tier, known)}")

    # --- keys ---------------------------------------------------------------------------------------------

    def keys(self, tenant: str | None = None) -> list[Key]:
        found = [key for key in self.store.changes(-1)[2] if tenant is None or key.tenant == tenant]
        return sorted(found, key=lambda key: (key.tenant, key.created))

    def key(self, prefix: str) -> Key:
        if prefix_of(prefix):
            raise SpecError("a whole key was given: its prefix is enough, and no secret")
        found = {key.prefix: key for key in self.keys()}
        if prefix not in found:
            raise NotFound(f"there is no key {prefix[:40]!r}: give its prefix, {MARK}- and eight characters")
        return found[prefix]

    def create_key(
        self,
        tenant: str,
        name: str = "",
        role: str = "member",
        models: Sequence[str] = (),
        limits: Limits | None = None,
        expires_in: float | None = None,
    ) -> tuple[Key, str]:
        """The key, and its secret, which nobody sees again."""
        self.tenant(tenant)
        if role not in ROLES:
            raise SpecError(f"there is no role {role!r}{did_you_mean(role, ROLES)}")
        if expires_in is not None and expires_in <= 0:
            raise SpecError("a key that has expired already is of no use")
        check_longest("expires_in", expires_in or 0.0)
        prefix, secret = new_secret()
        now, limits = time.time(), limits or Limits()
        ends = None if expires_in is None else now + expires_in
        key = Key(prefix, tenant, digest(secret), name, role, prefix, tuple(models), limits, now, ends)
        details = {"tenant": tenant, "role": role, "name": name, "models": list(models), "expires": ends}
        self.store.put_keys([key], self.entry("keys.create", prefix, **details, limits=limits.given_values()))
        return key, secret

    def rotate_key(self, prefix: str, overlap: float = DAY_S) -> tuple[Key, str]:
        """A new key like this one, which is valid for `overlap` seconds more. They share their limits and spending."""
        old, now = self.key(prefix), time.time()
        if old.state(now) in ("revoked", "expired"):
            raise SpecError(f"the key {prefix!r} is {old.state(now)}: create a new one")
        if overlap < 0:
            raise SpecError(f"overlap = {overlap:g}: seconds, 0 or more")
        check_longest("overlap", overlap)
        new_prefix, secret = new_secret()
        ends = now + overlap if old.expires is None else min(old.expires, now + overlap)
        new = replace(old, prefix=new_prefix, sha256=digest(secret), created=now)
        entry = self.entry("keys.rotate", prefix, replaced_by=new_prefix, old_expires=ends)
        self.store.put_keys([replace(old, expires=ends), new], entry)
        return new, secret

    def revoke_key(self, prefix: str) -> Key:
        revoked = replace(self.key(prefix), disabled=True)
        self.store.put_keys([revoked], self.entry("keys.revoke", prefix, tenant=revoked.tenant))
        return revoked

    # --- usage --------------------------------------------------------------------------------------------

    def usage(
        self, groups: Sequence[str], since: float = 0.0, until: float | None = None, tenant: str | None = None
    ) -> list[dict[str, Any]]:
        unknown = next((name for name in groups if name not in GROUPS), None)
        if unknown is not None:
            raise SpecError(f"usage is not kept by {unknown!r}{did_you_mean(unknown, GROUPS)}")
        rows = self.store.usage(groups, since, time.time() + DAY_S if until is None else until, tenant)
        for row in rows:
            row["dollars"] = row.pop("nanodollars") / NANO
        return rows


def shown_tenant(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "tier": tenant.tier,
        "limits": tenant.limits.given_values(),
        "cache_group": tenant.cache_group,
        "disabled": tenant.disabled,
        "created": tenant.created,
    }


def shown_key(key: Key) -> dict[str, Any]:
    """Without its digest."""
    return {
        "prefix": key.prefix,
        "tenant": key.tenant,
        "name": key.name,
        "role": key.role,
        "state": key.state(time.time()),
        "models": list(key.models),
        "limits": key.limits.given_values(),
        "created": key.created,
        "expires": key.expires,
        "rotated_from": None if key.family == key.prefix else key.family,
    }


def check_longest(name: str, seconds: float) -> None:
    if not seconds <= LONGEST:
        raise SpecError(f"{name} = {seconds:g}: at most {LONGEST:g} seconds, a hundred years")
