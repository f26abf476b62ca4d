"""How tests read a status."""

from gimbal_jax.client.records import ServerStatus
from gimbal_jax.serving.core.status import Status


def per_engine(status: Status | ServerStatus, name: str) -> tuple:
    """Return one field of the status of every engine."""
    return tuple(getattr(engine, name) for engine in status.engines)
