"""The admin API and the commands: who may do what, what is written down, what is said of mistakes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_case import Answering, Asked, Running, fake_server, running, say
from lmworks.gateway.tenants.identity import prefix_of
from tenant_case import administered, bearer, make_tenant, tenant_file
from typed import lmworks


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hel", "lo")


def key_of(file: Path, role: str, tenant: str = "acme") -> str:
    with administered(file) as admin:
        return admin.create_key(tenant, role=role)[1]


async def post(case: Running, key: str, path: str, **body: Any) -> tuple[int, Any]:
    answer = await case.http.post(f"/admin/{path}", json=body, headers=bearer(key))
    found = answer.json()
    return answer.status_code, found.get("error", {}).get("message") or found


async def get(case: Running, key: str, path: str) -> tuple[int, Any]:
    answer = await case.http.get(f"/admin/{path}", headers=bearer(key))
    return answer.status_code, answer.json()


def test_a_tenant_from_its_making_to_its_bill_over_http(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, tenants="", pool="price_in = 2.0\nprice_out = 8.0")
            file.write_text(file.read_text().replace("refresh_seconds = 0.05", "refresh_seconds = 1000"))
            make_tenant(file)
            root = key_of(file, "admin")
            async with running(file) as case:
                assert await post(case, root, "tenants", name="lab", limits={"requests_per_minute": 2}) == (
                    200,
                    {"name": "lab", "tier": "default", "limits": {"requests_per_minute": 2}, "cache_group": "",
                     "disabled": False, "created": pytest.approx(0, abs=1e11)},
                )  # fmt: skip
                status, made = await post(case, root, "keys", tenant="lab", name="ci", expires_in=3600)
                assert status == 200 and made["state"] == "expires" and made["secret"].startswith(made["prefix"])
                ask = {"model": "m", "messages": []}
                found = []
                for _ in range(3):
                    answer = await case.http.post("/v1/chat/completions", json=ask, headers=bearer(made["secret"]))
                    found.append(answer.status_code)
                assert found == [200, 200, 429]  # a key holds at once where it was made
                rotated = (await post(case, root, f"keys/{made['prefix']}/rotate", overlap=0))[1]
                again = await case.http.post("/v1/chat/completions", json=ask, headers=bearer(made["secret"]))
                assert again.status_code == 401
                limited = await case.http.post("/v1/chat/completions", json=ask, headers=bearer(rotated["secret"]))
                assert limited.status_code == 429  # the limits are the tenant's
                await post(case, root, "tenants/lab", limits={"requests_per_minute": 0})
                assert (
                    await case.http.post("/v1/chat/completions", json=ask, headers=bearer(rotated["secret"]))
                ).status_code == 200
                await asyncio.sleep(0.2)
                status, used = await get(case, root, "usage?tenant=lab&by=key,model")
                assert used["usage"] == [
                    {"key": made["prefix"], "model": "m", "requests": 3, "prompt_tokens": 9, "completion_tokens": 6,
                     "cached_tokens": 0, "estimated": 0, "dollars": pytest.approx((9 * 2 + 6 * 8) / 1e6)},
                ]  # fmt: skip
                assert (await get(case, root, "usage?tenant=lab&since=4e9"))[1] == {"usage": []}
                await post(case, root, f"keys/{rotated['prefix']}/revoke")
                keys = (await get(case, root, "keys?tenant=lab"))[1]["keys"]
                assert [(one["state"], one["rotated_from"]) for one in keys] == [
                    ("expired", None), ("revoked", made["prefix"]),
                ]  # fmt: skip
                entries = (await get(case, root, "audit"))[1]["entries"]
                assert [one["action"] for one in entries[:5]] == [
                    "keys.revoke", "tenants.update", "keys.rotate", "keys.create", "tenants.create",
                ]  # fmt: skip
                assert {(one["actor"], one["source"]) for one in entries[:5]} == {(prefix_of(root), "127.0.0.1")}
                said = json.dumps([entries, keys])
                assert "sha256" not in said and not any(
                    secret.removeprefix(prefix_of(secret)) in said for secret in (made["secret"], rotated["secret"])
                )

    asyncio.run(main())


def test_roles_end_at_their_own_tenant_and_rank(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server)
            mine, other = make_tenant(file), make_tenant(file, "other")
            root, own = key_of(file, "admin"), key_of(file, "tenant_admin")
            reader = key_of(file, "read_only")
            async with running(file) as case:
                assert (await post(case, own, "keys", tenant="acme"))[0] == 200
                assert (await post(case, own, f"keys/{prefix_of(mine)}/rotate"))[0] == 200
                refused = [
                    await post(case, own, "keys", tenant="other"),
                    await post(case, own, "keys", tenant="acme", role="admin"),
                    await post(case, own, f"keys/{prefix_of(root)}/rotate"),  # would make it an administrator
                    await post(case, own, f"keys/{prefix_of(other)}/revoke"),
                    await post(case, own, "tenants/acme", limits={"requests_per_minute": 0}),
                    await post(case, own, "tenants", name="new"),
                    await post(case, mine, "keys", tenant="acme"),
                    await get(case, own, "tenants"),
                    await get(case, own, "audit"),
                    await get(case, own, "keys?tenant=other"),
                    await get(case, reader, "usage?tenant=other"),
                    await get(case, reader, "keys"),
                ]
                assert [status for status, _ in refused] == [403] * len(refused)
                assert {one["tenant"] for one in (await get(case, own, "keys"))[1]["keys"]} == {"acme"}
                assert (await get(case, reader, "usage"))[0] == 200
                assert (await case.http.get("/admin/keys")).status_code == 401
                assert not [one for one in (await get(case, root, "tenants"))[1]["tenants"] if one["name"] == "new"]

    asyncio.run(main())


def test_mistakes_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_server(hello) as server:
            file = tenant_file(tmp_path / "g.toml", server, extra='[[tiers]]\nname = "gold"')
            secret = make_tenant(file)
            root = key_of(file, "admin")
            async with running(file) as case:
                for path, body, status, words in [
                    ("tenants", {"name": "a b"}, 400, "letters, digits"),
                    ("tenants", {"name": "acme"}, 400, "already"),
                    ("tenants", {"name": "x", "tier": "golden"}, 400, "did you mean 'gold'"),
                    ("tenants", {"name": "x", "limits": {"tokens_a_day": 1}}, 400, "tokens_per_day"),
                    ("tenants", {"name": "x", "limits": {"tokens_per_day": -1}}, 400, "at least 0"),
                    ("tenants", {"name": "x", "weight": 3}, 400, "unknown field `weight`"),
                    ("keys", {"tenant": "acm"}, 404, "did you mean 'acme'"),
                    ("keys", {"tenant": "acme", "role": "boss"}, 400, "no role 'boss'"),
                    ("keys", {"tenant": "acme", "expires_in": -1}, 400, "expired already"),
                    ("keys", {"tenant": "acme", "expires_in": 1e300}, 400, "a hundred years"),
                    (f"keys/{prefix_of(secret)}/rotate", {"overlap": 1e300}, 400, "a hundred years"),
                    (f"keys/{secret}/revoke", {}, 400, "its prefix is enough"),
                    ("keys/lmw-nothing/revoke", {}, 404, "there is no key"),
                    (f"keys/{prefix_of(secret)}/rotate", {"overlap": -1}, 400, "overlap"),
                    ("nothing", {}, 404, "there is no POST /admin/nothing"),
                ]:
                    found = await post(case, root, path, **body)
                    assert found[0] == status and words in str(found[1]), (path, body, found)
                    assert secret.removeprefix(prefix_of(secret)) not in str(found)
                assert (await get(case, root, "usage?by=day"))[0] == 400
                assert (await get(case, root, "audit?limit=x"))[0] == 400
                assert (await get(case, root, "audit?limit=1e9"))[0] == 400
                for query in ("usage?until=nan", "usage?since=1e400", "keys?tennant=acme", "tenants?x=1"):
                    assert (await get(case, root, query))[0] == 400, query

    asyncio.run(main())


def test_an_own_listener_keeps_administration_off_the_clients_port(tmp_path: Path, forked_python: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "g.toml"
    where = f'[tenants]\nstore = "sqlite:///{tmp_path}/gateway.db"\nadmin_port = {port}\n'
    file.write_text(f'{where}[[pools]]\nname = "p"\nurls = ["http://127.0.0.1:1/v1"]\n')
    make_tenant(file)
    root = key_of(file, "admin")
    words = [sys.executable, "-m", "lmworks", "gateway", str(file), "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next(match for line in process.stderr if (match := re.match(r"http://\S+", line)))
        for _ in range(200):
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/admin/tenants", headers=bearer(root)).status_code == 200
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        assert httpx.get(f"{found[0]}/admin/tenants", headers=bearer(root)).status_code == 404
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=bearer(root)).status_code == 404
    finally:
        process.kill()
        process.wait()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORE", "sqlite:///gateway.db")
    Path("gateway.toml").write_text('[tenants]\nstore_env = "STORE"\n[[tiers]]\nname = "gold"\nweight = 2\n')

    def run(*words: str) -> Any:
        code, out, error = lmworks(capsys, "gateway", *words, "--json")
        assert code == 0, error
        return json.loads(out)

    run("tenants", "create", "acme", "--tier", "gold", "--limit", "dollars_per_month=50")
    made = run("keys", "create", "acme", "--name", "ci", "--expires", "90d", "--model", "m")
    assert made["models"] == ["m"] and made["expires"] - made["created"] == pytest.approx(90 * 86400)
    new = run("keys", "rotate", made["prefix"], "--overlap", "2h")
    assert new["rotated_from"] == made["prefix"] and new["secret"] != made["secret"]
    run("keys", "revoke", new["prefix"])
    assert [one["state"] for one in run("keys", "list", "acme")["keys"]] == ["expires", "revoked"]
    changed = run(
        "tenants", "update", "acme", "--disable", "--limit", "tokens_per_day=9", "--limit", "dollars_per_month=0"
    )
    assert (changed["disabled"], changed["limits"]) == (True, {"tokens_per_day": 9})
    assert run("tenants", "list")["tenants"] == [changed]
    assert run("usage", "--by", "key", "--last", "30d") == {"usage": []}
    actions = [one["action"] for one in run("audit")["entries"]]
    assert actions == ["tenants.update", "keys.revoke", "keys.rotate", "keys.create", "tenants.create"]
    code, out, error = lmworks(capsys, "gateway", "keys", "create", "acme")
    assert code == 0 and re.fullmatch(r"lmw-[a-z2-7]{8}-\S{43}\n", out) and "only time" in error
    for words, said in [
        (["keys", "rotate", new["prefix"]], "is revoked"),
        (["keys", "create", "acme", "--expires", "soon"], "write a number with s, m, h or d"),
        (["keys", "create", "acme", "--limit", "requests_per_minute"], "NAME=NUMBER"),
        (["tenants", "create", "x", "--limit", "requests_per_minute=x"], "NAME=NUMBER"),
        (["usage", "--by", "day"], "not kept by 'day'"),
        (["usage", "nobody"], "no tenant 'nobody'"),
        (["keys", "list", "-c", "none.toml"], "cannot be read"),
    ]:
        code, _, error = lmworks(capsys, "gateway", *words)
        assert code == 2 and said in error, (words, error)
    Path("gateway.toml").write_text("[tenants]\n")
    assert "docs/tenants.md" in lmworks(capsys, "gateway", "keys", "list")[2]
