"""A gateway with tenants, in front of fake servers; tenants and keys are made as the command line makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway_case import FakeServer, pool_file
from lmworks.gateway.config import read_config
from lmworks.gateway.tenants.administration import Administration
from lmworks.gateway.tenants.database import open_database
from lmworks.gateway.tenants.limits import Limits
from lmworks.gateway.tenants.store import Store

QUICK = "refresh_seconds = 0.05\nflush_seconds = 0.02"


def tenant_file(
    file: Path, *servers: FakeServer, tenants: str = "", extra: str = "", store: str = "", **more: Any
) -> Path:
    where = store or f"sqlite:///{file.parent}/gateway.db"
    journal = "" if not store or "journal" in tenants else f'journal = "{file.parent}/journal"'
    head = f'[tenants]\nstore = "{where}"\n{journal}\n{QUICK}\n{tenants}\n{extra}'
    return pool_file(file, *servers, extra=head, **more)


@contextmanager
def administered(file: Path) -> Iterator[Administration]:
    config = read_config(file)
    database = open_database(config.tenants.store)
    try:
        store = Store(database)
        store.prepare()
        yield Administration(store, config.tiers, "tester", "test")
    finally:
        database.close()


def make_tenant(file: Path, name: str = "acme", tier: str = "default", **limits: Any) -> str:
    """A tenant with one key; returns the key."""
    with administered(file) as admin:
        admin.create_tenant(name, tier, Limits(**limits))
        return admin.create_key(name)[1]


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}
