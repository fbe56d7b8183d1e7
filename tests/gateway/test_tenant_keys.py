"""Keys: who is let in, as what, and for how long; guesses are slowed down, secrets are kept nowhere."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from gateway_case import Answering, Asked, Running, fake_server, running, say
from lmworks.gateway.tenants.identity import ROLES, digest, new_secret, prefix_of
from tenant_case import administered, bearer, make_tenant, tenant_file


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


async def status(case: Running, secret: str | None, path: str = "/v1/chat/completions") -> tuple[int, str | None]:
    headers = bearer(secret) if secret is not None else {}
    if path.startswith("/v1/chat"):
        answer = await case.http.post(path, json={"model": "m", "messages": []}, headers=headers)
    else:
        answer = await case.http.get(path, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code")


async def settled(case: Running, secret: str, wanted: int) -> None:
    """Until a change of the store has been seen."""
    async with asyncio.timeout(5):
        while (await status(case, secret))[0] != wanted:
            await asyncio.sleep(0.02)


def test_only_valid_keys_reach_a_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file)
            async with running(file) as case:
                assert await status(case, None) == (401, "missing_api_key")
                for wrong in ("x", key[:-1], key + "x", key.upper(), prefix_of(key), new_secret()[1], "lmw--"):
                    assert await status(case, wrong) == (401, "invalid_api_key"), wrong
                assert not server.asked
                assert await status(case, key) == (200, None)
                answer = await case.http.post(
                    "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"x-api-key": key}
                )
                assert answer.status_code == 200
                assert "authorization" not in server.asked[0].headers and "x-api-key" not in server.asked[1].headers
                assert await status(case, None, "/v1/models") == (401, "missing_api_key")
                assert await status(case, key, "/v1/models") == (200, None)
                assert await status(case, key, "/gateway/servers") == (403, "role_not_allowed")
                assert (await case.http.get("/health")).status_code == 200

    asyncio.run(main())


def test_keys_end_by_time_revocation_rotation_and_with_their_tenant(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file)
            with administered(file) as admin:
                short = admin.create_key("acme", expires_in=2.0)[1]
            async with running(file) as case:
                assert await status(case, short) == (200, None)
                with administered(file) as admin:
                    new = admin.rotate_key(prefix_of(key), overlap=1.5)[1]
                await settled(case, new, 200)
                assert await status(case, key) == (200, None)  # both, for a while
                await settled(case, key, 401)
                await settled(case, short, 401)
                assert await status(case, new) == (200, None)
                with administered(file) as admin:
                    admin.update_tenant("acme", None, {}, None, disabled=True)
                await settled(case, new, 403)
                with administered(file) as admin:
                    admin.update_tenant("acme", None, {}, None, disabled=False)
                    admin.revoke_key(prefix_of(new))
                await settled(case, new, 401)
                with administered(file) as admin:
                    states = [one.state(0) for one in admin.keys("acme")]
                assert states == ["expires", "expires", "revoked"]

    asyncio.run(main())


@pytest.mark.parametrize("role", ROLES)
def test_what_each_role_may_do(tmp_path: Path, role: str) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            make_tenant(file)
            with administered(file) as admin:
                key = admin.create_key("acme", role=role)[1]
            async with running(file) as case:
                assert (await status(case, key))[0] == (403 if role == "read_only" else 200)
                assert (await status(case, key, "/v1/models"))[0] == 200
                assert (await status(case, key, "/gateway/servers"))[0] == (200 if role == "admin" else 403)

    asyncio.run(main())


def test_a_key_of_some_models_sees_and_reaches_those_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello, models=("m", "other")) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            make_tenant(file)
            with administered(file) as admin:
                key = admin.create_key("acme", models=["other"])[1]
            async with running(file) as case:
                assert await status(case, key) == (403, "model_not_allowed")
                listed = await case.http.get("/v1/models", headers=bearer(key))
                assert [one["id"] for one in listed.json()["data"]] == ["other"]
                answer = await case.http.post("/v1/completions", json={"model": "other"}, headers=bearer(key))
                assert answer.status_code == 200

    asyncio.run(main())


def test_a_refused_request_is_logged_with_its_clients_address_and_without_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lmworks.gateway")

    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file)
            async with running(file) as case:
                await status(case, f"{key}x")
                (line,) = [vars(one) for one in caplog.records if one.getMessage() == "refused"]
                assert (line["client"], line["status"], line["failed"]) == ("127.0.0.1", 401, "invalid_api_key")
                assert not any(key in str(value) for value in line.values())

    asyncio.run(main())


def test_guesses_are_slowed_down_and_lock_nobody_else_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants="auth_failures = 3")
            key, other = make_tenant(file), make_tenant(file, "other")
            async with running(file) as case:
                wrong = prefix_of(key) + "-" + "x" * 43
                assert [(await status(case, wrong))[0] for _ in range(5)] == [401, 401, 401, 429, 429]
                answer = await case.http.get("/v1/models", headers=bearer(wrong))
                assert answer.json()["error"]["code"] == "too_many_auth_failures"
                assert 15 <= int(answer.headers["retry-after"]) <= 20  # three a minute
                assert (await status(case, key))[0] == 429  # the right one is not told from a guess
                assert (await status(case, other))[0] == 200
                unknown = [(await status(case, new_secret()[1]))[0] for _ in range(4)]
                assert unknown == [401, 401, 401, 429]
                assert (await status(case, other))[0] == 200

    asyncio.run(main())


def test_secrets_are_nowhere_in_the_store(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            key = make_tenant(file)
            with administered(file) as admin:
                new = admin.rotate_key(prefix_of(key))[1]
            async with running(file) as case:
                assert await status(case, new) == (200, None)
                assert await status(case, new + "x") == (401, "invalid_api_key")
            written = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
            said = "".join(capfd.readouterr())
            for secret in (key, new):
                own = secret.removeprefix(prefix_of(secret))
                assert own.encode() not in written and own not in said
                assert prefix_of(secret).encode() in written
            assert (tmp_path / "gateway.db").stat().st_mode & 0o077 == 0
            rows = sqlite3.connect(tmp_path / "gateway.db").execute("SELECT sha256 FROM keys").fetchall()
            assert {row[0] for row in rows} == {digest(key), digest(new)}

    asyncio.run(main())
