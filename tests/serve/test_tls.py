"""TLS of the server: certificates are taken over while it runs, clients show theirs, and expiry is a metric."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from api_server import House
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from certificates import Authority, client
from lmworks.serve.tls import Certificates, TLSFiles, client_context, listening_context
from lmworks.spec import SpecError


def presented(port: int, context: ssl.SSLContext, host: str | None = "localhost") -> x509.Certificate:
    """The certificate that a server shows in a new handshake."""
    context.check_hostname = host is not None
    with (
        socket.create_connection(("127.0.0.1", port), 10) as raw,
        context.wrap_socket(raw, server_hostname=host) as tls,
    ):
        tls.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        if tls.recv(12) != b"HTTP/1.1 200":  # with TLS 1.3 a client learns only now whether it is believed
            raise ConnectionError("the server closed the connection")
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown)


def serial(files: TLSFiles) -> int:
    assert files.cert is not None
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number


def test_a_new_certificate_is_shown_without_a_restart(house: House, tmp_path: Path) -> None:
    """Half of it is not: the certificate comes before its key, and handshakes in between see the old one."""
    authority = Authority(tmp_path)
    files = authority.issue("server")
    api = house.open(tls=files)
    trust = client(authority.file)
    assert presented(api.port, trust).serial_number == (first := serial(files))
    with httpx.Client(verify=trust, trust_env=False, base_url=f"https://localhost:{api.port}") as kept:
        assert kept.get("/ready").status_code == 200
        assert files.cert is not None and files.key is not None
        old_key = files.key.read_bytes()
        authority.issue("server", days=3)
        new_key, second = files.key.read_bytes(), serial(files)
        files.key.write_bytes(old_key)
        api.serving.check_files()
        assert presented(api.port, trust).serial_number == first
        files.key.write_bytes(new_key)
        api.serving.check_files()
        assert presented(api.port, trust).serial_number == second != first
        assert presented(api.port, trust, host=None).serial_number == second, "a client that names no server"
        assert kept.get("/ready").status_code == 200, "connections that are there stay"
        text = kept.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("lmworks:tls_certificate_expiry_timestamp")]
    assert f'file="{files.cert}"' in line
    assert abs(float(line.split()[-1]) - time.time() - 3 * 86400) < 600
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{api.port}/ready", trust_env=False)


def test_clients_show_a_certificate_of_an_authority_that_may_change(house: House, tmp_path: Path) -> None:
    mine, other = Authority(tmp_path, "mine"), Authority(tmp_path, "other")
    allowed = tmp_path / "allowed.pem"
    allowed.write_bytes(mine.file.read_bytes())
    api = house.open(tls=mine.issue("server", ca=allowed))
    by_mine, by_other = mine.issue("client"), other.issue("stranger")
    presented(api.port, client(mine.file, by_mine))
    for wrong in (None, by_other):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            presented(api.port, client(mine.file, wrong))
    allowed.write_bytes(other.file.read_bytes())
    api.serving.check_files()
    resuming = client(mine.file, by_other)
    presented(api.port, resuming)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        presented(api.port, client(mine.file, by_mine))


def test_no_session_is_resumed_where_clients_show_certificates(house: House, tmp_path: Path) -> None:
    """It would not show its certificate again, after the authority was taken out of the file."""
    authority = Authority(tmp_path)
    api = house.open(tls=authority.issue("server", ca=authority.file))
    context, sessions = client(authority.file, authority.issue("client")), []
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, version
        with (
            socket.create_connection(("127.0.0.1", api.port), 10) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as tls,
        ):
            tls.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert tls.recv(10)
            sessions.append(tls.session)
    assert not any(one is not None and one.has_ticket for one in sessions)


@pytest.mark.parametrize("wrong", ["mismatch", "encrypted", "garbage", "missing", "authority"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, wrong: str) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server", ca=authority.file)
    assert files.cert is not None and files.key is not None
    says = {
        "mismatch": "do not belong together",
        "encrypted": "encrypted",
        "garbage": "no certificate",
        "missing": "no such file",
        "authority": "authorities",
    }[wrong]
    if wrong == "mismatch":
        files.key.write_bytes(authority.issue("another").key.read_bytes())  # type: ignore[union-attr]
    elif wrong == "encrypted":
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        hidden = serialization.BestAvailableEncryption(b"secret")
        form = serialization.PrivateFormat.PKCS8
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, hidden))
    elif wrong == "garbage":
        files.cert.write_text("no certificate\n")
    elif wrong == "missing":
        files.key.unlink()
    else:
        authority.file.write_text("nothing\n")
    with pytest.raises(SpecError, match=says) as caught:
        Certificates(files, server=True)
    assert "PRIVATE" not in str(caught.value)


def test_old_protocols_are_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server")
    contexts = (
        client_context(TLSFiles(ca=authority.file)),
        listening_context(files, Certificates(files, server=True).context),
    )
    for context in contexts:
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert contexts[0].verify_mode == ssl.CERT_REQUIRED and contexts[0].check_hostname


def test_forwarded_addresses_of_clients_are_not_believed(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Requests without keys take turns by address: whoever could choose one would have many turns."""
    api = house.open()
    seen: list[object] = []
    app = api.server.config.loaded_app

    async def spy(scope: dict[str, object], receive: object, send: object) -> None:
        seen.append(scope["client"])
        await app(scope, receive, send)

    api.server.config.loaded_app = spy  # type: ignore[assignment]
    headers = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https", "forwarded": "for=203.0.113.9"}
    assert api.http.get("/health", headers=headers).status_code == 200
    assert [one[0] for one in seen] == ["127.0.0.1"]  # type: ignore[index]


@pytest.mark.slow
def test_sighup_reads_certificates_and_keys_again(tmp_path: Path) -> None:
    """`lmworks serve` as a service manager runs it, with mutual TLS, several API processes included."""
    authority = Authority(tmp_path)
    files = authority.issue("server", ca=authority.file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "tiny", "--port", str(port), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]
    words += ["--tls-client-ca", str(authority.file), "engine.device=cpu", "engine.blocks=64", "engine.context=128"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lmworks", *words], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        context = client(authority.file, authority.issue("client"))
        end = time.monotonic() + 120
        while True:
            try:
                before = presented(port, context).serial_number
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.2)
        authority.issue("server")
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.3)
        assert presented(port, context).serial_number == serial(files) != before
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
