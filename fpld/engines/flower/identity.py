"""Who is who: keys of nodes and of the aggregator, and letters that prove who wrote them.

A node has two key pairs. With one (ECDSA, P-384) Flower's SuperLink admits it; with the other (X25519) and the
aggregator's it derives a secret for each run, with which its frames and letters are authenticated. Only public
halves ever travel: `NAME.pub` to the aggregator, `federation.toml` to the nodes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fpld.errors import InputError, ProtocolError
from fpld.storage.files import canonical_json, read_utf8, storage_error

if TYPE_CHECKING:
    from pathlib import Path

AUTH_KEY, MAC_KEY = "auth.key", "mac.key"
_LABEL = "fpld-x25519"
_TAG_BYTES = 32
_LONGEST_LETTER = 1 << 20


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """What a node shows of itself: `NAME.pub`, two lines."""

    auth: str
    mac: bytes

    @classmethod
    def read(cls, path: Path) -> PublicKeys:
        """Read a file that `make_node_keys` wrote."""
        lines = [line.split() for line in read_utf8(path).splitlines() if line.strip()]
        found = {words[0]: words[1] for words in lines if len(words) >= 2}
        auth = [f"{kind} {value}" for kind, value in found.items() if kind.startswith("ecdsa-")]
        try:
            return cls(auth[0], _decode(found[_LABEL]))
        except (ValueError, KeyError, IndexError):
            raise InputError(
                f"{path} must hold the two lines that `fpld init-node` wrote: ecdsa-... and {_LABEL}"
            ) from None


def make_node_keys(folder: Path, name: str) -> Path:
    """Make a node's keys in its folder; return the file with the public ones."""
    auth, mac = ec.generate_private_key(ec.SECP384R1()), X25519PrivateKey.generate()
    write_secret(folder / AUTH_KEY, auth.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_secret(folder / MAC_KEY, _encode(mac.private_bytes_raw()))
    line = auth.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    public = folder / f"{name}.pub"
    public.write_text(f"{line} {name}\n{_LABEL} {_encode(mac.public_key().public_bytes_raw()).decode()} {name}\n")
    return public


def make_aggregator_key(path: Path) -> None:
    """Make the aggregator's secret key."""
    write_secret(path, _encode(X25519PrivateKey.generate().private_bytes_raw()))


def public_half(path: Path) -> str:
    """Return the public half of a secret key, as text."""
    return _encode(_private(path).public_key().public_bytes_raw()).decode()


def run_secret(own: Path, other: bytes, session: bytes, name: str) -> bytes:
    """Derive the secret that a node and the aggregator share in one run, from either end."""
    try:
        shared = _private(own).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise InputError(f"the other end's public key cannot be used: {error}") from None
    body = session + name.encode()
    return hashlib.blake2b(body, key=shared, digest_size=32, person=b"fpld run secret").digest()


def parse_public(text: str) -> bytes:
    """Read a public key from text."""
    try:
        return _decode(text)
    except ValueError as error:
        raise InputError(f"aggregator: must be the public key in federation.toml: {error}") from None


def write_letter(key: bytes, body: dict[str, Any]) -> bytes:
    """Return a JSON object as bytes with a tag that only holders of the key can make (without a key: a checksum)."""
    text = canonical_json(body)
    return _tag(key, text) + text


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter as it came: `body` may be looked at, but is not believed before `check`."""

    tag: bytes
    text: bytes
    body: dict[str, Any]

    @classmethod
    def parse(cls, data: bytes) -> Letter:
        """Take a letter apart."""
        tag, text = data[:_TAG_BYTES], data[_TAG_BYTES:]
        if len(data) > _LONGEST_LETTER:
            raise ProtocolError(f"a letter must be at most {_LONGEST_LETTER} bytes, got {len(data)}")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a letter must be a tag and JSON: {error}") from None
        if not isinstance(body, dict):
            raise ProtocolError(f"a letter must hold a JSON object, got {type(body).__name__}")
        return cls(tag, text, body)

    def check(self, key: bytes, kind: str) -> dict[str, Any]:
        """Return the body if the tag is right and it is of this kind."""
        if not hmac.compare_digest(self.tag, _tag(key, self.text)):
            raise ProtocolError("a letter's tag does not match: it was altered, or made with another key")
        if self.body.get("kind") != kind:
            raise ProtocolError(f"a letter of kind {kind!r} must come here, got {self.body.get('kind')!r:.40}")
        return self.body


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; one that exists is not replaced."""
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


def _private(path: Path) -> X25519PrivateKey:
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
    if len(raw) != 32:
        raise ValueError(f"a key has 32 bytes, this one {len(raw)}")
    return raw
