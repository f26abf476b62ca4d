"""Errors that cross a room: rooms above raise them, ``serving.rpc`` maps them to gRPC statuses."""

from __future__ import annotations


class NotServing(Exception):
    """The server takes no requests now: it warms up, drains, or has stopped."""


class QueueFull(Exception):
    """As many requests wait for an engine as may wait."""


class DuplicateRequest(Exception):
    """A request of the same id is still running."""


class GenerationFailed(Exception):
    """The engine ended the request with an error."""


class NotKept(Exception):
    """A subscriber cannot go on from where it was: what came after is not kept, or never was."""


class FellBehind(Exception):
    """A subscriber reads more slowly than the caches change."""


class InvalidField(ValueError):
    """A field holds a value that no server could serve; the text names both."""


class Unsupported(Exception):
    """A field asks for something that this server does not do; the text names it."""


class Precondition(Exception):
    """The model or the server lacks what a request needs; the text says what to do."""


def require(good: bool, field: str, rule: str, value: object = None) -> None:
    """Raises InvalidField: ``field`` must ``rule``."""
    if not good:
        raise InvalidField(f"{field} must {rule}" + ("" if value is None else f", got {value}"))


class DevicesLost(RuntimeError):
    """The devices no longer hold what a step needs; only a new process can serve on."""


class Unauthenticated(Exception):
    """A call without a key that is good now; the text says what is wrong, and never the key."""


class Interrupted(Exception):
    """The warm-up ends early, because the server is to stop."""
