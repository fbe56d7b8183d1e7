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
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import SpecError
from ..spec.schema import Section, opt
from .limits import APIError, KeyLimits, Limits
from .reload import ReloadedFile

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

    def named(self, name: str) -> KeyLimits:
        """The key that created a batch; raises APIError where there is none of this name any more."""
        keys: list[KeyLimits] = [*self.keys] or [ANONYMOUS]
        for key in keys:
            if key.name == name:
                return key
        raise APIError(401, "invalid_api_key", f"the key {name!r} that created this batch is gone")

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


def sent_key(headers: Mapping[str, str]) -> str | None:
    """As OpenAI's clients send it, or as Anthropic's do."""
    return bearer(headers.get("authorization")) or bearer(f"Bearer {headers.get('x-api-key', '')}")


class Settings(ReloadedFile[Config]):
    """The current configuration: keys from the command line, and the file, reloaded when it changes."""

    def __init__(
        self, path: Path | None = None, api_keys: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.command_line_keys = [
            {"name": f"api-key-{number}", "secret": key} for number, key in enumerate(api_keys, start=1)
        ]
        super().__init__(path, clock)

    def check_change(self, config: Config) -> None:
        if self.config.keys and not config.keys:
            raise SpecError("keys: none are left, which would turn authentication off: restart the server for that")

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


def read_secrets(path: Path) -> list[str]:
    """Keys, one a line; "-" is standard input. Command lines are no place for them: every process can read those."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise SpecError(f"{path}: there is no key in it")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: is not TOML ({error})") from None
