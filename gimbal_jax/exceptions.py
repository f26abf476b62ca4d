"""Errors that one room raises and another catches. ``serving.rpc`` maps most of them to gRPC statuses."""

from __future__ import annotations


class NotServing(Exception):
    """The server accepts no requests, because it warms up, drains or has stopped."""


class QueueFull(Exception):
    """The queue of an engine has its maximum number of waiting requests."""


class DuplicateRequest(Exception):
    """A request with the same id is still running."""


class GenerationFailed(Exception):
    """The engine ended the request with an error."""


class NotKept(Exception):
    """A subscriber asked for changes after a number that the log does not hold."""


class FellBehind(Exception):
    """A subscriber read more slowly than the caches changed."""


class InvalidField(ValueError):
    """A field has an invalid value. The message names both."""


class Unsupported(Exception):
    """A field asks for something that this server does not support. The message names the field."""


class Precondition(Exception):
    """The model or the server lacks something that a request needs. The message gives the remedy."""


def require(good: bool, field: str, rule: str, value: object = None) -> None:
    """Raise InvalidField unless ``good``. Its message is "``field`` must ``rule``, got ``value``"."""
    if not good:
        raise InvalidField(f"{field} must {rule}" + ("" if value is None else f", got {value}"))


class DevicesLost(RuntimeError):
    """The devices lost data that every step needs. Only a new process can serve."""


class Unauthenticated(Exception):
    """A call has no valid key. The message gives the reason, never the key."""


class Interrupted(Exception):
    """The warm-up ended early, because the server stops."""
