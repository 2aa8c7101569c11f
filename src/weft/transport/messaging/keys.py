"""The key of a run: a file that only its owner can read, held by every process of the run.

Its first line has the secret with which both sides of a connection authenticate. Below it stand a private key and a
certificate in PEM for TLS: every process of a run presents the same certificate and accepts no other.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import secrets
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from weft.errors import JobError

_FIRST = re.compile(r"weft-key-1 ([0-9a-f]{64})")
_NAME = "weft run"
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""A certificate is valid while its file exists, whatever the clocks of the hosts say."""


@dataclass(frozen=True)
class Key:
    """The key of a run. `file` is None where the key exists in memory only."""

    secret: bytes
    file: Path | None = None

    def __repr__(self) -> str:
        return f"Key({self.file or 'in memory'})"

    @staticmethod
    def fresh() -> Key:
        """A key in memory, for threads of one process and its forks. It has no certificate and cannot encrypt."""
        return Key(secrets.token_bytes(32))

    @staticmethod
    def make(file: Path) -> Key:
        """Create a key file, readable by its owner alone. Raises JobError where the file exists."""
        text = f"weft-key-1 {secrets.token_hex(32)}\n{_identity()}"
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise JobError(f"{file} exists already; name another file, or join the run that it is the key of") from None
        except OSError as error:
            raise JobError(f"cannot write the key file {file} ({error.strerror}); name one that can be") from None
        with os.fdopen(handle, "w") as to:
            to.write(text)
        return Key.read(file)

    @staticmethod
    def read(file: Path) -> Key:
        """The key in a file. Raises JobError where others can read it."""
        try:
            handle = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise JobError(
                f"cannot read the key file {file} ({error.strerror}); copy it from where the run was started"
            ) from None
        with os.fdopen(handle) as source:
            if stat.S_IMODE(os.fstat(handle).st_mode) & 0o077:
                raise JobError(f"the key file {file} can be read by others; `chmod 600 {file}`, then make a new key")
            first = _FIRST.fullmatch(source.readline(200).strip())
        if first is None:
            raise JobError(f"{file} is not a key file of Weft; copy the one from where the run was started")
        return Key(bytes.fromhex(first[1]), file)

    def proof(self, side: str, *exchanged: bytes) -> bytes:
        """HMAC-SHA-256 of one side's name and the bytes exchanged so far, each with its length."""
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (side.encode(), *exchanged))
        return hmac.digest(self.secret, text, hashlib.sha256)

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 in which both sides present the run's certificate and accept no other."""
        if self.file is None:
            raise JobError("an untrusted network needs a key file; give one with --key-file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is the run's, not a host's
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.file)
            context.load_verify_locations(self.file)
        except ssl.SSLError:
            raise JobError(
                f"{self.file} has no certificate; pip install cryptography where the run is started, and start it again"
            ) from None
        if server:
            context.num_tickets = 0  # sessions are never resumed
        return context


def _identity() -> str:
    """A private key and a certificate for it, in PEM; empty where `cryptography` is not installed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        return ""  # enough on a trusted network; on an untrusted one `context` names the missing package
    private = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, None)
    )
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (pem + certificate.public_bytes(Encoding.PEM)).decode()
