"""Authentication: API keys and limits from a TOML file, which is reloaded when it changes.

    share_cache = false           # true: cached prefixes are shared between all keys

    [limits]                      # of every request; see `limits.Limits`
    queue = 256

    [[keys]]
    name = "alice"
    sha256 = "…"                  # of the key: `printf %s KEY | sha256sum`; or secret = "…", the key itself
    requests_per_minute = 60      # see `limits.KeyLimits`

A server does not start with an invalid file; a file that becomes invalid later is logged, and the old one stays in use.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import SpecError
from ..spec.schema import Section, opt
from .limits import APIError, KeyLimits, Limits

log = logging.getLogger("lmworks.serve")

POLL_S = 1.0  # how often the file is checked for changes
MIN_SECRET_CHARS = 8
ANONYMOUS = KeyLimits(name="anyone")  # where there are no keys


@dataclass(frozen=True, repr=False)
class Key(KeyLimits):
    """Only the digest of the key is stored; neither is shown."""

    secret: str = opt("", "what clients send")
    sha256: str = opt("", "or its digest, 64 hexadecimal digits")

    def __repr__(self) -> str:
        return f"Key({self.name!r})"

    def check(self) -> None:
        if not self.name:
            raise SpecError("keys: every key needs a name")
        if bool(self.secret) == bool(self.sha256):
            raise SpecError(f"keys: {self.name!r} needs either secret or sha256")
        if self.secret and len(self.secret) < MIN_SECRET_CHARS:
            raise SpecError(
                f"keys: the secret of {self.name!r} is easy to guess: {MIN_SECRET_CHARS} characters or more"
            )
        if self.secret != self.secret.strip():
            raise SpecError(f"keys: the secret of {self.name!r} begins or ends with a space, which no header can carry")
        if self.secret:
            self.derive("sha256", digest(self.secret).hex())
            self.derive("secret", "")
        if len(self.sha256) != 64 or not set(self.sha256.lower()) <= set("0123456789abcdef"):
            raise SpecError(f"keys: sha256 of {self.name!r} must be 64 hexadecimal digits")
        self.derive("tenant", self.tenant or self.name)


@dataclass(frozen=True)
class Config(Section):
    """The file as a whole."""

    limits: Limits = opt(Limits, "limits of every request")
    keys: list[Key] = opt(list, "API keys (empty: no authentication)")
    share_cache: bool = opt(False, "share cached prefixes between all keys")

    def check(self) -> None:
        for what, values in (
            ("name", [key.name for key in self.keys]),
            ("secret", [key.sha256.lower() for key in self.keys]),
        ):
            if len(set(values)) < len(values):
                raise SpecError(f"keys: two of them have the same {what}")

    def authenticate(self, presented: str | None) -> KeyLimits:
        """The key's limits, in constant time; raises APIError."""
        if not self.keys:
            return ANONYMOUS
        seen = digest(presented or "")
        found = None
        for key in self.keys:
            if hmac.compare_digest(seen, bytes.fromhex(key.sha256)):
                found = key
        if presented is None:
            raise APIError(401, "missing_api_key", "an API key is needed: send the header Authorization: Bearer KEY")
        if found is None:
            raise APIError(401, "invalid_api_key", "the API key is not known")
        return found

    def tenant(self, key: KeyLimits) -> str:
        """Requests of one tenant share cached prefixes."""
        return "" if self.share_cache else key.tenant


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def bearer(header: str | None) -> str | None:
    """The key in an Authorization header, which comes as latin-1: what was sent are the bytes of its UTF-8."""
    scheme, _, key = (header or "").partition(" ")
    sent = key.strip(" \t").encode("latin-1").decode("utf-8", errors="surrogateescape")
    return sent if scheme.lower() == "bearer" and sent else None


class Settings:
    """The current configuration: keys from the command line, and the file, reloaded when it changes."""

    def __init__(
        self, path: Path | None = None, api_keys: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self.clock = path, clock
        self.command_line_keys = [
            {"name": f"api-key-{number}", "secret": key} for number, key in enumerate(api_keys, start=1)
        ]
        self.stamp = self.file_stamp()
        self.config = self.read()
        self.checked_at = clock()

    def current(self) -> Config:
        """Checks the file every POLL_S: cheap enough for every request."""
        if self.path is not None and self.clock() - self.checked_at >= POLL_S:
            self.checked_at = self.clock()
            stamp = self.file_stamp()
            if stamp != self.stamp:
                self.stamp = stamp
                self.reload()
        return self.config

    def reload(self) -> None:
        try:
            config = self.read()
            if self.config.keys and not config.keys:
                raise SpecError("keys: none are left, which would turn authentication off: restart the server for that")
            self.config = config
            log.info("config reloaded", extra={"path": str(self.path), "keys": len(self.config.keys)})
        except SpecError as error:
            log.error("config not reloaded: the old one stays", extra={"path": str(self.path), "reason": str(error)})

    def file_stamp(self) -> tuple[int, ...] | None:
        """Changes when the file is edited or replaced; None: there is no file."""
        try:
            found = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def read(self) -> Config:
        table = {} if self.path is None else read_toml(self.path)
        keys = table.get("keys", [])
        if isinstance(keys, list):
            table["keys"] = [*map(check_key_table, keys), *self.command_line_keys]
        return Config.from_dict(table)


def check_key_table(key: Any) -> dict[str, Any]:
    """Checked first: errors quote values, and must not quote a secret."""
    if not isinstance(key, dict) or not isinstance(key.get("secret", ""), str):
        raise SpecError("keys: each must be a table, [[keys]], and its secret a string")
    return key


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: is not TOML ({error})") from None
