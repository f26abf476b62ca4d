"""API keys: the file that holds them, and the check of a call's key."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gimbal_jax.exceptions import Unauthenticated

MIN_KEY_LENGTH = 16
GATEWAY = "gateway"
"""Name of our own HTTP gateway as a client. No key may have this name."""

_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # the form of a bearer token (RFC 6750)


@dataclass(frozen=True)
class Key:
    """One API key, without the key itself."""

    digest: bytes
    """SHA-256 of the key."""
    name: str
    expires: float | None = None
    """Unix time in seconds; None if the key does not expire."""


def new_key(key: str, name: str, expires: float | None = None) -> Key:
    return Key(hashlib.sha256(key.encode()).digest(), name, expires)


def read_text(field: str, path: Path) -> str:
    """Read an ASCII file of keys or certificates. Raises ValueError."""
    try:
        return path.read_text("ascii")
    except OSError as error:
        raise ValueError(f"{field} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{field} {path}: must be plain ASCII text") from error


def check_key(key: str) -> None:
    """Raise ValueError if ``key`` is too short or cannot be a bearer token. The error does not contain the key."""
    if not _KEY.fullmatch(key) or len(key) < MIN_KEY_LENGTH:
        raise ValueError(f"a key is at least {MIN_KEY_LENGTH} letters, digits and -._~+/ (= at the end)")


def read_key_file(field: str, path: Path, add: Callable[[int, Sequence[str]], None]) -> None:
    """Call ``add`` with the number and the words of each line that is not empty; ``#`` starts a comment.

    Raises ValueError that names ``field``, the file and the line, for an error of ``add`` too.
    """
    lines = read_text(field, path).splitlines()
    filled = [(number, words) for number, line in enumerate(lines, 1) if (words := line.partition("#")[0].split())]
    if not filled:
        raise ValueError(f"{field} {path}: contains no key")
    for number, words in filled:
        try:
            add(number, words)
        except ValueError as error:
            raise ValueError(f"{field} {path}, line {number}: {error}") from error


def load_keys(path: Path) -> tuple[Key, ...]:
    """Load the keys of a file with one ``KEY [NAME] [EXPIRES]`` a line; ``#`` starts a comment.

    EXPIRES is an ISO date-time with a zone. A key without a name gets the start of its hash as name.
    Raises ValueError that names the line, never the key.
    """
    keys: dict[bytes, Key] = {}

    def add(number: int, words: Sequence[str]) -> None:
        key = _parse_key(words)
        if key.digest in keys:
            raise ValueError("the key is in the file twice")
        keys[key.digest] = key

    read_key_file("api_keys", path, add)
    return tuple(keys.values())


def authenticate(authorization: str | None, keys: Collection[Key], now: float) -> Key:
    """Return the key of a call's ``authorization`` metadata. Raises Unauthenticated.

    ``now`` is Unix time in seconds.
    """
    if authorization is None:
        raise Unauthenticated("no API key: the call needs the metadata 'authorization: Bearer KEY'")
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("authorization must be 'Bearer KEY'")
    digest = hashlib.sha256(given.strip().encode()).digest()
    # Hashes have equal length, and each is compared in constant time, so the duration reveals nothing of a key.
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
    check_key(key)
    if name == GATEWAY:
        raise ValueError(f"the name {GATEWAY!r} is reserved for the HTTP gateway")
    if _is_time(name):
        raise ValueError(f"{name} is in the place of the name; EXPIRES comes after the name")
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
