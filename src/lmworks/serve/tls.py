"""TLS and mutual TLS: contexts whose certificates are read again when their files change, and when those end.

A new certificate is for connections that are made from then on. Files that do not fit together (a certificate whose
key is still the old one) are logged, and the old ones stay in use.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from ..spec import SpecError
from .reload import ReloadedFile, log

METRIC = "tls_certificate_expiry_timestamp_seconds"


@dataclass(frozen=True)
class TLSFiles:
    """PEM files of one side: its own certificate (with those that lead to its authority), and whom it believes."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None  # of a server: clients must show a certificate of these authorities

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True)
class Loaded:
    context: ssl.SSLContext
    expiry: dict[str, float]  # by file: seconds since 1970


class Certificates(ReloadedFile[Loaded]):
    """One side's context, made anew when a file changes."""

    def __init__(self, files: TLSFiles, *, server: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.tls, self.server = files, server
        super().__init__(None, clock)

    @property
    def watched(self) -> tuple[Path, ...]:
        return self.tls.paths

    def read(self) -> Loaded:
        make = server_context if self.server else client_context
        found = Loaded(make(self.tls), dict(expiries(self.tls)))
        for path, end in found.expiry.items():
            if end <= time.time():
                log.warning("a certificate has expired", extra={"path": path})
        return found

    def context(self) -> ssl.SSLContext:
        return self.current().context


def listening_context(files: TLSFiles, current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """For a socket that listens for as long as the process runs: each handshake takes the context of that moment."""

    def choose(connection: ssl.SSLObject, name: str | None, front: ssl.SSLContext) -> None:
        connection.context = current()

    front = server_context(files)
    front.sni_callback = choose  # called for clients that name no server, too
    return front


def server_context(files: TLSFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, files)
    if files.ca is not None:
        load_authorities(context, files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would not show its certificate again, which may be no longer believed.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def client_context(files: TLSFiles) -> ssl.SSLContext:
    """Believes the system's authorities where no others are given."""
    context = ssl.create_default_context() if files.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is not None:
        load_authorities(context, files.ca)
    if files.cert is not None:
        load_chain(context, files)
    return context


def load_chain(context: ssl.SSLContext, files: TLSFiles) -> None:
    assert files.cert is not None and files.key is not None
    for path in (files.cert, files.key):
        if not path.is_file():
            raise SpecError(f"{path}: there is no such file")
    try:
        context.load_cert_chain(files.cert, files.key, password=refuse_password)
    except OSError as error:
        why = "they do not belong together" if "MISMATCH" in str(error) else f"no certificate and its key ({error})"
        raise SpecError(f"{files.cert}, {files.key}: {why}") from None


def refuse_password() -> str:
    """Asked for by OpenSSL, on the terminal if we did not."""
    raise SpecError("the private key is encrypted: decrypt it (openssl pkey -in KEY -out KEY.plain)")


def load_authorities(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise SpecError(f"{path}: no certificates of authorities ({error.strerror or error})") from None


def expiries(files: TLSFiles) -> Iterator[tuple[str, float]]:
    """Of a chain the first to end; of authorities the last: one of them is enough."""
    for path, which in ((files.cert, min), (files.ca, max)):
        if path is not None:
            try:
                found = x509.load_pem_x509_certificates(path.read_bytes())
            except (OSError, ValueError) as error:
                raise SpecError(f"{path}: no certificates ({error})") from None
            yield str(path), which(one.not_valid_after_utc.timestamp() for one in found)
