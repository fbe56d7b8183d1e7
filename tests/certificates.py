"""Certificates made on the spot: an authority, and what it signs. Keys of P-256, which take a millisecond."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lmworks.serve.tls import TLSFiles


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


@dataclass
class Authority:
    folder: Path
    name: str = "authority"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.certificate = self.sign(self.name, self.key, 10.0, authority=True)
        self.file = self.folder / f"{self.name}.pem"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, days: float, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=5))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, file: str, name: str = "localhost", days: float = 1.0, ca: Path | None = None) -> TLSFiles:
        """FILE.pem and FILE.key, which replace older ones."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self.sign(name, key, days)
        files = TLSFiles(self.folder / f"{file}.pem", self.folder / f"{file}.key", ca)
        assert files.cert is not None and files.key is not None
        files.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(pem_of(key))
        return files


def client(ca: Path, shown: TLSFiles | None = None) -> ssl.SSLContext:
    """A client's context by the standard library alone."""
    context = ssl.create_default_context(cafile=str(ca))
    if shown is not None:
        assert shown.cert is not None and shown.key is not None
        context.load_cert_chain(shown.cert, shown.key)
    return context
