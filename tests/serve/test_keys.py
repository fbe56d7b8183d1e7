"""Who may come in: keys, where they are kept, and a file that changes under a running server."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lmworks.serve.keys import ANONYMOUS, Config, Settings, bearer
from lmworks.serve.limits import APIError
from lmworks.spec import SpecError

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
FILE = f"""
[limits]
queue = 7

[[keys]]
name = "alice"
secret = "{ALICE}"
tenant = "team"

[[keys]]
name = "bob"
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest().upper()}"
requests_per_minute = 5
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))  # two writes within one tick of the file system's clock
    return path


def settings(tmp_path: Path, text: str = FILE, *api_keys: str) -> Settings:
    return Settings(write(tmp_path / "serve.toml", text), api_keys, Clock())


def test_keys_by_secret_and_digest(tmp_path: Path) -> None:
    config = settings(tmp_path).config
    assert (config.authenticate(ALICE).name, config.authenticate(BOB).requests_per_minute) == ("alice", 5)
    assert config.limits.queue == 7


@pytest.mark.parametrize("wrong", ["", ALICE[:-1], ALICE + "x", ALICE.upper(), "é" * 20, "\udcff", "x" * 10**6])
def test_wrong_keys_are_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(APIError, match="not known") as refusal:
        settings(tmp_path).config.authenticate(wrong)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")


def test_missing_key_error_explains_header(tmp_path: Path) -> None:
    with pytest.raises(APIError, match="Bearer") as refusal:
        settings(tmp_path).config.authenticate(None)
    assert refusal.value.status == 401


def test_all_keys_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    config = settings(tmp_path).config
    monkeypatch.setattr("lmworks.serve.keys.hmac.compare_digest", compare)
    assert config.authenticate(ALICE).name == "alice"
    assert compared == [hashlib.sha256(key.encode()).digest() for key in (ALICE, BOB)]


def test_no_keys_allow_all() -> None:
    assert Config().authenticate(None) is ANONYMOUS
    assert Config().authenticate("whatever") is ANONYMOUS


def test_command_line_keys_are_added(tmp_path: Path) -> None:
    both = settings(tmp_path, FILE, "sk-from-the-shell").config
    assert [both.authenticate(key).name for key in (ALICE, "sk-from-the-shell")] == ["alice", "api-key-1"]
    assert Settings(None, ["sk-from-the-shell"]).current().authenticate("sk-from-the-shell").name == "api-key-1"


def test_tenant_cache_separation(tmp_path: Path) -> None:
    config = settings(tmp_path).config
    alice, bob = config.authenticate(ALICE), config.authenticate(BOB)
    assert (config.tenant(alice), config.tenant(bob)) == ("team", "bob")
    shared = settings(tmp_path, "share_cache = true\n" + FILE).config
    assert {shared.tenant(alice), shared.tenant(bob)} == {""}


def test_secret_is_never_shown(tmp_path: Path) -> None:
    config = settings(tmp_path).config
    assert ALICE not in repr(config) + repr(config.keys[0]) + str(config.to_dict())


@pytest.mark.parametrize("text", ["keys = ['12345678']", "[[keys]]\nname = 'a'\nsecret = 12345678"])
def test_secret_is_not_in_config_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        settings(tmp_path, text)
    assert "12345678" not in str(caught.value)


def test_invalid_secret_characters(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="space"):
        settings(tmp_path, "[[keys]]\nname = 'a'\nsecret = 'alices-secret '")


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"),
        ("Bearer schlüssel".encode().decode("latin-1"), "schlüssel"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
    ],
)
def test_bearer(header: str | None, key: str | None) -> None:
    assert bearer(header) == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys = 3", "keys must be a list"),
        ("[limits]\nque = 3", "did you mean 'queue'"),
        ("[limits]\nn = 100000", "limits.n"),
        ("[[keys]]\nname = 'a'", "either secret or sha256"),
        ("[[keys]]\nsecret = '0123456789'", "needs a name"),
        ("[[keys]]\nname = 'a'\nsecret = 'short'", "easy to guess"),
        ("[[keys]]\nname = 'a'\nsha256 = 'zz'", "64 hexadecimal"),
        ("[[keys]]\nname = 'a'\nsecret = '0123456789'\npriority = -5000", "keys.priority"),
        (FILE + FILE.replace("[limits]\nqueue = 7", ""), "same name"),
        (FILE + f"[[keys]]\nname = 'eve'\nsecret = '{BOB}'", "same secret"),
        ("[[keys", "not TOML"),
    ],
)
def test_invalid_config_reports_position(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        settings(tmp_path, text)


def test_missing_config() -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        Settings(Path("/nowhere/serve.toml"))


def test_changed_config_is_reloaded(tmp_path: Path) -> None:
    live = settings(tmp_path)
    assert live.current() is live.current()
    write(live.path or tmp_path, FILE.replace(ALICE, "sk-alice-has-another"))
    assert live.current().authenticate("sk-alice-has-another").name == "alice"
    with pytest.raises(APIError):
        live.current().authenticate(ALICE)


@pytest.mark.parametrize("text", ["[[keys", "", "[limits]\nqueue = -1", None], ids=["broken", "empty", "wrong", "gone"])
def test_invalid_reload_keeps_config_and_logs_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """An empty file is TOML without keys: it must not open the doors."""
    live = settings(tmp_path)
    assert live.path is not None
    live.path.unlink() if text is None else write(live.path, text)
    for _ in range(3):
        assert live.current().authenticate(ALICE).name == "alice"
    with pytest.raises(APIError):
        live.current().authenticate(None)
    assert [record.message for record in caplog.records] == ["config not reloaded: the old one stays"]
    write(live.path, FILE.replace("queue = 7", "queue = 8"))
    assert live.current().limits.queue == 8


def test_config_is_checked_once_per_second(tmp_path: Path) -> None:
    now = 0.0
    live = Settings(write(tmp_path / "serve.toml", FILE), clock=lambda: now)
    write(tmp_path / "serve.toml", FILE.replace("queue = 7", "queue = 8"))
    now = 0.9
    assert live.current().limits.queue == 7
    now = 1.0
    assert live.current().limits.queue == 8
