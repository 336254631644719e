"""Certificates for a trial: an authority, a server certificate, the aggregator's key, and the file for the nodes."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fpld.engines.flower.identity import make_aggregator_key, public_half, write_secret
from fpld.errors import InputError
from fpld.storage.files import read_utf8, write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CA, CA_KEY, CERT, CERT_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
AGGREGATOR_KEY, INVITATION = "aggregator.key", "federation.toml"


def make_certificates(folder: Path, address: str, hosts: Sequence[str], *, days: int) -> list[str]:
    """Make what is not in the folder yet, and name it; certificates that were given are left as they are.

    `address` is where the nodes find the aggregator, `hosts` the names and addresses that the certificate is for.
    """
    made = []
    given = [name for name in (CA, CERT, CERT_KEY) if (folder / name).exists()]
    if not given:
        _make_tls(folder, hosts, days)
        made += [CA, CA_KEY, CERT, CERT_KEY]
    elif len(given) < 3:
        raise InputError(f"{folder} must hold all of {CA}, {CERT} and {CERT_KEY}, or none of them, got {given}")
    if not (folder / AGGREGATOR_KEY).exists():
        make_aggregator_key(folder / AGGREGATOR_KEY)
        made.append(AGGREGATOR_KEY)
    ca = read_utf8(folder / CA)
    text = (
        "# What a site needs to join. Nothing here is secret; check by another way that it came unaltered.\n"
        f'address = "{address}"\naggregator = "{public_half(folder / AGGREGATOR_KEY)}"\nca = """\n{ca}"""\n'
    )
    write_atomic(folder / INVITATION, text.encode())
    return [*made, INVITATION]


def _make_tls(folder: Path, hosts: Sequence[str], days: int) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fpld trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    since, until = now - datetime.timedelta(minutes=5), now + datetime.timedelta(days=days)
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
        .add_extension(_usage(authority=True), critical=True)
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
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(_usage(authority=False), critical=True)
        .sign(authority, hashes.SHA256())
    )
    for name, secret in ((CA_KEY, authority), (CERT_KEY, key)):
        write_secret(folder / name, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_atomic(folder / CA, ca.public_bytes(Encoding.PEM))
    write_atomic(folder / CERT, server.public_bytes(Encoding.PEM))


def _usage(*, authority: bool) -> x509.KeyUsage:
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


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
