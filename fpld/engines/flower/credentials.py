"""Keys, certificates and signed messages: how nodes and aggregator prove who they are.

A node has two key pairs. With one (ECDSA, P-384) Flower's SuperLink admits it. With the other (X25519) and the
aggregator's it derives a secret for each run, which authenticates its frames and signed messages. Only public halves
travel: `NAME.pub` to the aggregator, `federation.toml` to the nodes. A file `NAME.revoked` beside the public keys
revokes a node.

A signed message is a JSON object in canonical form after a tag of 32 bytes: its keyed BLAKE2b hash. With an empty key
the tag is a checksum.

`make_certificates` makes TLS certificates for a trial. `expiry_warnings` and `clock_difference` report certificates
that end soon and clocks that differ before they become a connection that fails.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fpld.errors import InputError, ProtocolError
from fpld.storage.files import canonical_json, read_bytes, read_utf8, storage_error, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.config import Config

AUTH_KEY = "auth.key"
MAC_KEY = "mac.key"
CA = "ca.pem"
CA_KEY = "ca.key"
CERT = "server.pem"
CERT_KEY = "server.key"
AGGREGATOR_KEY = "aggregator.key"
INVITATION = "federation.toml"
EXPIRY_WARNING_DAYS = 30  # before the end of a certificate
_MAC_LABEL = "fpld-x25519"  # of the line with a node's X25519 key in NAME.pub
_KEY_BYTES = 32
_TAG_BYTES = 32
_MAX_SIGNED_MESSAGE_BYTES = 1 << 20
_MAX_CLOCK_DIFFERENCE_SECONDS = 60.0  # Flower refuses a signature that is more than 300 s off


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """The public keys of a node: the two lines of `NAME.pub`."""

    auth: str
    mac: bytes

    @classmethod
    def read(cls, path: Path) -> PublicKeys:
        """Read a file that `make_node_keys` wrote."""
        lines = [line.split() for line in read_utf8(path).splitlines() if line.strip()]
        keys = {words[0]: words[1] for words in lines if len(words) >= 2}
        auth = [f"{kind} {value}" for kind, value in keys.items() if kind.startswith("ecdsa-")]
        try:
            return cls(auth[0], _decode(keys[_MAC_LABEL]))
        except (ValueError, KeyError, IndexError):
            raise InputError(
                f"{path} must hold the two lines that `fpld init-node` wrote: ecdsa-... and {_MAC_LABEL}"
            ) from None


def make_node_keys(folder: Path, name: str) -> Path:
    """Make a node's key pairs in its folder; return the file with the public keys."""
    auth = ec.generate_private_key(ec.SECP384R1())
    mac = X25519PrivateKey.generate()
    write_secret(folder / AUTH_KEY, auth.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_secret(folder / MAC_KEY, _encode(mac.private_bytes_raw()))
    line = auth.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    public = folder / f"{name}.pub"
    public.write_text(f"{line} {name}\n{_MAC_LABEL} {_encode(mac.public_key().public_bytes_raw()).decode()} {name}\n")
    return public


def make_aggregator_key(path: Path) -> None:
    """Make the aggregator's secret key."""
    write_secret(path, _encode(X25519PrivateKey.generate().private_bytes_raw()))


def public_key_text(path: Path) -> str:
    """Return the public half of a secret key, as text."""
    return _encode(_private_key(path).public_key().public_bytes_raw()).decode()


def run_secret(private: Path, public: bytes, session: bytes, name: str) -> bytes:
    """Derive the secret that a node and the aggregator share in one run.

    Parameters
    ----------
    private
        The file of this end's secret key.
    public
        The other end's public key.
    session
        The run's session.
    name
        The node's name.
    """
    try:
        shared = _private_key(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise InputError(f"the other end's public key cannot be used: {error}") from None
    body = session + name.encode()
    return hashlib.blake2b(body, key=shared, digest_size=32, person=b"fpld run secret").digest()


def parse_public_key(text: str) -> bytes:
    """Read a public key from text."""
    try:
        return _decode(text)
    except ValueError as error:
        raise InputError(f"aggregator: must be the public key in federation.toml: {error}") from None


def sign_message(key: bytes, body: dict[str, Any]) -> bytes:
    """Return a signed message: the tag, and the body as canonical JSON."""
    text = canonical_json(body)
    return _tag(key, text) + text


@dataclass(frozen=True, slots=True)
class SignedMessage:
    """A signed message as received; `body` is not to be trusted before `check`."""

    tag: bytes
    text: bytes
    body: dict[str, Any]

    @classmethod
    def parse(cls, data: bytes) -> SignedMessage:
        """Split a signed message into tag and body."""
        tag = data[:_TAG_BYTES]
        text = data[_TAG_BYTES:]
        if len(data) > _MAX_SIGNED_MESSAGE_BYTES:
            raise ProtocolError(f"a message must be at most {_MAX_SIGNED_MESSAGE_BYTES} bytes, got {len(data)}")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message must be a tag and JSON: {error}") from None
        if not isinstance(body, dict):
            raise ProtocolError(f"a message must hold a JSON object, got {type(body).__name__}")
        return cls(tag, text, body)

    def check(self, key: bytes, kind: str) -> dict[str, Any]:
        """Return the body; raise `ProtocolError` if its tag is wrong, or it is not of this kind."""
        if not hmac.compare_digest(self.tag, _tag(key, self.text)):
            raise ProtocolError("a message's tag does not match: it was altered, or made with another key")
        if self.body.get("kind") != kind:
            raise ProtocolError(f"a message must be of kind {kind!r}, got {self.body.get('kind')!r:.40}")
        return self.body


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; refuse to replace one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{path} exists already: a key is not overwritten; move it away first") from None
    except OSError as error:
        raise storage_error(path, error) from error
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _tag(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=_TAG_BYTES, person=b"fpld letter").digest()


def _private_key(path: Path) -> X25519PrivateKey:
    try:
        return X25519PrivateKey.from_private_bytes(_decode(read_utf8(path).strip()))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} must hold a secret key that fpld made: {error}") from None


def _encode(raw: bytes) -> bytes:
    return base64.b64encode(raw)


def _decode(text: str) -> bytes:
    raw = base64.b64decode(text, validate=True)
    if len(raw) != _KEY_BYTES:
        raise ValueError(f"a key has {_KEY_BYTES} bytes, this one {len(raw)}")
    return raw


def is_revoked(config: Config, name: str) -> bool:
    """Return whether the aggregator has put a file NAME.revoked beside a node's public keys."""
    return config.flower is not None and (Path(config.flower.keys) / f"{name}.revoked").exists()


def public_key_file(config: Config, name: str) -> Path:
    """Return the file with a node's public keys in the aggregator's folder."""
    if config.flower is None:
        raise InputError("[flower] must be given: where to listen, and the folders of certificates and keys")
    path = Path(config.flower.keys) / f"{name}.pub"
    if not path.exists():
        raise InputError(f"{path} does not exist: put the file there that `fpld init-node` made at {name!r}")
    return path


def make_certificates(folder: Path, address: str, hosts: Sequence[str], *, days: int) -> list[str]:
    """Make certificates and key of an aggregator for a trial, and `federation.toml` for its nodes.

    Parameters
    ----------
    folder
        Where they are made. Certificates that exist are left as they are.
    address
        Where the nodes reach the aggregator.
    hosts
        Names and addresses that the certificate is for.
    days
        How long it is valid.

    Returns
    -------
    list of str
        The names of the files that were made.
    """
    made = []
    existing = [name for name in (CA, CERT, CERT_KEY) if (folder / name).exists()]
    if not existing:
        _make_tls_certificates(folder, hosts, days)
        made += [CA, CA_KEY, CERT, CERT_KEY]
    elif len(existing) < 3:
        raise InputError(f"{folder} must hold all of {CA}, {CERT} and {CERT_KEY}, or none of them, got {existing}")
    if not (folder / AGGREGATOR_KEY).exists():
        make_aggregator_key(folder / AGGREGATOR_KEY)
        made.append(AGGREGATOR_KEY)
    ca = read_utf8(folder / CA)
    text = (
        "# What a node needs to join. Nothing here is secret; check by another way that it came unaltered.\n"
        f'address = "{address}"\naggregator = "{public_key_text(folder / AGGREGATOR_KEY)}"\nca = """\n{ca}"""\n'
    )
    write_atomic(folder / INVITATION, text.encode())
    return [*made, INVITATION]


def _make_tls_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    now = datetime.now(UTC)
    authority = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fpld trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    since = now - timedelta(minutes=5)
    until = now + timedelta(days=days)
    ca = (
        x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=issuer,
            public_key=authority.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=since,
            not_valid_after=until,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(authority, hashes.SHA256())
    )
    server = (
        x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=since,
            not_valid_after=until,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative_name(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(_key_usage(authority=False), critical=True)
        .sign(authority, hashes.SHA256())
    )
    for name, secret in ((CA_KEY, authority), (CERT_KEY, key)):
        write_secret(folder / name, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_atomic(folder / CA, ca.public_bytes(Encoding.PEM))
    write_atomic(folder / CERT, server.public_bytes(Encoding.PEM))


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def expiry_warnings(paths: Iterable[Path], now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate that ends soon; raise `InputError` for one that is not valid now."""
    now = now or datetime.now(UTC)
    warnings = []
    for path in paths:
        try:
            certificates = x509.load_pem_x509_certificates(read_bytes(path))
        except ValueError as error:
            raise InputError(f"{path} must hold a certificate in PEM: {error}") from None
        for certificate in certificates:
            since = certificate.not_valid_before_utc
            until = certificate.not_valid_after_utc
            if now < since:
                raise InputError(
                    f"{path} is valid from {since:%Y-%m-%d %H:%M} UTC on, and this machine's clock is at "
                    f"{now:%Y-%m-%d %H:%M}: set the clock, or wait"
                )
            if now >= until:
                raise InputError(
                    f"{path} has ended on {until:%Y-%m-%d}: make new ones with `fpld certs`, and send federation.toml "
                    "to the nodes"
                )
            if (until - now).days < EXPIRY_WARNING_DAYS:
                warnings.append(
                    f"{path} ends on {until:%Y-%m-%d}, in {(until - now).days} days: `fpld certs` makes new ones"
                )
    return warnings


def clock_difference(date: str | None, now: datetime | None = None) -> str:
    """Return a sentence if this machine's clock differs from the header `Date` of a response; else an empty one.

    >>> clock_difference("Tue, 17 Nov 2026 12:00:00 GMT", datetime(2026, 11, 17, 12, 10, tzinfo=UTC))
    "this machine's clock is 600 s ahead of the aggregator's: signatures are valid for 300 s; set the clocks"
    """
    try:
        server_time = parsedate_to_datetime(date or "")
    except ValueError:
        return ""
    difference = ((now or datetime.now(UTC)) - server_time).total_seconds()
    if abs(difference) <= _MAX_CLOCK_DIFFERENCE_SECONDS:
        return ""
    direction = "ahead of" if difference > 0 else "behind"
    clock = f"this machine's clock is {abs(difference):.0f} s {direction} the aggregator's"
    return f"{clock}: signatures are valid for 300 s; set the clocks"
