"""`lmworks gateway keys`, `tenants`, `usage` and `audit`: administration of a gateway's tenants, in its store."""

from __future__ import annotations

import getpass
import json as jsonlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec import SpecError
from .groups import CommandGroup
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..gateway.tenants.administration import Administration

keys = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="API keys of tenants.")
tenants = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="Tenants, their tiers and limits."
)

Config = Annotated[
    Path, typer.Option("--config", "-c", metavar="CONFIG", help="The gateway's file: where its store is.")
]
CONFIG = Path("gateway.toml")
LimitOptions = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=VALUE", help="A limit or budget, e.g. requests_per_minute=60; repeatable."),
]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Its name.")]
Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="What `keys list` shows of the key.")]

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@contextmanager
def administration(config: Path) -> Iterator[Administration]:
    """Of the store that the gateway's file names; its pools are not looked at."""
    from ..gateway.tenants.administration import Administration
    from ..gateway.tenants.config import Tenants, Tier
    from ..gateway.tenants.database import open_database
    from ..gateway.tenants.store import Store
    from ..serve.keys import read_toml

    table = read_toml(config)
    found = Tenants.from_dict(table.get("tenants", {}))
    if not found.on:
        raise SpecError(f"{config}: there is no tenants.store: without one the gateway has no keys (docs/tenants.md)")
    database = open_database(found.store)
    try:
        store = Store(database)
        store.prepare()
        yield Administration(store, [Tier.from_dict(one) for one in table.get("tiers", [])], getpass.getuser(), "cli")
    finally:
        database.close()


def given_limits(options: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options or []:
        name, sign, value = option.partition("=")
        try:
            found[name] = jsonlib.loads(value)
        except ValueError:
            raise SpecError(f"--limit {option}: write NAME=NUMBER, e.g. requests_per_minute=60") from None
        if not sign:
            raise SpecError(f"--limit {option}: write NAME=NUMBER, e.g. requests_per_minute=60")
    return found


def seconds_of(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise SpecError(f"{option} {text}: write a number with s, m, h or d, e.g. 24h")
    return float(found[1]) * UNITS[found[2]]


def moment(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def limit_words(limits: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in limits.items())


# --- keys -------------------------------------------------------------------------------------------------


@keys.command("create")
def create_key(
    tenant: TenantName,
    config: Config = CONFIG,
    name: Annotated[str, typer.Option("--name", help="What it is for.")] = "",
    role: Annotated[str, typer.Option("--role", help="admin, tenant_admin, member or read_only.")] = "member",
    model: Annotated[list[str] | None, typer.Option("--model", help="A model it may use (default: all).")] = None,
    limit: LimitOptions = None,
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="When it ends, e.g. 90d.")] = "",
    json: Json = False,
) -> None:
    """Create a key, and show it once.

    \b
    Examples:
      lmworks gateway keys create acme --name ci --expires 90d
      lmworks gateway keys create acme --role read_only --json
    """
    from ..gateway.tenants.administration import shown_key
    from ..gateway.tenants.limits import Limits

    ends = seconds_of("--expires", expires) if expires else None
    limits = Limits.from_dict(given_limits(limit))
    with administration(config) as admin:
        key, secret = admin.create_key(tenant, name, role, model or (), limits, ends)
    show_new_key({**shown_key(key), "secret": secret}, json)


def show_new_key(shown: dict[str, Any], json: bool) -> None:
    if json:
        print_json(shown)
        return
    typer.echo("this is the only time that the key is shown", err=True)
    typer.echo(shown["secret"])


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Whose; by default all.")] = None,
    config: Config = CONFIG,
    json: Json = False,
) -> None:
    """List keys: prefixes, roles, when they end."""
    from ..gateway.tenants.administration import shown_key

    with administration(config) as admin:
        if tenant is not None:
            admin.tenant(tenant)
        found = [shown_key(key) for key in admin.keys(tenant)]
    if json:
        print_json({"keys": found})
        return
    rows = [
        [
            *(one["prefix"], one["tenant"], one["name"], one["role"], one["state"], moment(one["created"])),
            *(moment(one["expires"]), ", ".join(one["models"]), limit_words(one["limits"])),
        ]
        for one in found
    ]
    columns = ["prefix", "tenant", "name", "role", "state", "created", "expires", "models", "limits"]
    print_table(f"{len(rows)} keys", columns, rows, drop=("limits", "models", "created"))


@keys.command("rotate")
def rotate_key(
    prefix: Prefix,
    config: Config = CONFIG,
    overlap: Annotated[str, typer.Option("--overlap", metavar="TIME", help="How long both are valid.")] = "24h",
    json: Json = False,
) -> None:
    """Replace a key by a new one; both are valid for a while."""
    from ..gateway.tenants.administration import shown_key

    with administration(config) as admin:
        key, secret = admin.rotate_key(prefix, seconds_of("--overlap", overlap))
    show_new_key({**shown_key(key), "secret": secret}, json)


@keys.command("revoke")
def revoke_key(prefix: Prefix, config: Config = CONFIG, json: Json = False) -> None:
    """Make a key invalid at once."""
    from ..gateway.tenants.administration import shown_key

    with administration(config) as admin:
        shown = shown_key(admin.revoke_key(prefix))
    if json:
        print_json(shown)
    else:
        typer.echo(f"{prefix} of {shown['tenant']} is revoked")


# --- tenants ----------------------------------------------------------------------------------------------

TierOption = Annotated[str | None, typer.Option("--tier", help="One of the file's [[tiers]].")]
GroupOption = Annotated[
    str | None, typer.Option("--cache-group", help="Tenants of one group share cached prefixes (default: nobody).")
]


@tenants.command("create")
def create_tenant(
    tenant: TenantName,
    config: Config = CONFIG,
    tier: TierOption = None,
    limit: LimitOptions = None,
    cache_group: GroupOption = None,
    json: Json = False,
) -> None:
    """Create a tenant.

    \b
    Examples:
      lmworks gateway tenants create acme --tier gold
      lmworks gateway tenants create lab --limit tokens_per_day=1000000 --limit dollars_per_month=50
    """
    from ..gateway.tenants.config import DEFAULT_TIER
    from ..gateway.tenants.limits import Limits

    limits = Limits.from_dict(given_limits(limit))
    with administration(config) as admin:
        made = admin.create_tenant(tenant, tier or DEFAULT_TIER, limits, cache_group or "")
    show_tenants([made], json, single=True)


@tenants.command("update")
def update_tenant(
    tenant: TenantName,
    config: Config = CONFIG,
    tier: TierOption = None,
    limit: LimitOptions = None,
    cache_group: GroupOption = None,
    disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse its keys, or take them again.")
    ] = None,
    json: Json = False,
) -> None:
    """Change a tenant; what is not named stays, a limit of 0 is none."""
    with administration(config) as admin:
        changed = admin.update_tenant(tenant, tier, given_limits(limit), cache_group, disabled)
    show_tenants([changed], json, single=True)


@tenants.command("list")
def list_tenants(config: Config = CONFIG, json: Json = False) -> None:
    """List tenants, with their tiers and limits."""
    with administration(config) as admin:
        found = admin.tenants()
    show_tenants(found, json)


def show_tenants(found: list[Any], json: bool, single: bool = False) -> None:
    from ..gateway.tenants.administration import shown_tenant

    shown = [shown_tenant(one) for one in found]
    if json:
        print_json(shown[0] if single else {"tenants": shown})
        return
    rows = [
        [
            *(one["name"], one["tier"], "disabled" if one["disabled"] else "active", one["cache_group"]),
            *(moment(one["created"]), limit_words(one["limits"])),
        ]
        for one in shown
    ]
    columns = ["tenant", "tier", "state", "cache group", "created", "limits"]
    print_table(f"{len(rows)} tenants", columns, rows, drop=("created", "cache group"))


# --- usage and audit --------------------------------------------------------------------------------------


def usage(
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Whose; by default all.")] = None,
    config: Config = CONFIG,
    by: Annotated[str, typer.Option("--by", help="Of tenant, key, model, pool, outcome; with commas.")] = "tenant",
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="Only what began in this time, e.g. 30d.")] = "",
    json: Json = False,
) -> None:
    """Show requests, tokens and dollars.

    \b
    Examples:
      lmworks gateway usage
      lmworks gateway usage acme --by key,model --last 30d --json
    """
    since = time.time() - seconds_of("--last", last) if last else 0.0
    groups = [word for word in by.split(",") if word]
    with administration(config) as admin:
        if tenant is not None:
            admin.tenant(tenant)
        rows = admin.usage(groups, since, None, tenant)
    if json:
        print_json({"usage": rows})
        return
    shown = [
        [
            *(one[name] for name in groups),
            *(one["requests"], one["prompt_tokens"], one["completion_tokens"], one["cached_tokens"]),
            *(f"{one['dollars']:.6f}", one["estimated"]),
        ]
        for one in rows
    ]
    columns = [*groups, "requests", "prompt tokens", "generated", "cached", "dollars", "estimated"]
    print_table("usage", columns, shown, drop=("estimated", "cached"))


def audit(
    config: Config = CONFIG,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many entries, the newest first.")] = 50,
    json: Json = False,
) -> None:
    """Show who changed which key or tenant, and when."""
    with administration(config) as admin:
        entries = admin.store.audit(limit)
    if json:
        print_json({"entries": entries})
        return
    rows = [
        [moment(one["at"]), one["actor"], one["source"], one["action"], one["target"], jsonlib.dumps(one["details"])]
        for one in entries
    ]
    print_table("audit log", ["at", "by", "from", "action", "target", "details"], rows, drop=("details", "from"))
