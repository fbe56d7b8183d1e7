"""Tenants, keys, usage and the audit log, in SQL. Every method is one transaction."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...spec import SpecError
from .database import Cursor, Database
from .identity import Key, Tenant
from .limits import Limits
from .usage import Spending, UsageRecord

SCHEMA_VERSION = 1
SCHEMA_LOCK = 0x6C6D77  # of PostgreSQL: several gateways start at once
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, tier TEXT NOT NULL, limits TEXT NOT NULL,"
    " cache_group TEXT NOT NULL, disabled INTEGER NOT NULL, created DOUBLE PRECISION NOT NULL, change BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS keys (prefix TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants (name),"
    " sha256 TEXT NOT NULL, name TEXT NOT NULL, role TEXT NOT NULL, family TEXT NOT NULL, models TEXT NOT NULL,"
    " limits TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION, disabled INTEGER NOT NULL,"
    " change BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS usage (id TEXT PRIMARY KEY, began DOUBLE PRECISION NOT NULL,"
    " ended DOUBLE PRECISION NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,"
    " pool TEXT NOT NULL, path TEXT NOT NULL, prompt_tokens BIGINT NOT NULL, completion_tokens BIGINT NOT NULL,"
    " cached_tokens BIGINT NOT NULL, nanodollars BIGINT NOT NULL, outcome TEXT NOT NULL, estimated INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS usage_tenant ON usage (tenant, began)",
    "CREATE TABLE IF NOT EXISTS spent (subject TEXT NOT NULL, period TEXT NOT NULL, requests BIGINT NOT NULL,"
    " tokens BIGINT NOT NULL, nanodollars BIGINT NOT NULL, PRIMARY KEY (subject, period))",
    "CREATE TABLE IF NOT EXISTS audit (id {serial}, at DOUBLE PRECISION NOT NULL, actor TEXT NOT NULL,"
    " source TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, details TEXT NOT NULL)",
)
TENANT = "name, tier, limits, cache_group, disabled, created"
KEY = "prefix, tenant, sha256, name, role, family, models, limits, created, expires, disabled"
USAGE = ", ".join(UsageRecord.__struct_fields__)
ADD_SPENT = (
    "INSERT INTO spent (subject, period, requests, tokens, nanodollars) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (subject, period) DO UPDATE SET requests = spent.requests + excluded.requests,"
    " tokens = spent.tokens + excluded.tokens, nanodollars = spent.nanodollars + excluded.nanodollars"
)
GROUPS = {"tenant": "tenant", "key": "key", "model": "model", "pool": "pool", "outcome": "outcome"}


@dataclass(frozen=True)
class Entry:
    """A line of the audit log: who did what to whom. It never holds a secret."""

    actor: str
    source: str  # "cli", or the client's address
    action: str  # "keys.create"
    target: str
    details: dict[str, Any]


class Store:
    """For one thread at a time."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def prepare(self) -> None:
        """Makes the tables where they are not there."""
        with self.database.transaction() as cursor:
            if self.database.serial.startswith("BIGINT"):
                cursor.execute("SELECT pg_advisory_xact_lock(?)", (SCHEMA_LOCK,))
            for statement in SCHEMA:
                cursor.execute(statement.format(serial=self.database.serial))
            for name, value in (("schema", str(SCHEMA_VERSION)), ("changes", "0"), ("salt", secrets.token_hex(32))):
                cursor.execute(
                    "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, value)
                )
            version = int(meta(cursor, "schema"))
        if version != SCHEMA_VERSION:
            raise SpecError(f"tenants.store has tables of version {version}; this release knows {SCHEMA_VERSION}")

    def salt(self) -> bytes:
        """Of the salts that separate tenants' prefix caches."""
        with self.database.transaction() as cursor:
            return bytes.fromhex(meta(cursor, "salt"))

    # --- tenants and keys ---------------------------------------------------------------------------------

    def changes(self, since: int) -> tuple[int, list[Tenant], list[Key]]:
        """What was changed after `since`, and the number to ask with next time."""
        with self.database.transaction() as cursor:
            now = int(meta(cursor, "changes"))
            if now == since:
                return now, [], []
            cursor.execute(f"SELECT {TENANT} FROM tenants WHERE change > ?", (since,))
            tenants = [tenant_of(row) for row in cursor.fetchall()]
            cursor.execute(f"SELECT {KEY} FROM keys WHERE change > ?", (since,))
            return now, tenants, [key_of(row) for row in cursor.fetchall()]

    def put_tenant(self, tenant: Tenant, entry: Entry) -> None:
        values = (tenant.name, tenant.tier, limits_json(tenant.limits), tenant.cache_group)
        with self.database.transaction() as cursor:
            change = next_change(cursor)
            cursor.execute(
                f"INSERT INTO tenants ({TENANT}, change) VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET tier = excluded.tier, limits = excluded.limits,"
                " cache_group = excluded.cache_group, disabled = excluded.disabled, change = excluded.change",
                (*values, int(tenant.disabled), tenant.created, change),
            )
            write_audit(cursor, entry)

    def put_keys(self, keys: Iterable[Key], entry: Entry) -> None:
        with self.database.transaction() as cursor:
            change = next_change(cursor)
            for key in keys:
                cursor.execute(
                    f"INSERT INTO keys ({KEY}, change) VALUES ({', '.join('?' * 12)}) ON CONFLICT (prefix) DO UPDATE"
                    " SET expires = excluded.expires, disabled = excluded.disabled, change = excluded.change",
                    (
                        *(key.prefix, key.tenant, key.sha256, key.name, key.role, key.family, json.dumps(key.models)),
                        *(limits_json(key.limits), key.created, key.expires, int(key.disabled), change),
                    ),
                )
            write_audit(cursor, entry)

    def audit(self, limit: int) -> list[dict[str, Any]]:
        """The newest first."""
        with self.database.transaction() as cursor:
            cursor.execute(
                "SELECT id, at, actor, source, action, target, details FROM audit ORDER BY id DESC LIMIT ?", (limit,)
            )
            names = ("id", "at", "actor", "source", "action", "target", "details")
            return [dict(zip(names, (*row[:6], json.loads(row[6])), strict=True)) for row in cursor.fetchall()]

    def note(self, entry: Entry) -> None:
        with self.database.transaction() as cursor:
            write_audit(cursor, entry)

    # --- usage --------------------------------------------------------------------------------------------

    def add_usage(self, records: Sequence[UsageRecord]) -> None:
        """Records that are there already change nothing: a journal may be read twice."""
        with self.database.transaction() as cursor:
            spent: dict[tuple[str, str], Spending] = {}
            for record in records:
                cursor.execute(
                    f"INSERT INTO usage ({USAGE}) VALUES ({', '.join('?' * len(UsageRecord.__struct_fields__))})"
                    " ON CONFLICT (id) DO NOTHING",
                    tuple(int(v) if isinstance(v, bool) else v for v in record.values()),
                )
                if cursor.rowcount == 1:
                    for place in record.places():
                        spent[place] = spent.get(place, Spending()).plus(record.spending())
            # In one order everywhere: two gateways that write the same rows must not wait for each other.
            rows = [(*place, more.requests, more.tokens, more.nanodollars) for place, more in sorted(spent.items())]
            if rows:
                cursor.executemany(ADD_SPENT, rows)

    def spent(self, periods: Sequence[str]) -> dict[tuple[str, str], Spending]:
        """By subject and period."""
        with self.database.transaction() as cursor:
            marks = ", ".join("?" * len(periods))
            cursor.execute(
                f"SELECT subject, period, requests, tokens, nanodollars FROM spent WHERE period IN ({marks})",
                tuple(periods),
            )
            return {(row[0], row[1]): Spending(*map(int, row[2:])) for row in cursor.fetchall()}

    def usage(self, groups: Sequence[str], since: float, until: float, tenant: str | None) -> list[dict[str, Any]]:
        """Sums of records that began in this time, by these of GROUPS."""
        columns = ", ".join(GROUPS[name] for name in groups)
        where, values = "began >= ? AND began < ?", [since, until]
        sums = (
            "COUNT(*), SUM(prompt_tokens), SUM(completion_tokens), SUM(cached_tokens), SUM(nanodollars), SUM(estimated)"
        )
        with self.database.transaction() as cursor:
            cursor.execute(
                f"SELECT {columns}{', ' if columns else ''}{sums} FROM usage WHERE {where}"
                + (" AND tenant = ?" if tenant is not None else "")
                + (f" GROUP BY {columns} ORDER BY {columns}" if columns else ""),
                (*values, *([tenant] if tenant is not None else [])),
            )
            rows = cursor.fetchall()
        names = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "nanodollars", "estimated")
        return [
            {
                **dict(zip(groups, row, strict=False)),
                **dict(zip(names, (int(value or 0) for value in row[len(groups) :]), strict=True)),
            }
            for row in rows
        ]


def meta(cursor: Cursor, name: str) -> str:
    cursor.execute("SELECT value FROM meta WHERE name = ?", (name,))
    return str(cursor.fetchone()[0])


def next_change(cursor: Cursor) -> int:
    """Its row is locked until the transaction ends, so changes are seen in the order of their numbers."""
    cursor.execute("UPDATE meta SET value = CAST(CAST(value AS BIGINT) + 1 AS TEXT) WHERE name = 'changes'")
    return int(meta(cursor, "changes"))


def write_audit(cursor: Cursor, entry: Entry) -> None:
    cursor.execute(
        "INSERT INTO audit (at, actor, source, action, target, details) VALUES (?, ?, ?, ?, ?, ?)",
        (time.time(), entry.actor, entry.source, entry.action, entry.target, json.dumps(entry.details)),
    )


def limits_json(limits: Limits) -> str:
    return json.dumps(limits.given_values())


def tenant_of(row: Sequence[Any]) -> Tenant:
    name, tier, limits, group, disabled, created = row
    return Tenant(name, tier, Limits.from_dict(json.loads(limits)), group, bool(disabled), created)


def key_of(row: Sequence[Any]) -> Key:
    prefix, tenant, sha256, name, role, family, models, limits, created, expires, disabled = row
    allowed, own = tuple(json.loads(models)), Limits.from_dict(json.loads(limits))
    return Key(prefix, tenant, sha256, name, role, family, allowed, own, created, expires, bool(disabled))
