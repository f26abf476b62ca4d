"""API keys: the file that holds them, and what a call shows."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gimbal_jax.exceptions import Unauthenticated

MIN_KEY_LENGTH = 16
GATEWAY = "gateway"
"""The name of our own HTTP gateway as a client, which no key may have."""

_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # what a bearer token can be (RFC 6750)


@dataclass(frozen=True)
class Key:
    """One API key. The key itself is not kept."""

    digest: bytes
    """Its SHA-256."""
    name: str
    expires: float | None = None
    """Unix time in seconds; None never."""


def new_key(key: str, name: str, expires: float | None = None) -> Key:
    return Key(hashlib.sha256(key.encode()).digest(), name, expires)


def read_text(field: str, path: Path) -> str:
    """Text of a file of keys; raises ValueError."""
    try:
        return path.read_text("ascii")
    except OSError as error:
        raise ValueError(f"{field} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{field} {path}: must be plain ASCII text") from error


def load_keys(path: Path) -> tuple[Key, ...]:
    """Keys of a file with one ``KEY [NAME] [EXPIRES]`` a line; ``#`` starts a comment.

    EXPIRES is an ISO date-time with a zone. A key without a name is called by the start of its hash.
    Raises ValueError that names the line, never the key.
    """
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(read_text("api_keys", path).splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                key = _parse_key(words)
                if key.digest in keys:
                    raise ValueError("the key stands in the file twice")
            except ValueError as error:
                raise ValueError(f"api_keys {path}, line {number}: {error}") from error
            keys[key.digest] = key
    if not keys:
        raise ValueError(f"api_keys {path}: holds no key")
    return tuple(keys.values())


def authenticate(authorization: str | None, keys: Collection[Key], now: float) -> Key:
    """The key of a call's ``authorization`` metadata; raises Unauthenticated. ``now`` is Unix time in seconds."""
    if authorization is None:
        raise Unauthenticated("no API key: the call needs the metadata 'authorization: Bearer KEY'")
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("authorization must be 'Bearer KEY'")
    digest = hashlib.sha256(given.strip().encode()).digest()
    # Hashes of equal length, each compared in constant time: how long it takes tells nothing of a key.
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    if not found:
        raise Unauthenticated("wrong API key")
    if found[0].expires is not None and found[0].expires <= now:
        raise Unauthenticated(f"the API key {found[0].name!r} has expired ({_iso(found[0].expires)})")
    return found[0]


def _parse_key(words: Sequence[str]) -> Key:
    if len(words) > 3:
        raise ValueError(f"must be KEY [NAME] [EXPIRES], has {len(words)} words")
    key, name, expires = (*words, "", "")[:3]
    if not _KEY.fullmatch(key) or len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"a key is at least {MIN_KEY_LENGTH} letters, digits and -._~+/ (= at the end)")
    if name == GATEWAY:
        raise ValueError(f"the name {GATEWAY!r} is the HTTP gateway's own")
    if _is_time(name):
        raise ValueError(f"{name} stands in the place of the name; EXPIRES comes after it")
    if not name:
        name = f"key-{new_key(key, '').digest.hex()[:8]}"
    return new_key(key, name, _unix_time(expires) if expires else None)


def _is_time(word: str) -> bool:
    try:
        datetime.datetime.fromisoformat(word)
    except ValueError:
        return False
    return True


def _unix_time(word: str) -> float:
    if not _is_time(word) or (time := datetime.datetime.fromisoformat(word)).tzinfo is None:
        raise ValueError(f"EXPIRES must be an ISO date-time with a zone, like 2027-01-31T00:00:00Z; got {word}")
    return time.timestamp()


def _iso(unix_time: float) -> str:
    return datetime.datetime.fromtimestamp(unix_time, datetime.UTC).isoformat()
