"""What the gateway's file says of tenants: where keys and usage are kept, and tiers of service.

    [tenants]
    store = "sqlite:///var/lib/lmworks/gateway.db"    # or postgresql://…
    journal = "/var/lib/lmworks/journal"

    [[tiers]]
    name = "gold"
    weight = 4
    requests_per_minute = 600                         # limits of tenants that have none of their own

Tenants and keys themselves are in the store: `lmworks gateway tenants` and `lmworks gateway keys`.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import ClassVar

from ...spec import SpecError
from ...spec.schema import Section, opt
from .limits import Limits

STORES = ("sqlite:///", "postgresql://")
LIMIT_STORES = ("redis://", "rediss://", "unix://")
DEFAULT_TIER = "default"


@dataclass(frozen=True)
class Tenants(Section):
    """Whether clients need keys: they do where there is a `store`."""

    section: ClassVar[str] = "tenants"

    store: str = opt("", "keys, tenants and usage: sqlite:///FILE, or postgresql://… for several gateways")
    store_env: str = opt("", "environment variable with that address, where it has a password")
    limits: str = opt("", "rates of several gateways: redis://… (Redis or Valkey); empty: each counts for itself")
    limits_env: str = opt("", "environment variable with that address")
    journal: str = opt("", "folder of this gateway's usage journal (empty: beside the SQLite file)")
    refresh_seconds: float = opt(1.0, "how soon a change of keys or tenants is seen", gt=0)
    flush_seconds: float = opt(0.2, "how often the journal is synced to disk and written into the store", gt=0)
    store_down: str = opt("open", "while the store is away: serve known keys, or refuse", choices=("open", "closed"))
    limits_down: str = opt(
        "open", "while Redis is away: each gateway counts for itself, or refuse", choices=("open", "closed")
    )
    journal_down: str = opt(
        "closed", "where usage cannot be written: refuse, or serve uncounted", choices=("open", "closed")
    )
    assumed_output: int = opt(512, "generated tokens that are reserved where a request sets no limit", ge=0)
    auth_failures: int = opt(20, "wrong keys in a minute from one address, or for one key, until it is refused", ge=1)
    admin_port: int = opt(0, "a listener of its own for /admin (0: on the port of clients)", ge=0, le=65535)
    admin_host: str = opt("127.0.0.1", "its address")

    def check(self) -> None:
        for name, kinds in (("store", STORES), ("limits", LIMIT_STORES)):
            variable = getattr(self, f"{name}_env")
            if variable and getattr(self, name):
                raise SpecError(f"tenants: {name} and {name}_env are both given: give one of them")
            if variable:
                if variable not in os.environ:
                    raise SpecError(f"tenants.{name}_env = {variable!r}: there is no such environment variable")
                self.derive(name, os.environ[variable])
            value = getattr(self, name)
            if value and not value.startswith(kinds):
                raise SpecError(f"tenants.{name} must begin with {' or '.join(kinds)}")
        changed = [one.name for one in dataclasses.fields(self) if self.given[one.name] != one.default]
        if changed and not self.store:
            raise SpecError(f"tenants.{changed[0]} is of no use without tenants.store, which turns keys on")
        if self.store and not self.journal:
            if not self.store.startswith("sqlite:///"):
                raise SpecError("tenants.journal: name a folder of this gateway's own for the usage journal")
            self.derive("journal", f"{self.store.removeprefix('sqlite:///')}.journal")

    @property
    def on(self) -> bool:
        return bool(self.store)

    @property
    def fixed(self) -> tuple[object, ...]:
        """What a running gateway cannot change."""
        return self.store, self.limits, self.journal, self.admin_host, self.admin_port


@dataclass(frozen=True)
class Tier(Limits):
    """A level of service that tenants have in common."""

    section: ClassVar[str] = "tiers"

    name: str = opt("", "name, as tenants have it")
    weight: float = opt(1.0, "share of a pool under overload, beside the weights of other tenants", gt=0)

    def check(self) -> None:
        if not self.name:
            raise SpecError("tiers: every tier needs a name")
