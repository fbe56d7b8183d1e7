"""Who asks: tenants, and the keys that they show. Of a key only its digest is kept, and its prefix is shown."""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass, field

from .limits import Limits

MARK = "lmw"  # the first word of every key, for scanners that look for lost ones
PREFIX_BYTES = 5  # eight characters
SECRET_BYTES = 32  # so long that a plain digest cannot be searched
# What each role may do, beside what those after it may.
ROLES = {
    "admin": "everything, of all tenants",
    "tenant_admin": "keys and usage of its tenant",
    "member": "requests to models",
    "read_only": "models and usage of its tenant, no requests",
}


@dataclass(frozen=True)
class Tenant:
    """Whose requests count together. Its name and tier are labels of metrics and logs."""

    name: str
    tier: str  # of service: its weight under overload, and limits for those that have none of their own
    limits: Limits = field(default_factory=Limits)
    cache_group: str = ""  # tenants of one group share cached prefixes; empty: it shares with nobody
    disabled: bool = False
    created: float = 0.0

    @property
    def subject(self) -> str:
        """As limits and spending are counted."""
        return f"tenant:{self.name}"


@dataclass(frozen=True, repr=False)
class Key:
    """A key without its secret. One that was rotated shares `family`, and so limits, with the one before it."""

    prefix: str
    tenant: str
    sha256: str
    name: str = ""
    role: str = "member"
    family: str = ""
    models: tuple[str, ...] = ()  # names that it may ask for; none: all
    limits: Limits = field(default_factory=Limits)
    created: float = 0.0
    expires: float | None = None
    disabled: bool = False

    def __repr__(self) -> str:
        return f"Key({self.prefix!r})"

    @property
    def subject(self) -> str:
        return f"key:{self.family}"

    def may(self, role: str) -> bool:
        order = list(ROLES)
        return order.index(self.role) <= order.index(role)

    def state(self, now: float) -> str:
        if self.disabled:
            return "revoked"
        if self.expires is None:
            return "active"
        return "expires" if now < self.expires else "expired"


ANYONE = Tenant("anyone", "default")  # where the gateway asks for no keys


def new_secret() -> tuple[str, str]:
    """A key's prefix, and the whole key, which is shown once."""
    word = base64.b32encode(secrets.token_bytes(PREFIX_BYTES)).decode().lower()
    prefix = f"{MARK}-{word}"
    return prefix, f"{prefix}-{secrets.token_urlsafe(SECRET_BYTES)}"


def prefix_of(secret: str) -> str:
    """What of a key may be shown; empty where it is none of ours."""
    parts = secret.split("-", 2)
    return "-".join(parts[:2]) if len(parts) == 3 and parts[0] == MARK else ""


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", errors="surrogateescape")).hexdigest()
