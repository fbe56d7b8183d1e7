"""Mutual TLS between clients, the gateway and its servers; certificates that change while all of them run."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import Authority, client
from gateway_case import Answering, Asked, FakeServer, pool_file, running, say
from lmworks.gateway.gateway import Gateway, GatewaySettings
from lmworks.serve.tls import Certificates, TLSFiles, listening_context

EXPIRY = "lmworks:gateway_tls_certificate_expiry_timestamp_seconds"


async def hello(asked: Asked, answering: Answering) -> None:
    await say(asked, answering, "Hello")


async def tls_server(files: TLSFiles) -> FakeServer:
    """A server that wants to see certificates, with a context of its own."""
    found = FakeServer(hello)
    certificates = Certificates(files, server=True)
    found.server = await asyncio.start_server(
        found.serve, "127.0.0.1", 0, ssl=listening_context(files, certificates.context)
    )
    found.url = f"https://127.0.0.1:{found.server.sockets[0].getsockname()[1]}/v1"
    return found


def pool(shown: TLSFiles | None, ca: Path, name: str = "localhost") -> str:
    lines = [f'tls_ca = "{ca}"', f'tls_name = "{name}"']
    if shown is not None:
        lines += [f'tls_cert = "{shown.cert}"', f'tls_key = "{shown.key}"']
    return "\n".join(lines)


def test_servers_see_the_gateways_certificate_and_it_sees_theirs(tmp_path: Path) -> None:
    """Wrong ones take the server out, and the reason is said; the right one takes it in again without a restart."""
    inside, outside = Authority(tmp_path, "inside"), Authority(tmp_path, "outside")
    server_files = inside.issue("server", ca=inside.file)
    shown = outside.issue("gateway")

    async def main() -> None:
        server = await tls_server(server_files)
        try:
            async with running(pool_file(tmp_path / "g.toml", server, pool=pool(shown, inside.file))) as case:
                (only,) = case.gateway.servers
                assert not only.up and "certificate" in str(only.last_error), only.last_error
                inside.issue("gateway")  # the same files, of the right authority
                case.gateway.check_files()
                await case.until(lambda: only.up)
                assert (await case.ask()).json()["choices"][0]["message"]["content"] == "Hello"
                text = (await case.http.get("/metrics")).text
                assert f'{EXPIRY}{{file="{shown.cert}",side="servers"}}' in text
            for wrong in (pool(None, inside.file), pool(shown, outside.file), pool(shown, inside.file, "elsewhere")):
                async with running(pool_file(tmp_path / "g.toml", server, pool=wrong)) as case:
                    (only,) = case.gateway.servers
                    assert not only.up and (await case.ask()).status_code in (404, 503)
            assert len(server.asked) == 1
        finally:
            server.die()

    asyncio.run(main())


def test_a_server_that_is_found_by_dns_is_asked_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async def main() -> None:
        server = await tls_server(authority.issue("server"))
        port = server.url.rpartition(":")[2].removesuffix("/v1")
        file = tmp_path / "g.toml"
        file.write_text(
            f'[health]\ninterval = 0.05\n[[pools]]\nname = "p"\nkind = "openai"\ndns = "127.0.0.1:{port}"\n'
            f'tls = true\ntls_ca = "{authority.file}"\n'
        )
        try:
            async with running(file, wait=False) as case:
                await case.until(lambda: any(one.up for one in case.gateway.servers))
                assert (await case.ask()).status_code == 200
        finally:
            server.die()

    asyncio.run(main())


def test_the_gateway_takes_over_its_own_certificate_while_a_stream_runs(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("edge")
    go_on = asyncio.Event()

    async def slow(asked: Asked, answering: Answering) -> None:
        if not asked.json.get("stream"):
            await say(asked, answering, "Hello")
            return
        answering.begin_stream()
        await answering.send(b'data: {"choices": [{"index": 0, "delta": {"content": "One"}}]}\n\n')
        await go_on.wait()
        await answering.end()

    async def main() -> None:
        server = FakeServer(slow)
        server.server = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{server.server.sockets[0].getsockname()[1]}/v1"
        listen = f'[listen]\ntls_cert = "{files.cert}"\ntls_key = "{files.key}"\ntls_client_ca = "{authority.file}"'
        gateway = Gateway(GatewaySettings(pool_file(tmp_path / "g.toml", server, extra=listen)))
        listening = socket.create_server(("127.0.0.1", 0))
        web = await gateway.listen(listening, gateway.handle)
        gateway.apply_config()
        mine = authority.issue("client")
        address = f"https://localhost:{listening.getsockname()[1]}"
        body = {"model": "m", "messages": []}
        try:
            async with httpx.AsyncClient(verify=client(authority.file, mine), trust_env=False) as http:
                while not all(one.up for one in gateway.servers):
                    await asyncio.sleep(0.02)
                async with http.stream(
                    "POST", f"{address}/v1/chat/completions", json={**body, "stream": True}
                ) as found:
                    lines = found.aiter_lines()
                    assert "One" in await anext(lines)
                    authority.issue("edge", days=4)
                    gateway.check_files()
                    go_on.set()
                    assert [line async for line in lines if line] == ["data: [DONE]"]
                assert (await http.post(f"{address}/v1/chat/completions", json=body)).status_code == 200
                text = (await http.get(f"{address}/metrics")).text
            certificate = files.cert
            assert f'{EXPIRY}{{file="{certificate}",side="clients"}}' in text
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                async with httpx.AsyncClient(verify=client(authority.file), trust_env=False) as stranger:
                    await stranger.get(f"{address}/health")
        finally:
            for task in [*gateway.probes]:
                task.cancel()
            web.close()
            server.die()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key go together"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca needs"),
        ({"tls_cert": "nowhere.pem", "tls_key": "nowhere.key"}, "there is no such file"),
    ],
)
def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    lines = "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    file = tmp_path / "g.toml"
    file.write_text(f'[listen]\n{lines}[[pools]]\nname = "p"\nurls = ["http://127.0.0.1:1/v1"]\n')
    with pytest.raises(Exception, match=says):
        Gateway(GatewaySettings(file))
