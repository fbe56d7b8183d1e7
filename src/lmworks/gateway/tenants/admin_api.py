"""The admin API: tenants, keys, usage and the audit log over HTTP, for keys whose role allows it.

    GET  /admin/tenants                     POST /admin/tenants            POST /admin/tenants/NAME
    GET  /admin/keys?tenant=NAME            POST /admin/keys
    POST /admin/keys/PREFIX/rotate          POST /admin/keys/PREFIX/revoke
    GET  /admin/usage?by=key,model&tenant=NAME&since=SECONDS&until=SECONDS
    GET  /admin/audit?limit=50

The role `admin` may do all of it, `tenant_admin` what concerns keys of its own tenant with a role that is not above its
own, and every key may see its tenant's usage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from ...serve.limits import APIError
from ...spec import SpecError
from ...spec.errors import did_you_mean
from ..http_server import ClientConnection, HTTPRequest
from .administration import Administration, NotFound, shown_key, shown_tenant
from .config import DEFAULT_TIER
from .database import StoreDown
from .directory import Caller
from .identity import ROLES, Key
from .limits import DAY_S, Limits

if TYPE_CHECKING:
    from .tenancy import Tenancy

log = logging.getLogger("lmworks.gateway")

PREFIX = "/admin/"
MOST_ENTRIES = 1000

Result = TypeVar("Result")


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    tier: str = DEFAULT_TIER
    limits: dict[str, float] = {}
    cache_group: str = ""


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    tier: str | None = None
    limits: dict[str, float] = {}
    cache_group: str | None = None
    disabled: bool | None = None


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    name: str = ""
    role: str = "member"
    models: list[str] = []
    limits: dict[str, float] = {}
    expires_in: float | None = None  # seconds


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    overlap: float = DAY_S  # seconds


Body = TypeVar("Body", NewTenant, TenantChange, NewKey, Rotation)


@dataclass
class AdminRequest:
    """One request of somebody whose key is valid."""

    caller: Caller
    body: bytes
    query: dict[str, str]
    admin: Administration

    def read(self, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(self.body or b"{}", type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise APIError(400, "invalid_request", f"the body: {error}") from None

    def number(self, name: str, default: float | None) -> float | None:
        if name not in self.query:
            return default
        with suppress(ValueError):
            if math.isfinite(found := float(self.query[name])):
                return found
        raise APIError(400, "invalid_request", f"{name} = {self.query[name]!r:.40} is no number", name)

    def check_tenant(self, tenant: str | None) -> None:
        """An administrator of one tenant sees no other; another's is as one that is not there."""
        if not self.caller.key.may("admin") and tenant != self.caller.tenant.name:
            raise APIError(403, "role_not_allowed", f"this key is of the tenant {self.caller.tenant.name!r} alone")

    def own_key(self, prefix: str) -> Key:
        """One that the caller may replace: a key of a higher role would raise its own."""
        key = self.admin.key(prefix)
        self.check_tenant(key.tenant)
        self.check_role(key.role)
        return key

    def check_role(self, role: str) -> None:
        if not self.caller.key.may(role):
            raise APIError(403, "role_not_allowed", f"the role {role} is above this key's own, {self.caller.key.role}")

    # --- what there is, each in the store's thread ---------------------------------------------------------

    def list_tenants(self) -> Any:
        self.caller.check_role("admin", "the list of tenants")
        return {"tenants": [shown_tenant(one) for one in self.admin.tenants()]}

    def create_tenant(self) -> Any:
        self.caller.check_role("admin", "making tenants")
        body = self.read(NewTenant)
        limits = Limits.from_dict(body.limits)
        return shown_tenant(self.admin.create_tenant(body.name, body.tier, limits, body.cache_group))

    def update_tenant(self, name: str) -> Any:
        self.caller.check_role("admin", "changing tenants")
        body = self.read(TenantChange)
        return shown_tenant(self.admin.update_tenant(name, body.tier, body.limits, body.cache_group, body.disabled))

    def list_keys(self) -> Any:
        self.caller.check_role("tenant_admin", "the list of keys")
        tenant = self.query.get("tenant", None if self.caller.key.may("admin") else self.caller.tenant.name)
        self.check_tenant(tenant)
        return {"keys": [shown_key(key) for key in self.admin.keys(tenant)]}

    def create_key(self) -> Any:
        self.caller.check_role("tenant_admin", "making keys")
        body = self.read(NewKey)
        self.check_tenant(body.tenant)
        limits = Limits.from_dict(body.limits)
        if body.role in ROLES:
            self.check_role(body.role)
        key, secret = self.admin.create_key(body.tenant, body.name, body.role, body.models, limits, body.expires_in)
        return {**shown_key(key), "secret": secret}

    def rotate_key(self, prefix: str) -> Any:
        self.caller.check_role("tenant_admin", "rotating keys")
        self.own_key(prefix)
        key, secret = self.admin.rotate_key(prefix, self.read(Rotation).overlap)
        return {**shown_key(key), "secret": secret}

    def revoke_key(self, prefix: str) -> Any:
        self.caller.check_role("tenant_admin", "revoking keys")
        self.own_key(prefix)
        return shown_key(self.admin.revoke_key(prefix))

    def usage(self) -> Any:
        tenant = self.query.get("tenant", None if self.caller.key.may("admin") else self.caller.tenant.name)
        self.check_tenant(tenant)
        groups = [word for word in self.query.get("by", "tenant").split(",") if word]
        since, until = self.number("since", 0.0), self.number("until", None)
        return {"usage": self.admin.usage(groups, since or 0.0, until, tenant)}

    def audit(self) -> Any:
        self.caller.check_role("admin", "the audit log")
        limit = self.number("limit", 50) or 0
        if not 1 <= limit <= MOST_ENTRIES:
            raise APIError(400, "invalid_request", f"limit must be between 1 and {MOST_ENTRIES}", "limit")
        return {"entries": self.admin.store.audit(int(limit))}


ROUTES: dict[tuple[str, str], Callable[[AdminRequest], Any]] = {
    ("GET", "tenants"): AdminRequest.list_tenants,
    ("POST", "tenants"): AdminRequest.create_tenant,
    ("GET", "keys"): AdminRequest.list_keys,
    ("POST", "keys"): AdminRequest.create_key,
    ("GET", "usage"): AdminRequest.usage,
    ("GET", "audit"): AdminRequest.audit,
}
QUERIES = {"keys": ("tenant",), "usage": ("by", "tenant", "since", "until"), "audit": ("limit",)}
NAMED: dict[tuple[str, str], Callable[[AdminRequest, str], Any]] = {  # of one tenant or key: what follows its name
    ("tenants", ""): AdminRequest.update_tenant,
    ("keys", "rotate"): AdminRequest.rotate_key,
    ("keys", "revoke"): AdminRequest.revoke_key,
}


def found_route(method: str, path: str) -> Callable[[AdminRequest], Any]:
    kind, _, rest = path.removeprefix(PREFIX).partition("/")
    if not rest and (method, kind) in ROUTES:
        return ROUTES[method, kind]
    name, _, action = rest.partition("/")
    named = NAMED.get((kind, action)) if method == "POST" and name else None
    if named is None:
        raise APIError(404, "not_found", f"there is no {method[:20]} {path[:80]}")
    return lambda request: named(request, name)


def check_query(path: str, query: Mapping[str, str]) -> None:
    known = QUERIES.get(path.removeprefix(PREFIX), ())
    unknown = next((name for name in query if name not in known), None)
    if unknown is not None:
        message = f"{unknown[:40]!r} is not known here{did_you_mean(unknown[:40], known) if known else ''}"
        raise APIError(400, "invalid_request", message, unknown[:40])


class AdminAPI:
    def __init__(self, tenancy: Tenancy) -> None:
        self.tenancy = tenancy

    async def handle(self, request: HTTPRequest, connection: ClientConnection) -> None:
        try:
            caller = self.tenancy.authentication.caller(request)
            route = found_route(request.method, request.path)
            asked = parse_qs(request.target.partition(b"?")[2].decode("latin-1"))
            query = {name: values[-1] for name, values in asked.items()}
            check_query(request.path, query)
            tenancy = self.tenancy
            admin = Administration(tenancy.store, tenancy.config().tiers, caller.key.prefix, request.client)
            content = await self.in_thread(lambda: route(AdminRequest(caller, request.body, query, admin)))
            if request.method == "POST":  # what was changed holds at once, here
                tenancy.directory.apply(await self.in_thread(tenancy.directory.read_changes))
        except APIError as error:
            if error.status == 403:
                log.warning("refused by role", extra={"path": request.path, "client": request.client})
            connection.respond_error(error)
            return
        connection.respond_json(200, content, [(b"cache-control", b"no-store")])

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await self.tenancy.thread.run(work)
        except StoreDown as error:
            raise APIError(503, "store_unavailable", str(error), None, 1) from None
        except NotFound as error:
            raise APIError(404, "not_found", str(error)) from None
        except SpecError as error:
            raise APIError(400, "invalid_request", str(error)) from None
