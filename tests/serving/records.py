"""Records of requests that have ended, made up."""

from typing import Any

from gimbal_jax.serving.frontend.record import Origin, RequestRecord

RECORD: dict[str, Any] = {
    "request_id": "r-1",
    "origin": Origin("ipv4:127.0.0.1:4711"),
    "engine": 1,
    "rule": "least_score",
    "priority": 0,
    "cached_tokens": 8,
    "prompt_tokens": 12,
    "output_tokens": 5,
    "outcome": "length",
    "error": "",
    "arrival": 100.0,
    "queue_s": 0.25,
    "first_token_s": 1.0,
    "total_s": 3.0,
}


def ended(**changes: Any) -> RequestRecord:
    """A request that waited 0.25 s, had its first token after 1 s and the last of its 5 after 3 s."""
    return RequestRecord(**(RECORD | changes))
